"""The measuring half of ``benchmarks.rank``: needs a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.rank import ROW_BYTES, cut_layers, decode_load, floors
from benchmarks.timeline import by_kernel, spans_of
from torch import Tensor

from k3stack.config.geometry import ModelGeometry
from k3stack.config.layout import ParallelLayout
from k3stack.estimate.floor import decode_floor
from k3stack.estimate.pools import BlockLayout, block_layout
from k3stack.estimate.work import RankModel, experts_touched
from k3stack.kernels.moe import reference as moe_reference
from k3stack.kernels.mxfp4.weight import Mxfp4Weight
from k3stack.models import dummy
from k3stack.models.batch import ForwardBatch
from k3stack.models.decode_batch import DecodeBatch
from k3stack.models.emulate import busiest_to, choose_always
from k3stack.models.layers.ffn import MoeFfn
from k3stack.models.layers.mla import MlaAttention
from k3stack.models.network import Model
from k3stack.models.share import rank_share
from k3stack.models.views import ArenaViews

DEVICE = torch.device("cuda", 0)
READ_BYTES = 8 << 30
REPEATS, WARM = 20, 3
GOOD = 0.02
"""Largest relative distance of a kernel's result from plain torch's at the same size."""


@triton.jit
def _read_kernel(x, out, per_program, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * per_program
    acc = tl.zeros([BLOCK], tl.int32)
    for i in range(0, per_program, BLOCK):
        acc ^= tl.load(x + begin + i + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def timed(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median milliseconds of ``run`` on the device."""
    for _ in range(WARM):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in marks:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks)


