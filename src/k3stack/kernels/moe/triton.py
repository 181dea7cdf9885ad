"""Experts in Triton: each expert's weights are read once a step, whatever tokens chose it.

Which tokens chose which expert; gate and up with the activation; down; the weighted sum. The products here use matrix
instructions; MXFP4 in tiles has its own (``triton_units``, ``triton_decode`` for more tokens an expert), and so have
many tokens an expert (``triton_chunk``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.activation.triton import glu
from k3stack.kernels.launch import await_inputs
from k3stack.kernels.linear.cuda import linear_plus
from k3stack.kernels.moe import triton_chunk, triton_decode, triton_few, triton_units
from k3stack.kernels.moe.triton_group import HELD, group
from k3stack.kernels.mxfp4.triton import SHIFT, halves, unpack
from k3stack.kernels.mxfp4.weight import Mxfp4Weight


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens, weight rows and columns of one program's tile; ``parts``: programs that share an expert's tokens."""

    m: int
    n: int
    k: int
    parts: int
    warps: int
    stages: int


DECODE = Tiles(16, 32, 256, 1, 4, 3)
CHUNK = Tiles(64, 64, 64, 4, 4, 3)
FEW = 16
"""Mean tokens an expert up to which ``triton_decode`` serves MXFP4 in tiles, and others ``DECODE``."""
THIN = 1.25
"""Mean tokens an expert up to which ``triton_units`` takes them."""
SUMMED = 256


