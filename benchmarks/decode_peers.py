"""Each part of a rank's decode step beside what cuBLAS, torch and fla-core make of it, in one run on one GPU.

Real geometry and weights of some layers of one rank (``benchmarks.rank``), the same inputs for both sides; results are
compared first, times are of replayed graphs over all layers at hand. The peer has its best where there are two ways:
attention over latent rows by torch's fused attention or by two batched products. Its experts are one grouped product of
weights that are bfloat16 already, its cache rows lie in one piece and its tokens are sorted beforehand: neither is
timed. fla-core must be importable.

    python -m benchmarks.decode_peers --batch 1 16 64 --layers 9
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.rank import arguments, config_of
from benchmarks.rank_gpu import DEVICE, Rank, captured, part_runs, relative, timed
from fla.modules.causal_conv1d.ops import causal_conv1d_update
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from torch import Tensor
from torch.nn import functional as F

from k3stack.config.layout import ParallelLayout
from k3stack.models.decode_batch import DecodeBatch
from k3stack.models.layers.ffn import MoeFfn
from k3stack.models.layers.kda import KdaAttention
from k3stack.models.layers.mla import MlaAttention

CLOSE = 0.03
"""Largest relative distance of the two sides' results; both are in bfloat16."""


class KdaPeer:
    """cuBLAS, fla's one-token convolution and recurrence, its gated norm."""

    def __init__(self, part: KdaAttention, rank: Rank, rows: int) -> None:
        self.part, self.rows = part, rows
        self.taps = part.conv.T.contiguous()
        # fla keeps as many values as there are taps; the oldest falls out before it is used.
        window = rank.views.window(part.index)[:rows].float().transpose(1, 2)
        self.window = F.pad(window, (1, 0)).contiguous()
        self.states = rank.views.recurrent(part.index)[:rows].clone()
        self.a_log = part.exp_a.log()

    def __call__(self, x: Tensor) -> Tensor:
        part, heads, k = self.part, self.part.heads, self.part.head_dim
        raw, gate, b, _, f, low, _ = F.linear(x, part.w_in).split(part.sizes, dim=1)
        qkv, _ = causal_conv1d_update(raw.contiguous(), self.window, weight=self.taps, activation="silu")
        q, key, v = (y.contiguous().view(self.rows, 1, heads, k) for y in qkv.split(part.width, dim=1))
        f = F.linear(f, part.w_f).view(self.rows, 1, heads, k)
        o, _ = fused_recurrent_kda_fwd(
            q, key, v, f, b.reshape(self.rows, 1, heads).contiguous(), self.a_log, part.dt_bias, self.states,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            lower_bound=part.lower_bound,
        )  # fmt: skip
        if part.w_g is not None:
            gate = F.linear(low, part.w_g)
        y = rms_norm_gated(o.reshape(-1, k), gate.reshape(-1, k), part.norm, None, activation="sigmoid", eps=part.eps)
        return F.linear(y.view(self.rows, part.width), part.w_out)


