"""Tile shapes of the kernels that stream weights in: microseconds and bytes per second of each at a rank's sizes.

Correct results first, then one line a shape: the best of them, and cuBLAS's where it does the same. Weights rotate, so
that none come from the cache. The best are what ``kernels.moe.triton_decode`` and ``kernels.linear.triton`` have.

    python -m benchmarks.tiles --batch 1 16 64 --processes 14 --seconds 100
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.rank_gpu import captured, relative, timed
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.activation import reference as activation
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.linear import triton as linear
from k3stack.kernels.linear.triton import Tile
from k3stack.kernels.mla import triton as mla
from k3stack.kernels.mla import triton_warp
from k3stack.kernels.moe import reference as moe_reference
from k3stack.kernels.moe import triton as moe
from k3stack.kernels.moe import triton_decode, triton_units
from k3stack.kernels.moe.triton_decode import Warps
from k3stack.kernels.moe.triton_units import Share
from k3stack.kernels.mxfp4.weight import Mxfp4Weight, in_tiles

DEVICE = torch.device("cuda", 0)
EXPERTS, ALL, TOP_K, LATENT, INNER = 56, 896, 16, 3584, 3072
BASE = triton_decode.SOME[0]
WARPS = [
    *(Warps(*w, registers=96) for w in ((1, 4, 2), (1, 4), (1, 4, 1, 3), (1, 4, 1, 2), (1, 2), (2, 2))),
    *(Warps(*w, registers=80) for w in ((1, 4), (2, 2), (4, 1), (4, 1, 1, 2), (8, 1, 1, 2))),
]
SHARES = [Share(*s) for s in ((4, 1, 4, 128), (4, 1, 3, 128), (4, 1, 2, 128), (4, 1, 3, 96, 5), (2, 2, 4, 128))]
TILES = [
    *(Tile(*t) for t in ((16, 128, 4, 4), (32, 128, 4, 3), (16, 64, 4, 4), (16, 64, 4, 3), (32, 64, 4, 4))),
    *(Tile(*t, True, 4096) for t in ((16, 128, 4, 6), (16, 256, 4, 3), (16, 128, 4, 4))),
    *(Tile(*t, False) for t in ((64, 128, 4, 5), (64, 128, 4, 7), (64, 256, 4, 4), (64, 128, 4, 3), (128, 64, 8, 4))),
    Tile(32, 128, 2, 5),
]
ATTENTION = [(chains, programs) for chains in (2, 8) for programs in (264, 396, 528, 792, 1056)]
PRODUCTS = [
    *((5248, 7168), (4864, 7168), (7168, 3584), (3264, 7168), (1728, 7168), (7168, 768), (7168, 384), (768, 128)),
    *((384, 128), (2304, 2304), (2304, 1024), (2304, 4096), (12608, 2304), (4096, 128), (6144, 2304), (10240, 7168)),
    *((2880, 7168), (2304, 7168), (1920, 7168), (1152, 1536), (576, 1536), (7168, 192), (576, 2304)),
]
ROTATED = 160 << 20


def situ(gate_up: Tensor) -> Tensor:
    return activation.situ_glu(gate_up, 4.0, 25.0)


ACT = Glu("situ", 4.0, 25.0, situ)


def weights(rows: int, columns: int) -> Mxfp4Weight:
    """In the stored order."""
    packed = torch.empty(EXPERTS, rows, columns // 2, dtype=torch.uint8, device=DEVICE).random_(0, 256)
    scale = torch.empty(EXPERTS, rows, columns // 32, dtype=torch.uint8, device=DEVICE).random_(118, 122)
    return Mxfp4Weight(packed, scale)


def inputs(batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1000 * batch + seed)
    ids = torch.rand(batch, ALL, device=DEVICE).topk(TOP_K, -1).indices
    if batch == 1:
        ids[ids < EXPERTS] += EXPERTS
        ids[0, 0] = 7 * seed % EXPERTS
    return torch.randn(batch, LATENT, device=DEVICE).bfloat16(), ids, torch.rand(batch, TOP_K, device=DEVICE)


def experts(given: tuple[Tensor, ...], w13: Mxfp4Weight, w2: Mxfp4Weight, shape: tuple[Warps, Warps] | Share) -> Tensor:
    x, ids, share = given
    if isinstance(shape, tuple):
        results = triton_decode.results(x, w13, w2, ACT, moe.group(ids, EXPERTS, 0), TOP_K, shape)
    elif x.shape[0] == 1:
        return triton_units.result_of_one(x, w13, w2, ACT, (ids, share, 0), shape)
    else:
        groups = moe.group(ids, EXPERTS, 0, True)
        results = triton_units.results(x, w13, w2, ACT, groups, (ids, 0), shape)
    return moe.add_up(results, ids, share, 0, EXPERTS)


def compile_some(share: tuple[int, int, tuple[int, ...]]) -> None:
    """Fill Triton's cache with every ``share[1]``-th shape."""
    w13, w2 = in_tiles(weights(2 * INNER, LATENT), weights(LATENT, INNER))
    for warps in WARPS[share[0] :: share[1]]:
        experts(inputs(4, 0), w13, w2, (warps, warps))
    for shared, batch in itertools.product(SHARES[share[0] :: share[1]], (1, 4)):
        experts(inputs(batch, 0), w13, w2, shared)
    for tile in TILES[share[0] :: share[1]]:
        for batch, width in itertools.product(share[2], (7168, 2304, 384)):
            x, w = torch.randn(batch, width, device=DEVICE), torch.randn(576, width, device=DEVICE)
            if fits(batch, tile):
                linear.linear(x.bfloat16(), w.bfloat16(), tile)
    torch.cuda.synchronize()