def read_rate() -> float:
    """Best bytes per second at which 8 GiB are read."""
    x = torch.ones(READ_BYTES // 4, dtype=torch.int32, device=DEVICE)
    best = 0.0
    for programs, block, warps in ((132 * 8, 4096, 8), (132 * 16, 4096, 8), (132 * 32, 2048, 4), (1 << 16, 8192, 8)):
        per = x.numel() // programs // block * block
        out = torch.empty(programs, dtype=torch.int32, device=DEVICE)
        ms = timed(lambda p=programs, o=out, n=per, b=block, w=warps: _read_kernel[(p,)](x, o, n, BLOCK=b, num_warps=w))
        best = max(best, per * programs * 4 / ms * 1e3)
    return best


def gemm_rate(m: int = 8192) -> float:
    """bf16 operations per second of one large product on random data."""
    a, b = (torch.randn(m, 8192, device=DEVICE).bfloat16(), torch.randn(8192, 8192, device=DEVICE).bfloat16())
    return 2 * m * 8192 * 8192 / timed(lambda: a @ b) * 1e3


class Rank:
    """A rank's model with an arena full of random states and cache rows."""

    def __init__(self, args: argparse.Namespace, geometry: ModelGeometry, layout: ParallelLayout) -> None:
        whole = cut_layers(geometry, args.layers)
        self.geometry, share = rank_share(whole, layout, args.rank)
        self.model = Model(self.geometry, dtype=torch.bfloat16, device=DEVICE, share=share)
        dummy.fill(self.model)
        self.model.finish()
        self.row_dtype = torch.bfloat16 if args.kv_cache_dtype == "bfloat16" else torch.float8_e4m3fn
        self.layout: BlockLayout = block_layout(
            self.geometry, recurrent_itemsize=4, conv_itemsize=2, row_itemsize=ROW_BYTES[args.kv_cache_dtype]
        )
        self._draws: dict[int, Tensor] = {}

    def arena(self, rows: int, tokens: int) -> None:
        """Room for ``rows`` states and as many sequences of ``tokens``."""
        self.pages = -(-tokens // self.layout.page_tokens)
        self.slabs = -(-self.pages // self.layout.pages_per_block)
        blocks = rows + rows * self.slabs
        self.buffer = torch.zeros(blocks * self.layout.block_bytes, dtype=torch.uint8, device=DEVICE)
        types = {"state_dtype": torch.float32, "window_dtype": torch.bfloat16, "row_dtype": self.row_dtype}
        self.views = ArenaViews(self.buffer, self.layout, self.geometry, **types)
        self.first_page = rows * self.layout.pages_per_block
        for layer in range(len(self.geometry.kda_layers)):
            self.views.recurrent(layer)[:rows].normal_(0.0, 0.1)
            self.views.window(layer)[:rows].normal_()
        for layer in range(len(self.geometry.mla_layers)):
            cache = self.views.rows(layer)
            for page in range(self.first_page, blocks * self.layout.pages_per_block, 512):
                part = cache[page : page + 512]
                part.copy_(torch.randn(part.shape, device=DEVICE).to(self.row_dtype))

    def decode_batch(self, rows: int, context: int) -> DecodeBatch:
        """Rows that each see ``context`` tokens before their new one; their pages fill blocks that lie anywhere, as a
        prompt's do in the engine's arena."""
        batch = DecodeBatch(rows, self.pages, DEVICE)
        batch.ids.random_(0, self.geometry.vocab)
        batch.blocks.copy_(torch.arange(rows))
        per_block = self.layout.pages_per_block
        first = torch.randperm(rows * self.slabs, device=DEVICE).view(rows, self.slabs, 1) * per_block + self.first_page
        order = first + torch.arange(per_block, device=DEVICE)
        batch.page_table.copy_(order.view(rows, -1)[:, : self.pages])
        batch.lengths.fill_(context + 1)
        return batch

    def route(self, tokens: int, total_experts: int, routing: str) -> list[int]:
        """From now on layers choose experts drawn beforehand. ``mean``: of uniform draws that one is taken that touches
        as many experts here as the mean rank's; ``slowest``: one draw, seen from the rank of which it touches most. The
        router itself still runs. Returns how many each layer touches."""
        moe = self.geometry.moe
        touched = []
        for layer in self.geometry.moe_layers:
            ffn = self.model.layers[layer].ffn
            assert isinstance(ffn, MoeFfn)
            wanted = experts_touched(total_experts, moe.top_k, tokens) * len(ffn.local) / total_experts
            some = 12 if routing == "mean" else 1
            drawn = [torch.rand(tokens, total_experts, device=DEVICE).topk(moe.top_k, -1).indices for _ in range(some)]
            if routing == "slowest":
                drawn = [busiest_to(drawn[0], tokens, ffn.local, total_experts)]
            counts = [self._touched(ids, ffn.local) for ids in drawn]
            best = min(range(len(drawn)), key=lambda i: abs(counts[i] - wanted))
            touched.append(counts[best])
            choose_always(ffn, self.model.kernels, drawn[best])
        return touched

    @staticmethod
    def _touched(ids: Tensor, local: range) -> int:
        found = ids.unique()
        return int(((found >= local.start) & (found < local.stop)).sum())

    def check_experts(self, tokens: int) -> float:
        """Relative distance of the experts' kernel from plain torch on one layer."""
        layer = self.geometry.moe_layers[0]
        ffn = self.model.layers[layer].ffn
        assert isinstance(ffn, MoeFfn)
        moe = ffn.moe
        z = torch.randn(tokens, moe.latent or self.geometry.hidden, device=DEVICE).bfloat16()
        n = len(ffn.local)
        ids = torch.rand(tokens, n, device=DEVICE).topk(min(moe.top_k, n), -1).indices
        weights = torch.softmax(torch.randn(ids.shape, device=DEVICE), -1)
        own = (ffn.local.start, moe.experts)
        mine = self.model.kernels.experts(z, ids + ffn.local.start, weights, ffn.w13, ffn.w2, ffn.act, *own)
        plain = [[w.plain(e, z.dtype) if isinstance(w, Mxfp4Weight) else w[e] for e in range(n)]
                 for w in (ffn.w13, ffn.w2)]  # fmt: skip
        return relative(mine, moe_reference.experts(z, ids, weights, *plain, ffn.act))  # type: ignore[arg-type]

    def check_mla(self, rows: int, context: int) -> float:
        """Relative distance of decode attention from plain torch on one layer."""
        from k3stack.kernels.mla import cpu as plain

        attention = next(a for x in self.model.layers if isinstance(a := x.attention, MlaAttention))
        q = torch.randn(rows, attention.heads, attention.qk_dim, device=DEVICE).bfloat16()
        batch, cache = self.decode_batch(rows, context), self.views.rows(0)
        mine = self.model.kernels.mla_decode(q, cache, batch.page_table, batch.lengths, attention.kv_b)
        theirs = plain.decode(q, cache.float(), batch.page_table, [context + 1] * rows, attention.kv_b)
        return relative(mine, theirs)


def relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm())


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """``run`` as a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def part_runs(rank: Rank, batch: DecodeBatch | ForwardBatch) -> dict[str, Callable[[], None]]:
    """Each part of the network over all of its layers, on inputs of the right shape."""
    model, geometry, views, step = rank.model, rank.geometry, rank.views, batch.step
    x = torch.randn(len(batch.ids), geometry.hidden, device=DEVICE).bfloat16()
    kda = [layer for i, layer in enumerate(model.layers) if i in geometry.kda_layers]
    mla = [layer for i, layer in enumerate(model.layers) if i in geometry.mla_layers]
    moe = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeFfn)]
    kernels, eps = model.kernels, geometry.rms_eps
    latent = x if geometry.moe.latent is None else x[:, : geometry.moe.latent].contiguous()
    choice = [ffn.kernels.route(ffn.kernels.router_logits(x, ffn.router), ffn.bias, ffn.moe.top_k, 1.0, True)
              for ffn in moe]  # fmt: skip

    no_experts = [dataclasses.replace(ffn.kernels, experts=lambda z, *_: torch.empty_like(z), experts_plus=None)
                  for ffn in moe]  # fmt: skip

    def attention(layers: list[Any]) -> Callable[[], None]:
        def run() -> None:
            if isinstance(batch, DecodeBatch):
                batch.step.forget()
            for layer in layers:
                layer.attention(x, step, views)

        return run

    def experts() -> None:
        for ffn, (ids, weights) in zip(moe, choice, strict=True):
            own = (ffn.local.start, ffn.moe.experts)
            ffn.kernels.experts(latent, ids, weights, ffn.w13, ffn.w2, ffn.act, *own)

    def rest() -> None:
        for ffn, without in zip(moe, no_experts, strict=True):
            kept, ffn.kernels = ffn.kernels, without
            ffn(x, 0, None)
            ffn.kernels = kept

    def residual() -> None:
        stream = model.stream(x)
        for i, layer in enumerate(model.layers):
            stream.attention_input(i, layer.input_norm)
            stream.attention_output(i, x)
            stream.ffn_input(i, layer.post_norm)
            stream.ffn_output(i, x)
        kernels.rms_norm(stream.final(), model.norm, eps)

    def dense() -> None:
        for layer in model.layers:
            if not isinstance(layer.ffn, MoeFfn):
                layer.ffn(x, 0, None)

    def head() -> None:
        kernels.linear(x, model.lm_head).float()

    return {
        "kda": attention(kda), "mla": attention(mla), "experts": experts, "shared+latent+router": rest,
        "residual": residual, "dense": dense, "head": head,
    }  # fmt: skip


def measure(
    args: argparse.Namespace, geometry: ModelGeometry, layout: ParallelLayout, model: RankModel
) -> list[dict[str, Any]]:
    """One report a batch size, or one for the chunk."""
    begun = time.perf_counter()
    with torch.inference_mode():
        rate, gemm = read_rate(), gemm_rate()
        torch.cuda.empty_cache()
        rank = Rank(args, geometry, layout)
        torch.cuda.synchronize()
        say(f"rank built in {time.perf_counter() - begun:.1f} s; read rate {rate / 1e12:.3f} TB/s")
        about = {
            "model": args.model,
            "layout": layout.as_dict(),
            "rank": args.rank,
            "routing": args.routing,
            "kv_cache_dtype": args.kv_cache_dtype,
            "layers": rank.geometry.layers,
            "device": torch.cuda.get_device_name(DEVICE),
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
            "date": time.strftime("%Y-%m-%d"),
            "read_tb_s": round(rate / 1e12, 3),
            "weight_gib": round(rank.model.weight_bytes / (1 << 30), 2),
        }
        if args.prefill is not None:
            from benchmarks.rank_prefill import measure_prefill

            reports = measure_prefill(args, rank, model, gemm, geometry.moe.experts)
            return [about | report for report in reports]
        rank.arena(max(args.batch), args.context + 1)
        reports = []
        for batch in args.batch:
            reports.append(about | _decode(args, rank, model, batch, rate, geometry.moe.experts))
            say(f"batch {batch}: {reports[-1]['step_ms']} ms, ratio {reports[-1]['ratio']}")
        return reports


def _decode(
    args: argparse.Namespace, rank: Rank, model: RankModel, batch: int, rate: float, total_experts: int
) -> dict[str, Any]:
    checks = {"experts": rank.check_experts(batch), "mla": rank.check_mla(min(batch, 4), args.context)}
    bad = {name: value for name, value in checks.items() if not value < GOOD}
    if bad:
        raise SystemExit(f"kernels are wrong at this size (relative distance): {bad}")
    touched = rank.route(batch, total_experts, args.routing)
    own = rank.decode_batch(batch, args.context)

    def step() -> None:
        own.step.forget()
        rank.model.forward(own, rank.views)  # type: ignore[arg-type]

    replay = captured(step)
    ms = timed(replay)
    load = decode_load(batch, args.context)
    floor = floors(model, batch, args.context)
    floor_ms = floor["floor_gb"] * 1e12 / rate
    parts, timeline = {}, {}
    if args.timeline:
        timeline = {"timeline": by_kernel(spans_of(replay))}
    if not args.no_parts:
        for name, run in part_runs(rank, own).items():
            part_ms = timed(captured(run))
            nbytes = sum(decode_floor(model, load)[part] for part in name.split("+"))
            parts[name] = {"ms": round(part_ms, 4), "floor_ms": round(nbytes / rate * 1e3, 4)}
    return {
        "batch": batch,
        "context": args.context,
        "step_ms": round(ms, 4),
        "floor_ms": round(floor_ms, 4),
        "floor_gb": floor["floor_gb"],
        "ratio": round(ms / floor_ms, 3),
        "parts": parts,
        "collectives": floor["collectives"],
        "experts_touched": round(statistics.mean(touched), 2) if touched else 0,
        "experts_of_the_floor": round(model.touched(batch), 2),
        "checked": {k: round(v, 5) for k, v in checks.items()},
        **timeline,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
