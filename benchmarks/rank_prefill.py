"""One rank's chunk of a prompt, for ``benchmarks.rank --prefill``: needs a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.rank import prefill_load
from benchmarks.rank_gpu import DEVICE, GOOD, Rank, part_runs, relative, timed
from benchmarks.timeline import by_kernel, spans_of

from k3stack.estimate.work import RankModel
from k3stack.kernels.kda import reference as kda_reference
from k3stack.kernels.kda import triton_chunk as kda
from k3stack.kernels.kda.layout import chunk_tiles
from k3stack.kernels.norm import reference as norm_reference
from k3stack.models import sharded
from k3stack.models.batch import ForwardBatch, HostIndex
from k3stack.models.layers.kda import KdaAttention
from k3stack.models.layers.mla import MlaAttention

REPEATS = 5
CHECKED, CHECKED_EXPERTS = 200, 1024
"""Tokens of the checks."""


class Alone:
    """An ``Exchange`` of one rank without the others: nothing is sent or copied, but counted. What a gather would bring
    is made up once: random numbers, experts drawn uniformly."""

    def __init__(self, tokens: int, ranks: int, experts: int) -> None:
        self.share = slice(0, tokens // ranks)
        self.tokens, self.experts = tokens, experts
        self.count = self.bytes = 0
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def gather(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = tuple(self._others(p) for p in parts)
        self._note(whole)
        return whole

    def scatter(self, *partials: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._note(partials)
        return tuple(p[self.share] for p in partials)

    def _note(self, whole: tuple[torch.Tensor, ...]) -> None:
        self.count += 1
        self.bytes += sum(w.nbytes for w in whole)

    def _others(self, part: torch.Tensor) -> torch.Tensor:
        key = (part.dtype, *part.shape[1:])
        if key not in self._made:
            if part.dtype == torch.int64:
                self._made[key] = torch.rand(self.tokens, self.experts, device=DEVICE).topk(part.shape[1], -1).indices
            else:
                self._made[key] = torch.randn(self.tokens, *part.shape[1:], device=DEVICE).abs().to(part.dtype)
        return self._made[key]


def measure_prefill(
    args: argparse.Namespace, rank: Rank, model: RankModel, gemm: float, total_experts: int
) -> list[dict[str, Any]]:
    """A chunk of ``args.prefill`` tokens at the start of its prompt, whole and in parts: first as others split it, each
    rank doing all that is not cut for all tokens, then token-sharded."""
    tokens = args.prefill
    rank.arena(1, tokens)
    checks = {"experts": rank.check_experts(min(tokens, CHECKED_EXPERTS)), "kda": check_kda(rank)}
    bad = {name: value for name, value in checks.items() if not value < GOOD}
    if bad:
        raise SystemExit(f"kernels are wrong at this size (relative distance): {bad}")
    about = {"prefill": tokens, "checked": {k: round(v, 5) for k, v in checks.items()}}
    batch = prompt(rank, tokens)
    exchange = Alone(tokens, model.layout.tp, total_experts)
    split = RankModel(model.geometry, model.layout, precision=model.precision, sharded_prefill=True)
    second = about | _sharded(args, rank, split, gemm, batch, exchange)
    rank.route(tokens, total_experts, args.routing)
    ms = timed(lambda: rank.model.forward(batch, rank.views), repeats=REPEATS)
    timeline = kernels(args, lambda: rank.model.forward(batch, rank.views))
    work = model.work(prefill_load(tokens))
    first = about | {
        "way": "copied",
        **_rates(ms, work.flops, gemm),
        "parts": {} if args.no_parts else parts(part_runs(rank, batch)),
        "collectives": {"count": work.sums, "bytes": round(work.sum_bytes)},
        **timeline,
    }
    return [first, second]


def kernels(args: argparse.Namespace, run: Callable[[], Any]) -> dict[str, Any]:
    """What ``run`` does on the device, kernel by kernel, if that is wanted."""
    return {"timeline": by_kernel(spans_of(run))} if args.timeline else {}


def _sharded(
    args: argparse.Namespace, rank: Rank, model: RankModel, gemm: float, batch: ForwardBatch, exchange: Alone
) -> dict[str, Any]:
    def run() -> None:
        exchange.count = exchange.bytes = 0
        sharded.forward(rank.model, batch, rank.views, exchange)

    ms = timed(run, repeats=REPEATS)
    collectives = {"count": exchange.count, "bytes": exchange.bytes}
    layers, views, step = rank.model.layers, rank.views, batch.step
    x = torch.randn(exchange.share.stop, rank.geometry.hidden, device=DEVICE).bfloat16()

    def attention(kind: type) -> Callable[[], None]:
        own = [layer.attention for layer in layers if isinstance(layer.attention, kind)]
        return lambda: [a.sharded(x, step, views, exchange) for a in own] and None

    runs = {
        "kda": attention(KdaAttention),
        "mla": attention(MlaAttention),
        "ffn": lambda: [layer.ffn.sharded(x, exchange) for layer in layers] and None,
    }
    return {
        "way": "token_sharded",
        **_rates(ms, model.work(prefill_load(args.prefill)).flops, gemm),
        "parts": {} if args.no_parts else parts(runs),
        "collectives": collectives,
        **kernels(args, run),
    }


def _rates(ms: float, flops: float, gemm: float) -> dict[str, Any]:
    rate = flops / ms * 1e3
    return {
        "step_ms": round(ms, 3),
        "floor_ms": round(flops / gemm * 1e3, 3),
        "tflop": round(flops / 1e12, 1),
        "tflops": round(rate / 1e12, 1),
        "gemm_tflops": round(gemm / 1e12, 1),
        "of_gemm_rate": round(rate / gemm, 3),
    }


def parts(runs: dict[str, Callable[[], None]]) -> dict[str, Any]:
    """Milliseconds of each part over all its layers; of the head only one token is wanted."""
    return {name: {"ms": round(timed(run, repeats=3), 3)} for name, run in runs.items() if name != "head"}


def prompt(rank: Rank, tokens: int) -> ForwardBatch:
    """The first ``tokens`` of a prompt, its state in block 0."""
    pages = torch.arange(rank.pages, device=DEVICE) + rank.first_page
    return ForwardBatch(
        ids=torch.randint(0, rank.geometry.vocab, (tokens,), device=DEVICE),
        cu=[0, tokens],
        starts=[0],
        state_blocks=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        page_table=pages.unsqueeze(0),
        logit_index=torch.tensor([tokens - 1], device=DEVICE),
        host=HostIndex([0], [tokens - 1]),
    )


def check_kda(rank: Rank) -> float:
    """Relative distance of the chunk kernels from the formulas of one token after the other, at this rank's heads."""
    kda_sizes = rank.geometry.kda
    heads, k, width = kda_sizes.heads, kda_sizes.head_dim, kda_sizes.width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    raw, f, gate, b = (draw(CHECKED, n).bfloat16() for n in (3 * width, width, width, heads))
    conv, exp_a, dt_bias, norm = draw(4, 3 * width) * 0.5, draw(heads).exp(), draw(width), draw(k)
    windows, states = draw(2, 3, 3 * width).bfloat16(), draw(2, heads, k, k)
    window, state, bound = windows[1].clone(), states[1].clone(), kda_sizes.gate_lower_bound
    out = torch.empty(CHECKED, width, dtype=torch.bfloat16, device=DEVICE)
    tiles = chunk_tiles([0], [CHECKED], [1], DEVICE)
    kda.chunks(raw, f, gate, b, conv, exp_a, dt_bias, norm, windows, states, tiles, bound, 1e-5, out)
    qkv, _ = kda_reference.short_conv(raw, conv, window)
    q, key, v = qkv.view(CHECKED, 3, heads, k).unbind(1)
    g = kda_reference.log_decay((f.float() + dt_bias).view(CHECKED, heads, k), exp_a, bound)
    q, key = norm_reference.l2_norm(q, 1e-6), norm_reference.l2_norm(key, 1e-6)
    o, state = kda_reference.recurrent(q, key, v, g, torch.sigmoid(b.float()), state)
    y = norm_reference.gated_rms_norm(o, gate.view(CHECKED, heads, k), norm, 1e-5)
    return max(relative(out, y.reshape(CHECKED, width)), relative(states[1], state))
