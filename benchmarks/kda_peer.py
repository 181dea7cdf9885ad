"""KDA of a prompt's chunk beside fla's ``chunk_kda``, in one run on one GPU (fla-core must be importable).

Ours goes from the projections to the gated norm: convolution, norms, gates, the recurrence with its states read from
and written to arena blocks, output norm. fla's ``chunk_kda`` is the recurrence with norms and gates, its state given
and taken; "with the rest" adds its own convolution before and its gated norm after. Results are compared first; times
are of replayed graphs, and also as called.

    python -m benchmarks.kda_peer --tokens 8192 --heads 3 12
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from benchmarks.rank_gpu import captured, relative, timed
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.kda import chunk_kda
from torch import Tensor

from k3stack.kernels.kda import triton_chunk
from k3stack.kernels.kda.layout import chunk_tiles

DEVICE = torch.device("cuda", 0)
WIDTH, TAPS = 128, 4
BOUND, EPS = -5.0, 1e-5


class Case:
    """Projections of ``tokens`` tokens for ``heads`` heads of one sequence that begins."""

    def __init__(self, tokens: int, heads: int) -> None:
        p = heads * WIDTH
        self.tokens, self.heads, self.p = tokens, heads, p

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE)

        self.raw, self.f, self.gate, self.b = (draw(tokens, n).bfloat16() for n in (3 * p, p, p, heads))
        self.conv, self.a_log = draw(TAPS, 3 * p) * 0.5, draw(heads)
        self.exp_a, self.dt_bias, self.norm = self.a_log.exp(), draw(p), draw(WIDTH)
        self.state = draw(1, heads, WIDTH, WIDTH) * 0.1
        self.states = self.state.clone()
        self.windows = torch.zeros(1, TAPS - 1, 3 * p, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty(tokens, p, dtype=torch.bfloat16, device=DEVICE)
        self.tiles = chunk_tiles([0], [tokens], [0], DEVICE)
        self.taps = self.conv.T.contiguous()

    def ours(self) -> Tensor:
        inputs = self.raw, self.f, self.gate, self.b, self.conv, self.exp_a, self.dt_bias, self.norm
        triton_chunk.chunks(*inputs, self.windows, self.states, self.tiles, BOUND, EPS, self.out)
        return self.out

    def recurrence(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """fla's, of the convolved [1, T, 3 P]."""
        q, k, v = (x.reshape(1, self.tokens, self.heads, WIDTH) for x in qkv.split(self.p, dim=2))
        g = self.f.view(1, self.tokens, self.heads, WIDTH)
        found = chunk_kda(
            q, k, v, g, self.b.unsqueeze(0), initial_state=self.state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=True, lower_bound=BOUND, A_log=self.a_log, dt_bias=self.dt_bias,
        )  # fmt: skip
        return found[0], found[1]

    def convolved(self) -> Tensor:
        y, _ = causal_conv1d(self.raw.unsqueeze(0), self.taps, activation="silu", output_final_state=True)
        return y

    def whole(self) -> tuple[Tensor, Tensor]:
        """fla's convolution, recurrence and gated norm: [T, P] and the state."""
        o, state = self.recurrence(self.convolved())
        gate = self.gate.view(-1, WIDTH)
        y = rms_norm_gated(o.reshape(-1, WIDTH), gate, self.norm, None, activation="sigmoid", eps=EPS)
        return y.view(self.tokens, self.p), state


def measure(tokens: int, heads: int) -> dict[str, Any]:
    case = Case(tokens, heads)
    theirs, state = case.whole()
    off = relative(case.ours(), theirs), relative(case.states, state)
    qkv = case.convolved()
    found = {
        "ours": timed(captured(case.ours)),
        "fla_chunk_kda": timed(captured(lambda: case.recurrence(qkv))),
        "fla_with_the_rest": timed(captured(case.whole)),
        "ours_as_called": timed(case.ours),
        "fla_chunk_kda_as_called": timed(lambda: case.recurrence(qkv)),
    }
    about = {"tokens": tokens, "heads": heads, "device": torch.cuda.get_device_name(DEVICE)}
    return about | {"off": [round(x, 4) for x in off], "ms": {name: round(ms, 4) for name, ms in found.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs="+", default=[3, 12, 32])
    args = parser.parse_args()
    with torch.inference_mode():
        for heads in args.heads:
            print(json.dumps(measure(args.tokens, heads)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