@triton.jit
def _packed_product(
    x, packed, scale, k0, width, live, n_live, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BF16: tl.constexpr
):
    """[M, N] of K columns from ``k0``: x [M] row pointers (even half, then odd half), packed and scale [N] pointers."""
    GROUPS: tl.constexpr = K // 32
    c = k0 // 2 + tl.arange(0, K // 2)
    inside = live[:, None] & (c < width // 2)[None, :]
    even = tl.load(x[:, None] + c[None, :], mask=inside, other=0.0)
    odd = tl.load(x[:, None] + width // 2 + c[None, :], mask=inside, other=0.0)
    g = k0 // 32 + tl.arange(0, GROUPS)
    there = n_live[:, None] & (g < width // 32)[None, :]
    byte = (g * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
    codes = tl.load(packed[:, None, None] + byte, mask=there[:, :, None], other=0)
    factor = tl.load(scale[:, None] + g[None, :], mask=there, other=127)
    low, high = unpack(codes, factor[:, :, None], BF16)
    low = tl.reshape(low, [N, K // 2]).to(even.dtype)
    high = tl.reshape(high, [N, K // 2]).to(even.dtype)
    acc = tl.dot(even, tl.trans(low), input_precision="ieee")
    return tl.dot(odd, tl.trans(high), acc, input_precision="ieee")


@triton.jit
def _plain_product(x, w, k0, width, live, n_live, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    c = k0 + tl.arange(0, K)
    inside = c < width
    a = tl.load(x[:, None] + c[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    b = tl.load(w[:, None] + c[None, :], mask=n_live[:, None] & inside[None, :], other=0.0)
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def _in_kernel(
    x, w, scale, lists, counts, out, x_row, width, inner, capacity, beta, linear_beta, factor,
    TOPK: tl.constexpr, SITU: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr, PARTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gate and up of one expert's tokens, then the activation: N inner columns of M tokens at a time."""
    await_inputs(PDL)
    expert = (tl.program_id(1) // PARTS).to(tl.int64)
    part = tl.program_id(1) % PARTS
    count = tl.load(counts + expert)
    n = tl.program_id(0) * N + tl.arange(0, N)
    n_live = n < inner
    gate_row = expert * 2 * inner + n
    up_row = gate_row + inner
    for m0 in range(part * M, count, PARTS * M):
        m = m0 + tl.arange(0, M)
        live = m < count
        pair = tl.load(lists + expert * capacity + m, mask=live, other=0)
        rows = x + (pair // TOPK).to(tl.int64) * x_row
        gate = tl.zeros([M, N], tl.float32)
        up = tl.zeros([M, N], tl.float32)
        for k0 in range(0, width, K):
            if PACKED:
                half = width // 2
                groups = width // 32
                gate += _packed_product(
                    rows, w + gate_row * half, scale + gate_row * groups, k0, width, live, n_live, M, N, K, BF16
                )
                up += _packed_product(
                    rows, w + up_row * half, scale + up_row * groups, k0, width, live, n_live, M, N, K, BF16
                )
            else:
                gate += _plain_product(rows, w + gate_row * width, k0, width, live, n_live, M, N, K)
                up += _plain_product(rows, w + up_row * width, k0, width, live, n_live, M, N, K)
        # The products are rounded as the reference rounds them.
        gate = (gate * factor).to(x.dtype.element_ty).to(tl.float32)
        up = (up * factor).to(x.dtype.element_ty).to(tl.float32)
        y = glu(gate, up, beta, linear_beta, SITU)
        # For the next product the even columns come first.
        column = (n % 2) * (inner // 2) + n // 2 if PACKED else n
        to = out + pair.to(tl.int64)[:, None] * inner + column[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=live[:, None] & n_live[None, :])


@triton.jit
def _out_kernel(
    x, w, scale, lists, counts, out, inner, width, capacity, factor,
    PACKED: tl.constexpr, BF16: tl.constexpr, PARTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The down product of one expert's tokens: N of ``width`` columns of M tokens at a time."""
    await_inputs(PDL)
    expert = (tl.program_id(1) // PARTS).to(tl.int64)
    part = tl.program_id(1) % PARTS
    count = tl.load(counts + expert)
    n = tl.program_id(0) * N + tl.arange(0, N)
    n_live = n < width
    row = expert * width + n
    for m0 in range(part * M, count, PARTS * M):
        m = m0 + tl.arange(0, M)
        live = m < count
        pair = tl.load(lists + expert * capacity + m, mask=live, other=0).to(tl.int64)
        acc = tl.zeros([M, N], tl.float32)
        for k0 in range(0, inner, K):
            if PACKED:
                acc += _packed_product(
                    x + pair * inner,
                    w + row * (inner // 2),
                    scale + row * (inner // 32),
                    k0,
                    inner,
                    live,
                    n_live,
                    M,
                    N,
                    K,
                    BF16,
                )
            else:
                acc += _plain_product(x + pair * inner, w + row * inner, k0, inner, live, n_live, M, N, K)
        to = out + pair[:, None] * width + n[None, :]
        tl.store(to, (acc * factor).to(out.dtype.element_ty), mask=live[:, None] & n_live[None, :])


@triton.jit
def _sum_kernel(
    results, ids, weights, out, first, experts, width,
    TOPK: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One warp a program: a reduction across warps took 20 microseconds of 64 tokens' step. The choices were there long
    before the results."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, KEPT)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + token * TOPK + j, mask=j < TOPK, other=-1) - first
    here = (j < TOPK) & (chosen >= 0) & (chosen < experts)
    share = tl.load(weights + token * TOPK + j, mask=here, other=0.0)
    await_inputs(PDL)
    at = results + (token * TOPK + j)[:, None] * width + c[None, :]
    value = tl.load(at, mask=here[:, None] & (c < width)[None, :], other=0.0)
    acc = tl.sum(share[:, None] * value.to(tl.float32), 0)
    tl.store(out + token * width + c, acc.to(out.dtype.element_ty), mask=c < width)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | Mxfp4Weight,
    w2: Tensor | Mxfp4Weight,
    activation: Glu,
    first: int = 0,
    total: int | None = None,
) -> Tensor:
    """See ``reference.experts``. w13 [E, 2 I, L] and w2 [E, L, I] hold the experts ``first`` to ``first + E`` - 1 of
    ``total`` (None: E) that ``ids`` int64 names; choices of others add nothing."""
    tokens, top_k = ids.shape
    if triton_few.fits(tokens, w13):
        return triton_few.experts(x, ids, weights, w13, w2, activation, first)
    mean = tokens * top_k / (total or w13.shape[0])
    if mean > FEW and x.dtype == torch.bfloat16 and triton_chunk.fits(w13):
        return triton_chunk.experts(x, ids, weights, w13, w2, activation, first, total)
    if isinstance(w13, Mxfp4Weight) and isinstance(w2, Mxfp4Weight) and w13.tiled:
        if tokens == 1:
            return triton_units.result_of_one(x, w13, w2, activation, (ids, weights, first))
        thin = mean <= THIN and w13.shape[0] <= HELD
        groups = group(ids, w13.shape[0], first, thin)
        if thin:
            results = triton_units.results(x, w13, w2, activation, groups, (ids, first))
        else:
            results = triton_decode.results(x, w13, w2, activation, groups, top_k, triton_decode.SOME)
    else:
        lists, counts = group(ids, w13.shape[0], first)
        tiles = DECODE if mean <= FEW else CHUNK
        results = tiled(x, w13, w2, activation, lists, counts, top_k, (tiles, tiles))
    return add_up(results, ids, weights, first, w13.shape[0])


def experts_plus(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | Mxfp4Weight,
    w2: Tensor | Mxfp4Weight,
    activation: Glu,
    other: tuple[Tensor, Tensor],
    first: int = 0,
    total: int | None = None,
) -> Tensor:
    """``experts`` plus the product of ``other``, an input [T, S] and a weight [L, S]."""
    if triton_few.fits(ids.shape[0], w13):
        return triton_few.experts(x, ids, weights, w13, w2, activation, first, other)
    return linear_plus(*other, experts(x, ids, weights, w13, w2, activation, first, total))


def tiled(
    x: Tensor,
    w13: Tensor | Mxfp4Weight,
    w2: Tensor | Mxfp4Weight,
    activation: Glu,
    lists: Tensor,
    counts: Tensor,
    top_k: int,
    tiles: tuple[Tiles, Tiles],
) -> Tensor:
    """Each choice's expert output [T top_k, L] by matrix instructions; choices of experts elsewhere are left out."""
    count, double, width = w13.shape
    inner, tokens, device = double // 2, x.shape[0], x.device
    packed, bf16 = isinstance(w13, Mxfp4Weight), x.dtype == torch.bfloat16
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=device)
    results = torch.empty(tokens * top_k, width, dtype=x.dtype, device=device)
    factor = 2.0**SHIFT.value if packed and bf16 else 1.0
    x = halves(x) if packed else x.contiguous()
    common = {"PACKED": packed, "BF16": packed and bf16}
    t = tiles[0]
    start.launch(
        _in_kernel,
        (triton.cdiv(inner, t.n), count * t.parts),
        *(x, *_parts(w13), lists, counts, hidden, x.stride(0), width, inner, tokens),
        *(activation.beta, activation.linear_beta, factor),
        TOPK=top_k,
        SITU=activation.kind == "situ",
        **common,
        **_options(t, width),
    )
    t = tiles[1]
    start.launch(
        _out_kernel,
        (triton.cdiv(width, t.n), count * t.parts),
        *(hidden, *_parts(w2), lists, counts, results, inner, width, tokens, factor),
        **common,
        **_options(t, inner),
    )
    return results


def add_up(results: Tensor, ids: Tensor, weights: Tensor, first: int, count: int) -> Tensor:
    """Weighted sums [T, L] of each token's choices that are here."""
    (tokens, top_k), width = ids.shape, results.shape[1]
    out = torch.empty(tokens, width, dtype=results.dtype, device=results.device)
    start.launch(
        _sum_kernel,
        (tokens, triton.cdiv(width, SUMMED)),
        *(results, ids, weights, out, first, count, width),
        TOPK=top_k,
        KEPT=triton.next_power_of_2(top_k),
        BLOCK=SUMMED,
        num_warps=1,
    )
    return out


def _parts(w: Tensor | Mxfp4Weight) -> tuple[Tensor, Tensor]:
    return (w.packed, w.scale) if isinstance(w, Mxfp4Weight) else (w, w)


def _options(t: Tiles, width: int) -> dict[str, int]:
    k = min(t.k, max(triton.next_power_of_2(width), 32))
    return {"PARTS": t.parts, "M": t.m, "N": t.n, "K": k, "num_warps": t.warps, "num_stages": t.stages}
