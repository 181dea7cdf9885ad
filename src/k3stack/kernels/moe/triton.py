"""Experts in Triton: each expert's weights are read once a step, whatever tokens chose it.

Which tokens chose which expert; gate and up with the activation; down; the weighted sum. The products here use matrix
instructions; MXFP4 in tiles has its own (``triton_decode``, and ``triton_units`` for few experts), and so have many
tokens an expert (``triton_chunk``).
"""

from __future__ import annotations

import math
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
from k3stack.kernels.mxfp4.triton import SHIFT, halves, unpack
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

GROUPED = 1024
"""Choices that the grouping kernel looks at in one go."""


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
USED = 20
"""Experts in use, on average, up to which ``triton_units`` takes them."""
SUMMED = 256


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _bits_set(v):
    """How many bits of an int32 are set."""
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    v += v >> 8
    v += v >> 16
    return v & 63


@triton.jit
def _before(ids, expert, first, total, BLOCK: tl.constexpr):
    """How many of the experts here before this one were chosen."""
    before = 0
    for word in range(expert // 32 + 1):
        bits = 0
        for begin in range(0, total, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            own = (tl.load(ids + i, mask=i < total, other=-1) - first).to(tl.int32)
            hit = (own >= word * 32) & (own < tl.minimum(word * 32 + 32, expert))
            bits |= tl.reduce(tl.where(hit, 1 << (own & 31), 0), 0, _either)
        before += _bits_set(bits)
    return before


@triton.jit
def _group_kernel(
    ids, lists, counts, first, total, capacity, BLOCK: tl.constexpr, IN_USE: tl.constexpr, PDL: tl.constexpr
):
    """One expert's choices; IN_USE: and its place among those that have some."""
    await_inputs(PDL)
    expert = tl.program_id(0)
    found = 0
    for begin in range(0, total, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        hit = tl.load(ids + i, mask=i < total, other=-1) == first + expert
        place = found + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(lists + expert.to(tl.int64) * capacity + place, i, mask=hit)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts + expert, found)
    if IN_USE:
        experts = tl.num_programs(0)
        before = _before(ids, expert, first, total, BLOCK)
        tl.store(counts + experts + 1 + before, expert, mask=found > 0)
        tl.store(counts + experts, before + (found > 0).to(tl.int32), mask=expert == experts - 1)


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
    results, ids, weights, out, first, experts, width, TOPK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One warp a program, every choice by itself: a reduction across warps took 20 microseconds of 64 tokens' step."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOPK):
        chosen = tl.load(ids + token * TOPK + j) - first
        here = (chosen >= 0) & (chosen < experts)
        value = tl.load(results + (token * TOPK + j) * width + c, mask=here & (c < width), other=0.0)
        acc += tl.load(weights + token * TOPK + j) * value.to(tl.float32)
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
        few = w13.shape[0] * (1 - math.exp(-mean)) <= USED
        groups = group(ids, w13.shape[0], first, few)
        if few:
            results = triton_units.results(x, w13, w2, activation, groups, top_k)
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


def group(ids: Tensor, count: int, first: int, in_use: bool = False) -> tuple[Tensor, Tensor]:
    """Choices by expert: ids [T, k] -> lists int32 [count, T] of indices into the flat ids, counts int32 [count]; with
    ``in_use`` counts [2 count + 1]: then how many experts have some, which these are, and nothing."""
    tokens = ids.shape[0]
    lists = torch.empty(count, tokens, dtype=torch.int32, device=ids.device)
    counts = torch.empty(2 * count + 1 if in_use else count, dtype=torch.int32, device=ids.device)
    block = min(GROUPED, triton.next_power_of_2(ids.numel()))
    start.launch(
        _group_kernel,
        (count,),
        *(ids, lists, counts, first, ids.numel(), tokens),
        BLOCK=block,
        IN_USE=in_use,
        num_warps=4,
    )
    return lists, counts


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
        BLOCK=SUMMED,
        num_warps=1,
    )
    return out


def _parts(w: Tensor | Mxfp4Weight) -> tuple[Tensor, Tensor]:
    return (w.packed, w.scale) if isinstance(w, Mxfp4Weight) else (w, w)


def _options(t: Tiles, width: int) -> dict[str, int]:
    k = min(t.k, max(triton.next_power_of_2(width), 32))
    return {"PARTS": t.parts, "M": t.m, "N": t.n, "K": k, "num_warps": t.warps, "num_stages": t.stages}
