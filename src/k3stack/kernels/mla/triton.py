"""MLA decode in Triton: the absorbed form over cache pages, split along the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.activation.triton import output_gate
from k3stack.kernels.launch import await_inputs
from k3stack.kernels.mla import triton_ends, triton_group, triton_warp

HEADS = 16
"""Heads of one program: the least that a matrix instruction takes."""
TILES = {1: (64, 4, 3), 2: (64, 4, 2), 4: (16, 4, 2)}
"""Cache rows of one pass, warps and stages by the bytes of a cached value."""
FEW, FEW_TILES = 16, {2: (32, 4, 3)}
"""Sequences up to which others are faster."""
NARROW = 32
"""Least columns that are taken in pairs: half of them must fill a matrix instruction."""
PROGRAMS = 264
"""Programs that fill the device (two a multiprocessor of an H200): long caches are split into as many."""
MOST_SPLITS = 132
COMBINED = 4096
"""Values of all parts that one program adds up."""


# Pure, so that it may be done behind the way from shared memory to the registers of a matrix instruction.
_SPLIT = triton_warp.EVEN_AND_ODD


@triton.jit
def _split(pairs, ASM: tl.constexpr):
    """Two neighbouring fp8 values each (int16) as two tensors in fp16, in which they are exact."""
    if ASM:
        return tl.inline_asm_elementwise(
            _SPLIT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = ((pairs & 127) << 7) | ((pairs & 128) << 8)
        odd = ((pairs >> 1) & 16256) | (pairs & -32768)
        # The exponent's bias is 7 in one format and 15 in the other.
        return even.to(tl.float16, bitcast=True) * 256.0, odd.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _columns(live, c, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Mask of the rows ``live`` and, where their WIDTH values are fewer than the WIDE columns of ``c``, of these."""
    if WIDTH == WIDE:
        return live[:, None]
    else:
        return live[:, None] & (c < WIDTH)[None, :]