class MlaPeer:
    """cuBLAS, and torch's attention over latent rows that lie in one piece."""

    def __init__(self, part: MlaAttention, rank: Rank, batch: DecodeBatch, context: int) -> None:
        self.part, self.rows, self.context = part, len(batch.ids), context
        cache = rank.views.rows(part.index)
        self.cache = torch.stack([cache[pages].view(-1, cache.shape[2])[: context + 1] for pages in batch.page_table])
        self.fused = False

    def _attend(self, q: Tensor) -> Tensor:
        """q [rows, heads, latent + rope] -> [rows, heads, latent]."""
        scale, latent = self.part.qk_dim**-0.5, self.part.latent
        if self.fused:
            kv = self.cache.unsqueeze(1)
            return F.scaled_dot_product_attention(q.unsqueeze(1), kv, kv[..., :latent], scale=scale).squeeze(1)
        scores = torch.bmm(q, self.cache.mT).float().mul_(scale)
        return torch.bmm(torch.softmax(scores, -1).to(q.dtype), self.cache[..., :latent])

    def __call__(self, x: Tensor) -> Tensor:
        part, wide = self.part, self.cache.shape[2]
        weight = torch.cat((part.w_kv, part.w_in)) if part.joined is None else part.joined.weight
        kv, q, gate = F.linear(x, weight).split((wide, *part.sizes), dim=1)
        row = self.cache[:, self.context]
        row[:, : part.latent] = F.rms_norm(kv[:, : part.latent], (part.latent,), part.kv_norm, part.latent_eps)
        row[:, part.latent :] = kv[:, part.latent :]
        if part.q_lora is not None:
            q = F.linear(F.rms_norm(q, (part.q_lora,), part.q_norm, part.latent_eps), part.w_q)
        shared = wide - part.latent
        nope, rope = q.view(self.rows, part.heads, part.qk_dim).split((part.qk_dim - shared, shared), dim=2)
        up, down = part.kv_b.split((part.qk_dim - shared, part.kv_b.shape[1] - part.qk_dim + shared), dim=1)
        absorbed = torch.bmm(nope.transpose(0, 1), up).transpose(0, 1)
        o = self._attend(torch.cat((absorbed, rope), 2))
        o = torch.bmm(o.transpose(0, 1), down.mT).transpose(0, 1).reshape(self.rows, part.out_width)
        if part.output_gate:
            o = o * torch.sigmoid(gate)
        return F.linear(o, part.w_out)