def fits(batch: int, tile: Tile) -> bool:
    """Whether a program's stages have room in shared memory."""
    columns = tile.k * (tile.warps if tile.parts else 1)
    return (tile.n + max(16, batch)) * columns * 2 * tile.stages <= 220 << 10


def each(runs: list[Callable[[], Any]]) -> float:
    """Microseconds of one of ``runs``, all in one graph."""

    def all_of_them() -> None:
        for run in runs:
            run()

    return timed(captured(all_of_them), 5) * 1e3 / len(runs)


def best(found: list[dict[str, Any]], key: str) -> None:
    """Print the best few."""
    for entry in sorted(found, key=lambda e: e[key])[:4]:
        print(json.dumps(entry), flush=True)


def measure_experts(batches: list[int]) -> None:
    w13, w2 = in_tiles(weights(2 * INNER, LATENT), weights(LATENT, INNER))
    for batch in batches:
        given = [inputs(batch, i) for i in range(8 if batch == 1 else 3)]
        touched = sum(int((g[1].unique() < EXPERTS).sum()) for g in given) / len(given)
        nbytes = touched * (w13.nbytes + w2.nbytes) / EXPERTS
        x, ids, share = given[0]
        share = torch.where(ids < EXPERTS, share, 0.0)
        plain = [[w.plain(e, x.dtype) for e in range(EXPERTS)] for w in (w13, w2)]
        expected = moe_reference.experts(x, ids.clamp(max=EXPERTS - 1), share, *plain, ACT)  # type: ignore[arg-type]
        del plain
        found = []
        for shape in SHARES:
            off = relative(experts(given[0], w13, w2, shape), expected)
            us = each([lambda g=g, s=shape: experts(g, w13, w2, s) for g in given])
            found.append({"experts": round(touched, 1), "batch": batch, "side": "both", "share": str(shape),
                          "us": round(us, 1), "tb_s": round(nbytes / us / 1e6, 3), "off": round(off, 4)})  # fmt: skip
        for side, warps in itertools.product(("in", "out"), WARPS if batch > 1 else ()):
            both = (warps, BASE) if side == "in" else (BASE, warps)
            off = relative(experts(given[0], w13, w2, both), expected)
            us = each([lambda g=g, w=both: experts(g, w13, w2, w) for g in given])
            shape = [warps.columns, warps.rows, warps.unroll, warps.stages, warps.registers]
            found.append({"experts": round(touched, 1), "batch": batch, "side": side, "warps": shape,
                          "us": round(us, 1), "tb_s": round(nbytes / us / 1e6, 3), "off": round(off, 4)})  # fmt: skip
        found.sort(key=lambda e: (e["side"], e["us"]))
        for entry in found:
            print(json.dumps(entry), flush=True)