@triton.jit
def _share(lengths, heads, splits, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's sequence, heads, the places of their results, and cache rows: first, and end."""
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    length = tl.load(lengths + row)
    part = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    begin = split * part
    return row, h, (row * heads + h) * splits + split, begin, tl.minimum(begin + part, length)


@triton.jit
def _weigh(s, best, total):
    """Scores [heads, tokens] in the running softmax: weights, the factor of what came before, best score and sum."""
    top = tl.maximum(best, tl.max(s, 1))
    old = tl.exp(best - top)
    p = tl.exp(s - top[:, None])
    return p, old, top, total * old + tl.sum(p, 1)


@triton.jit
def _attend_kernel(
    q_latent, q_shared, rows, table, lengths, partial, logsum,
    latent_head, latent_row, shared_row, shared_head, page_stride, table_row, heads, splits, scale,
    LATENT: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row, h, at, begin, end = _share(lengths, heads, splits, BLOCK_H, BLOCK_N)
    c = tl.arange(0, WIDE)
    r = tl.arange(0, SHARED)
    here = h < heads
    if begin >= end:
        tl.store(logsum + at, tl.full([BLOCK_H], -float("inf"), tl.float32), mask=here)
        return
    whole = _columns(here, c, LATENT, WIDE)
    ql = tl.load(q_latent + h[:, None] * latent_head + row * latent_row + c[None, :], mask=whole, other=0.0)
    qs = tl.load(q_shared + row * shared_row + h[:, None] * shared_head + r[None, :], mask=here[:, None], other=0.0)
    best = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, WIDE], tl.float32)
    pages = table + row * table_row
    # Loaded a step ahead: rows whose address is being loaded could not be asked for several steps ahead.
    next_page = tl.load(pages + begin // PAGE)
    for n0 in range(begin, end, BLOCK_N):
        page = next_page
        next_page = tl.load(pages + tl.minimum(n0 + BLOCK_N, end - 1) // PAGE)
        n = n0 + tl.arange(0, BLOCK_N)
        live = n < end
        base = rows + page * page_stride + (n % PAGE)[:, None] * (LATENT + SHARED)
        latent = tl.load(base + c[None, :], mask=_columns(live, c, LATENT, WIDE), other=0.0).to(ql.dtype)
        shared = tl.load(base + LATENT + r[None, :], mask=live[:, None], other=0.0).to(ql.dtype)
        s = tl.dot(ql, tl.trans(latent), input_precision="ieee")
        s = tl.dot(qs, tl.trans(shared), s, input_precision="ieee")
        s = tl.where(live[None, :], s * scale, -float("inf"))
        p, old, best, total = _weigh(s, best, total)
        acc = tl.dot(p.to(ql.dtype), latent, acc * old[:, None], input_precision="ieee")
    tl.store(partial + at[:, None] * LATENT + c[None, :], acc / total[:, None], mask=whole)
    tl.store(logsum + at, best + tl.log(total), mask=here)


@triton.jit
def _half_query(q, mask, scale):
    """Even and odd columns of queries times the scale, in fp16 (they are in its range)."""
    even = tl.load(q, mask=mask, other=0.0).to(tl.float32) * scale
    odd = tl.load(q + 1, mask=mask, other=0.0).to(tl.float32) * scale
    return even.to(tl.float16), odd.to(tl.float16)


@triton.jit
def _attend_fp8_kernel(
    q_latent, q_shared, rows, table, lengths, partial, logsum,
    latent_head, latent_row, shared_row, shared_head, page_stride, table_row, heads, splits, scale,
    LATENT: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``_attend_kernel``, over fp8 rows as pairs of values (int16): so they go from shared memory to registers by
    the instructions for 16 bits, also transposed, and become fp16 there, once for each of the two products. Even and
    odd columns are apart in both."""
    await_inputs(PDL)
    HALF: tl.constexpr = LATENT // 2
    HALF_WIDE: tl.constexpr = WIDE // 2
    HALF_SHARED: tl.constexpr = SHARED // 2
    row, h, at, begin, end = _share(lengths, heads, splits, BLOCK_H, BLOCK_N)
    c = tl.arange(0, HALF_WIDE)
    r = tl.arange(0, HALF_SHARED)
    here = h < heads
    whole = _columns(here, c, HALF, HALF_WIDE)
    if begin >= end:
        tl.store(logsum + at, tl.full([BLOCK_H], -float("inf"), tl.float32), mask=here)
        return
    ql = q_latent + h[:, None] * latent_head + row * latent_row + 2 * c[None, :]
    qs = q_shared + row * shared_row + h[:, None] * shared_head + 2 * r[None, :]
    ql_even, ql_odd = _half_query(ql, whole, scale)
    qs_even, qs_odd = _half_query(qs, here[:, None], scale)
    best = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    even = tl.zeros([BLOCK_H, HALF_WIDE], tl.float32)
    odd = tl.zeros([BLOCK_H, HALF_WIDE], tl.float32)
    pages = table + row * table_row
    next_page = tl.load(pages + begin // PAGE)
    for n0 in range(begin, end, BLOCK_N):
        page = next_page
        next_page = tl.load(pages + tl.minimum(n0 + BLOCK_N, end - 1) // PAGE)
        n = n0 + tl.arange(0, BLOCK_N)
        live = n < end
        base = rows + page * page_stride + (n % PAGE)[:, None] * (HALF + HALF_SHARED)
        latent = tl.load(base + c[None, :], mask=_columns(live, c, HALF, HALF_WIDE), other=0)
        shared = tl.load(base + HALF + r[None, :], mask=live[:, None], other=0)
        k_even, k_odd = _split(tl.trans(latent), ASM)
        r_even, r_odd = _split(tl.trans(shared), ASM)
        s = tl.dot(qs_even, r_even, tl.dot(ql_even, k_even))
        # A chain of sums of its own: one over all columns would take longer.
        s += tl.dot(qs_odd, r_odd, tl.dot(ql_odd, k_odd))
        s = tl.where(live[None, :], s, -float("inf"))
        p, old, best, total = _weigh(s, best, total)
        v_even, v_odd = _split(latent, ASM)
        even = tl.dot(p.to(tl.float16), v_even, even * old[:, None])
        odd = tl.dot(p.to(tl.float16), v_odd, odd * old[:, None])
    to = partial + at[:, None] * LATENT + 2 * c[None, :]
    tl.store(to, even / total[:, None], mask=whole)
    tl.store(to + 1, odd / total[:, None], mask=whole)
    tl.store(logsum + at, best + tl.log(total), mask=here)


@triton.jit
def _combine_kernel(
    partial, logsum, out, rows, heads, splits,
    LATENT: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, APART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = (row * heads + head) * splits
    i = tl.arange(0, SPLITS)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.load(logsum + at + i, mask=i < splits, other=-float("inf"))
    # What a part without rows would have written is not there.
    there = sums > -float("inf")
    parts = tl.load(partial + (at + i)[:, None] * LATENT + c[None, :], mask=_columns(there, c, LATENT, WIDE), other=0.0)
    w = tl.where(there, tl.exp(sums - tl.max(sums, 0)), 0.0)
    total = tl.sum(w, 0)
    # A row without cache (one that only fills up a batch) has no part at all.
    y = tl.sum(parts * w[:, None], 0) / tl.where(total > 0, total, 1.0)
    # APART: even columns come first, then odd ones.
    to = 2 * (c % (LATENT // 2)) + c // (LATENT // 2) if APART else c
    tl.store(out + (head.to(tl.int64) * rows + row) * LATENT + to, y.to(out.dtype.element_ty), mask=c < LATENT)


def attend_latent(
    q_latent: Tensor, q_shared: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Absorbed attention of one token a row over its pages.

    q_latent [H, R, latent], q_shared [R, H, shared] (last axes contiguous), rows [pages, page rows, latent + shared] in
    any float format, page_table int64 [R, M], lengths int32 [R] -> contexts [H, R, latent] in q's dtype.
    """
    heads, count, latent = q_latent.shape
    plan = _plan(q_latent, q_shared, rows)
    splits = plan.splits
    partial = torch.empty(count, heads, splits, latent, dtype=torch.float32, device=q_latent.device)
    logsum = torch.empty(count, heads, splits, dtype=torch.float32, device=q_latent.device)
    given = rows.view(torch.int16) if plan.paired else rows
    start.launch(
        plan.kernel,
        (triton.cdiv(heads, plan.heads), count, splits),
        *(q_latent, q_shared, given, page_table, lengths, partial, logsum),
        *(q_latent.stride(0), q_latent.stride(1), q_shared.stride(0), q_shared.stride(1)),
        *(given.stride(0), page_table.stride(0), heads, splits, scale),
        LATENT=latent,
        SHARED=q_shared.shape[2],
        PAGE=rows.shape[1],
        **plan.options,
    )
    wide, most = triton.next_power_of_2(latent), triton.next_power_of_2(splits)
    columns = min(wide, max(COMBINED // most, 16))
    out = torch.empty(heads, count, latent, dtype=q_latent.dtype, device=q_latent.device)
    start.launch(
        _combine_kernel,
        (count, heads, wide // columns),
        *(partial, logsum, out, count, heads, splits),
        LATENT=latent,
        WIDE=wide,
        SPLITS=most,
        COLUMNS=columns,
        APART=plan.apart,
        num_warps=4,
    )
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """Kernel, its compile-time arguments, heads of a program, parts that each cache is cut into; ``paired``: rows are
    given as pairs of fp8 values; ``apart``: even columns of a part's contexts come first, then odd ones."""

    kernel: Any
    options: dict[str, int | float | bool]
    heads: int
    splits: int
    paired: bool = False
    apart: bool = False


def _plan(q_latent: Tensor, q_shared: Tensor, rows: Tensor) -> _Plan:
    """A function of sizes alone, not of lengths, so that a graph may keep it."""
    (heads, count, latent), shared, fp8 = q_latent.shape, q_shared.shape[2], rows.dtype == torch.float8_e4m3fn
    narrow, size = q_latent.dtype == torch.bfloat16 and (fp8 or rows.dtype == torch.bfloat16), rows.dtype.itemsize
    if narrow and triton_warp.fits(heads, latent, shared, rows.shape[1]) and not start.INTERPRETED:
        splits = max(triton_warp.programs(count, size) // count, 1)
        return _Plan(triton_warp.attend_kernel, triton_warp.options(size), triton_warp.HEADS, splits, fp8, fp8)
    group = triton_group.heads_of(heads, count, latent, shared, rows.shape[1])
    if narrow and not fp8 and group is not None and not start.INTERPRETED:
        splits = triton_group.splits_of(count, triton.cdiv(heads, group))
        return _Plan(triton_group.attend_kernel, {"HEADS": group, "num_warps": 4}, group, splits)
    splits = min(max(PROGRAMS // (count * triton.cdiv(heads, HEADS)), 1), MOST_SPLITS)
    size = max(size, 4 if q_latent.dtype == torch.float32 else 1)
    block, warps, stages = FEW_TILES[size] if count <= FEW and size in FEW_TILES else TILES[size]
    options = {"BLOCK_H": HEADS, "BLOCK_N": min(block, rows.shape[1]), "num_warps": warps, "num_stages": stages}
    options["WIDE"] = triton.next_power_of_2(latent)
    if fp8 and q_latent.dtype != torch.float32 and min(latent, shared) >= NARROW:
        return _Plan(_attend_fp8_kernel, options | {"ASM": not start.INTERPRETED}, HEADS, splits, paired=True)
    return _Plan(_attend_kernel, options, HEADS, splits)


def decode(q: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, kv_b: Tensor) -> Tensor:
    """One token each of R sequences over their pages; see ``cpu.decode``. ``lengths`` int32 [R] on the device."""
    v = kv_b.shape[1] - (q.shape[2] - (rows.shape[2] - kv_b.shape[2]))
    return gated(q, rows, page_table, lengths, kv_b, None).view(*q.shape[:2], v)


def gated(q: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, kv_b: Tensor, gate: Tensor | None) -> Tensor:
    """``decode`` and then ``activation.reference.output_gate`` by ``gate`` [R, H v], None: without -> [R, H v]."""
    (count, heads, width), latent = q.shape, kv_b.shape[2]
    nope, scale = width - (rows.shape[2] - latent), width**-0.5
    if count == 0:
        # The last layer of a step whose tokens nobody wants to hear of.
        return q.new_empty(0, heads * (kv_b.shape[1] - nope))
    if triton_ends.fits(count, nope):
        absorbed = triton_ends.absorb(q, kv_b, nope)
        context = attend_latent(absorbed, q[..., nope:], rows, page_table, lengths, scale)
        return triton_ends.project(context, kv_b, nope, gate)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope])
    context = attend_latent(absorbed, q[..., nope:], rows, page_table, lengths, scale)
    out = torch.bmm(context, kv_b[:, nope:].transpose(1, 2)).transpose(0, 1)
    return out.reshape(count, -1) if gate is None else output_gate(out, gate)
