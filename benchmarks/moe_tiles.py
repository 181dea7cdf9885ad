"""Tile shapes of the experts' kernels: bytes per second of each, on the experts of one rank of 32 GPUs.

Correct results first, then one line a shape and batch. The best are what ``kernels.moe.triton_decode`` has.

    python -m benchmarks.moe_tiles --batch 1 16 64 --processes 12
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from typing import Any

import torch
from benchmarks.rank_gpu import captured, relative, timed
from torch import Tensor

from k3stack.kernels.activation import reference as activation
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.moe import triton as moe
from k3stack.kernels.moe import triton_decode
from k3stack.kernels.moe.triton_decode import Rows
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

DEVICE = torch.device("cuda", 0)
EXPERTS, ALL, TOP_K, LATENT, INNER = 28, 896, 16, 3584, 3072
GRID = [Rows(*shape) for shape in itertools.product((8, 16, 32), (8, 16, 32), (1, 2), (4, 8)) if shape != (8, 8, 1, 8)]


def situ(gate_up: Tensor) -> Tensor:
    return activation.situ_glu(gate_up, 4.0, 25.0)


ACT = Glu("situ", 4.0, 25.0, situ)


def weights(rows: int, columns: int) -> Mxfp4Weight:
    packed = torch.empty(EXPERTS, rows, columns // 2, dtype=torch.uint8, device=DEVICE).random_(0, 256)
    return Mxfp4Weight(packed, torch.full((EXPERTS, rows, columns // 32), 120, dtype=torch.uint8, device=DEVICE))


def inputs(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(batch)
    ids = torch.rand(batch, ALL, device=DEVICE).topk(TOP_K, -1).indices
    ids[0, 0] = 0  # somebody chooses one that is here
    return torch.randn(batch, LATENT, device=DEVICE).bfloat16(), ids, torch.rand(batch, TOP_K, device=DEVICE)


def run(given: tuple[Tensor, ...], w13: Mxfp4Weight, w2: Mxfp4Weight, rows: Rows) -> Tensor:
    x, ids, share = given
    lists, counts = moe.group(ids, EXPERTS, 0)
    each = triton_decode.results(x, w13, w2, ACT, lists, counts, TOP_K, (rows, rows))
    return moe.add_up(each, ids, share, 0, EXPERTS)


def compile_some(share: tuple[int, int]) -> None:
    """Fill Triton's cache with every ``share[1]``-th shape."""
    w13, w2 = weights(2 * INNER, LATENT), weights(LATENT, INNER)
    for rows in GRID[share[0] :: share[1]]:
        run(inputs(4), w13, w2, rows)
    torch.cuda.synchronize()


def measure(batches: list[int]) -> list[dict[str, Any]]:
    w13, w2 = weights(2 * INNER, LATENT), weights(LATENT, INNER)
    found = []
    for batch in batches:
        given = inputs(batch)
        here = given[1].unique()
        touched = int((here < EXPERTS).sum())
        nbytes = touched * (w13.nbytes + w2.nbytes) / EXPERTS
        expected = run(given, w13, w2, triton_decode.SOME)
        for rows in GRID:
            distance = relative(run(given, w13, w2, rows), expected)
            ms = timed(captured(lambda r=rows, g=given: run(g, w13, w2, r)), 10)
            entry = {"batch": batch, "experts": touched, "rows": [rows.n, rows.groups, rows.tokens, rows.warps]}
            found.append(entry | {"us": round(ms * 1e3, 1), "tb_s": round(nbytes / ms / 1e9, 3), "off": distance})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_some, [(i, args.processes) for i in range(args.processes)])
    for entry in sorted(measure(args.batch), key=lambda e: (e["batch"], e["us"])):
        print(json.dumps(entry))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