def measure_attention(rows: int = 64, context: int = 8500) -> None:
    """Decode attention over a rank's cache, heads of 16 and 32 GPUs."""
    pages = -(-context // 64)
    for dtype, heads in itertools.product((torch.float8_e4m3fn, torch.bfloat16), (3, 6)):
        cache = torch.randn(rows * pages, 64, 576, device=DEVICE).to(dtype)
        table = torch.randperm(rows * pages, device=DEVICE).view(rows, pages)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        q, shared = torch.randn(heads, rows, 512, device=DEVICE).bfloat16(), torch.randn(rows, heads, 64, device=DEVICE)
        expected = None
        for chains, programs in ATTENTION:
            triton_warp.CHAINS[dtype.itemsize], triton_warp.PROGRAMS[dtype.itemsize] = chains, programs
            try:
                found = mla.attend_latent(q, shared.bfloat16(), cache, table, lengths, 192**-0.5)
                expected = plain_attention(q, shared, cache, table, context) if expected is None else expected
                us = each([lambda: mla.attend_latent(q, shared.bfloat16(), cache, table, lengths, 192**-0.5)] * 3)  # noqa: B023
            except Exception as error:  # noqa: BLE001  a shape that does not fit is no result
                print(json.dumps({"chains": chains, "programs": programs, "error": str(error)[:60]}))
                continue
            print(json.dumps({"attention": str(dtype), "heads": heads, "programs": programs, "chains": chains,
                              "us": round(us, 1), "tb_s": round(rows * context * 576 * dtype.itemsize / us / 1e6, 2),
                              "off": round(relative(found, expected), 4)}), flush=True)  # fmt: skip


def plain_attention(q: Tensor, shared: Tensor, cache: Tensor, table: Tensor, context: int) -> Tensor:
    out = []
    for r in range(q.shape[1]):
        kv = cache[table[r]].view(-1, 576)[:context].float()
        s = torch.softmax(
            (q[:, r].float() @ kv[:, :512].T + shared[r].bfloat16().float() @ kv[:, 512:].T) * 192**-0.5, -1
        )
        out.append(s @ kv[:, :512])
    return torch.stack(out, 1)


def measure_products(batches: list[int], until: float) -> None:
    for rows, width in PRODUCTS:
        count = min(max(ROTATED // (2 * rows * width), 3), 24)
        pool = [torch.randn(rows, width, device=DEVICE).bfloat16() for _ in range(count)]
        for batch in batches:
            x = torch.randn(batch, width, device=DEVICE).bfloat16()
            expected = F.linear(x, pool[0])
            cublas = each([lambda w=w, x=x: F.linear(x, w) for w in pool])
            found = []
            for tile in (t for t in TILES if fits(batch, t)):
                if time.perf_counter() > until:
                    return
                try:
                    off = relative(linear.linear(x, pool[0], tile), expected)
                    us = each([lambda w=w, t=tile, x=x: linear.linear(x, w, t) for w in pool])
                except Exception as error:  # noqa: BLE001  a shape that does not fit is no result
                    print(json.dumps({"tile": [tile.n, tile.k, tile.warps, tile.stages], "error": str(error)[:60]}))
                    continue
                found.append({"rows": rows, "width": width, "batch": batch, "us": round(us, 2),
                              "cublas": round(cublas, 2), "tb_s": round(2 * rows * width / us / 1e6, 2),
                              "tile": [tile.n, tile.k, tile.warps, tile.stages, tile.parts, tile.ahead],
                              "off": round(off, 4)})  # fmt: skip
            best(found, "us")


def compile_all(processes: int, batches: tuple[int, ...]) -> None:
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_some, [(i, processes, batches) for i in range(processes)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--seconds", type=float, default=100.0, help="after which products end")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    if args.processes > 1:
        compile_all(args.processes, tuple(args.batch))
        print(f"compiled; {until - time.perf_counter():.0f} s left", flush=True)
    if args.compile_only:
        return 0
    with torch.inference_mode():
        measure_experts(args.batch)
        measure_attention()
        measure_products(args.batch, until)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