class ExpertsPeer:
    """torch's grouped product over weights made bfloat16 beforehand, tokens sorted beforehand."""

    def __init__(self, ffn: MoeFfn, z: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.act, self.tokens, self.width = ffn.act, z.shape[0], z.shape[1]
        here = (ids >= ffn.local.start) & (ids < ffn.local.stop)
        self.token, place = here.nonzero(as_tuple=True)
        local = ids[self.token, place] - ffn.local.start
        order = local.argsort(stable=True)
        self.token, local = self.token[order], local[order]
        self.weight = weights[self.token, place[order]].unsqueeze(1)
        touched, counts = local.unique(return_counts=True)
        self.ends = counts.cumsum(0).to(torch.int32)
        self.w13, self.w2 = (torch.stack([w.plain(int(e), z.dtype) for e in touched]).mT for w in (ffn.w13, ffn.w2))

    def __call__(self, z: Tensor) -> Tensor:
        h = torch._grouped_mm(z[self.token], self.w13, offs=self.ends)
        y = torch._grouped_mm(self.act(h), self.w2, offs=self.ends)
        out = torch.zeros(self.tokens, self.width, dtype=torch.float32, device=z.device)
        return out.index_add_(0, self.token, y * self.weight).to(z.dtype)


def block_peer(ffn: MoeFfn, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A block without its experts: latent products and shared MLP, router and choice, by cuBLAS and torch."""
    moe = ffn.moe
    scores = torch.sigmoid(F.linear(x, ffn.router).float())
    ids = torch.topk(scores + ffn.bias, moe.top_k, -1).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * moe.scaling_factor
    z = F.linear(x, ffn.down)
    if ffn.latent_norm is not None:
        z = F.rms_norm(z, (z.shape[1],), ffn.latent_norm, ffn.eps)
    y = F.linear(z, ffn.up)
    shared = F.linear(ffn.act(F.linear(x, ffn.shared.w13)), ffn.shared.w2)
    return y + shared, ids, weights


def mix_peer(bank: Tensor, score: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The residual mix of [T, n, D] and the norm of what comes out, by torch."""
    wide = bank.float()
    s = (wide @ score) * torch.rsqrt(wide.square().mean(-1) + eps)
    y = torch.bmm(torch.softmax(s, -1).unsqueeze(1), wide).squeeze(1).to(bank.dtype)
    return F.rms_norm(y, (y.shape[1],), norm, eps)


def peers(rank: Rank, batch: DecodeBatch, context: int) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Each part of ``part_runs`` by others, over the same layers, and how far results of one layer are apart."""
    model, geometry, rows = rank.model, rank.geometry, len(batch.ids)
    x = torch.randn(rows, geometry.hidden, device=DEVICE).bfloat16()
    kda = [KdaPeer(a, rank, rows) for layer in model.layers if isinstance(a := layer.attention, KdaAttention)]
    mla = [MlaPeer(a, rank, batch, context) for layer in model.layers if isinstance(a := layer.attention, MlaAttention)]
    moe = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeFfn)]
    z = x[:, : geometry.moe.latent].contiguous()
    chosen = [f.kernels.route(f.kernels.router_logits(x, f.router), f.bias, f.moe.top_k, 1.0, True) for f in moe]
    experts = [ExpertsPeer(f, z, *c) for f, c in zip(moe, chosen, strict=True)]
    own = [(f.local.start, f.moe.experts) for f in moe]
    off = {"kda": relative(kda[0].part(x, batch.step, rank.views), kda[0](x))}
    ours = mla[0].part(x, batch.step, rank.views)
    for peer in mla:
        peer.fused = True
        peer.fused = timed(captured(lambda p=peer: p(x)), 5) < _split_time(peer, x)
    off["mla"] = relative(ours, mla[0](x))
    mine = moe[0].kernels.experts(z, *chosen[0], moe[0].w13, moe[0].w2, moe[0].act, *own[0])
    off["experts"] = relative(mine, experts[0](z)) if len(experts[0].token) else 0.0
    bare = dataclasses.replace(moe[0].kernels, experts=lambda z, *_: z)
    kept, moe[0].kernels = moe[0].kernels, bare
    off["shared+latent+router"] = relative(moe[0](x, 0, None), block_peer(moe[0], x)[0])
    moe[0].kernels = kept
    bank = torch.randn(rows, geometry.residual_rows + 1, geometry.hidden, device=DEVICE).bfloat16()
    score, norm = model.scorers.weights[0, 0, 0], model.layers[0].input_norm
    block, n = geometry.residual_block, geometry.residual_rows + 1
    filled = [min(i // block + 2, n) for i in range(geometry.layers)]

    def residual() -> None:
        for count in filled:
            for _ in range(2):
                bank[:, count - 1] += x
                mix_peer(bank[:, :count], score, norm, geometry.rms_eps)

    runs: dict[str, Callable[[], Any]] = {
        "kda": lambda: [p(x) for p in kda],
        "mla": lambda: [p(x) for p in mla],
        "experts": lambda: [p(z) for p in experts if len(p.token)],
        "shared+latent+router": lambda: [block_peer(f, x) for f in moe],
        "residual": residual,
        "head": lambda: F.linear(x, model.lm_head).float(),
    }
    return runs, off


def _split_time(peer: MlaPeer, x: Tensor) -> float:
    fused, peer.fused = peer.fused, False
    ms = timed(captured(lambda: peer(x)), 5)
    peer.fused = fused
    return ms


def main() -> None:
    args = arguments().parse_args()
    geometry = config_of(args.model)
    with torch.inference_mode():
        rank = Rank(args, geometry, ParallelLayout(tp=args.tp_size, ep=args.ep_size))
        rank.arena(max(args.batch), args.context + 1)
        for rows in args.batch:
            rank.route(rows, geometry.moe.experts, args.routing)
            batch = rank.decode_batch(rows, args.context)
            runs, off = peers(rank, batch, args.context)
            ours = part_runs(rank, batch)
            for name, run in runs.items():
                mine, theirs = timed(captured(ours[name])), timed(captured(run))
                report = {
                    "part": name, "batch": rows, "ours_us": round(mine * 1e3, 1), "peer_us": round(theirs * 1e3, 1),
                    "ours_of_peer": round(mine / theirs, 3), "off": round(off.get(name, 0.0), 5),
                    "device": torch.cuda.get_device_name(DEVICE), "date": time.strftime("%Y-%m-%d"),
                }  # fmt: skip
                print(json.dumps(report), flush=True)
                if not off.get(name, 0.0) < CLOSE:
                    raise SystemExit(f"{name}: the two sides' results are {off[name]:.3f} apart")


if __name__ == "__main__":
    main()
