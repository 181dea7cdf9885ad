"""MLA decode in Triton: the absorbed form over cache pages, split along the cache, and the writing of cache rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs

HEADS = 16
"""Heads of one program: the least that a matrix instruction takes."""
TILES = {1: (32, 4, 3), 2: (64, 4, 2), 4: (16, 4, 2)}
"""Cache rows of one pass, warps and stages by the bytes of a cached value."""
PROGRAMS = 264
"""Programs that fill the device (two a multiprocessor of an H200): long caches are split into as many."""
MOST_SPLITS = 64


# Not pure: as a plain conversion it would be moved behind the way through shared memory, where values of one byte
# cannot be transposed; this way both products read the converted tile from there.
_HALF = tl.constexpr("""
{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}
""")


@triton.jit
def _cached(at, live, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of cached values for the products."""
    value = tl.load(at, mask=live, other=0.0)
    if HALF:
        return tl.inline_asm_elementwise(_HALF, "=r,=r,r", [value], dtype=tl.float16, is_pure=False, pack=4)
    else:
        return value.to(DTYPE)


@triton.jit
def _attend_kernel(
    q_latent, q_shared, rows, table, lengths, partial, logsum,
    latent_head, latent_row, shared_row, shared_head, page_stride, table_row, heads, splits, scale,
    LATENT: tl.constexpr, SHARED: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, LATENT)
    r = tl.arange(0, SHARED)
    here = h < heads
    length = tl.load(lengths + row)
    part = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, length)
    at = (row * heads + h) * splits + split
    if begin >= end:
        tl.store(logsum + at, tl.full([BLOCK_H], -float("inf"), tl.float32), mask=here)
        return
    ql = tl.load(q_latent + h[:, None] * latent_head + row * latent_row + c[None, :], mask=here[:, None], other=0.0)
    qs = tl.load(q_shared + row * shared_row + h[:, None] * shared_head + r[None, :], mask=here[:, None], other=0.0)
    if HALF:
        # Every fp8 value is exact in fp16, and one instruction makes two; queries times the scale are in its range.
        ql = (ql.to(tl.float32) * scale).to(tl.float16)
        qs = (qs.to(tl.float32) * scale).to(tl.float16)
    best = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, LATENT], tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        live = n < end
        page = tl.load(table + row * table_row + n0 // PAGE)
        base = rows + page * page_stride + (n % PAGE)[:, None] * (LATENT + SHARED)
        latent = _cached(base + c[None, :], live[:, None], HALF, ql.dtype)
        shared = _cached(base + LATENT + r[None, :], live[:, None], HALF, ql.dtype)
        s = tl.dot(ql, tl.trans(latent), input_precision="ieee")
        s = tl.dot(qs, tl.trans(shared), s, input_precision="ieee")
        s = tl.where(live[None, :], s if HALF else s * scale, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1))
        old = tl.exp(best - top)
        p = tl.exp(s - top[:, None])
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(ql.dtype), latent, acc * old[:, None], input_precision="ieee")
        best = top
    tl.store(partial + at[:, None] * LATENT + c[None, :], acc / total[:, None], mask=here[:, None])
    tl.store(logsum + at, best + tl.log(total), mask=here)


@triton.jit
def _combine_kernel(
    partial, logsum, out, rows, heads, splits, LATENT: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = (row * heads + head) * splits
    i = tl.arange(0, SPLITS)
    c = tl.arange(0, LATENT)
    sums = tl.load(logsum + at + i, mask=i < splits, other=-float("inf"))
    best = tl.max(sums, 0)
    acc = tl.zeros([LATENT], tl.float32)
    total = 0.0
    for j in range(splits):
        one = tl.load(logsum + at + j)
        if one > -float("inf"):
            w = tl.exp(one - best)
            total += w
            acc += w * tl.load(partial + (at + j) * LATENT + c)
    # A row without cache (one that only fills up a batch) has no part at all.
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (head.to(tl.int64) * rows + row) * LATENT + c, acc.to(out.dtype.element_ty))


@triton.jit
def _write_kernel(
    kv, weight, rows, pages, places, kv_row, page_stride, eps,
    LATENT: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + token)
    if page < 0:
        return
    c = tl.arange(0, LATENT)
    r = tl.arange(0, SHARED)
    to = rows + page * page_stride + tl.load(places + token) * (LATENT + SHARED)
    value = tl.load(kv + token * kv_row + c)
    f = value.to(tl.float32)
    f = (f * tl.rsqrt(tl.sum(f * f, 0) / LATENT + eps)).to(value.dtype).to(tl.float32)
    y = (f * tl.load(weight + c).to(tl.float32)).to(value.dtype)
    tl.store(to + c, y.to(rows.dtype.element_ty))
    tl.store(to + LATENT + r, tl.load(kv + token * kv_row + LATENT + r).to(rows.dtype.element_ty))


def write_rows(kv: Tensor, weight: Tensor, eps: float, rows: Tensor, pages: Tensor, places: Tensor) -> None:
    """Normalise the latent of ``kv`` [T, latent + shared] and write its rows; see ``cpu.write_rows``. Page -1: none."""
    latent = weight.shape[0]
    start.launch(
        _write_kernel,
        (kv.shape[0],),
        *(kv, weight, rows, pages, places, kv.stride(0), rows.stride(0), eps),
        LATENT=latent,
        SHARED=kv.shape[1] - latent,
        num_warps=1,
    )


def splits_of(rows: int, heads: int) -> int:
    """Parts that the cache of each row is cut into: a function of the batch alone, so that a graph may keep it."""
    groups = rows * triton.cdiv(heads, HEADS)
    return min(max(PROGRAMS // groups, 1), MOST_SPLITS)


def attend_latent(
    q_latent: Tensor, q_shared: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Absorbed attention of one token a row over its pages.

    q_latent [H, R, latent], q_shared [R, H, shared] (last axes contiguous), rows [pages, page rows, latent + shared] in
    any float format, page_table int64 [R, M], lengths int32 [R] -> contexts [H, R, latent] in q's dtype.
    """
    heads, count, latent = q_latent.shape
    splits = splits_of(count, heads)
    device = q_latent.device
    partial = torch.empty(count, heads, splits, latent, dtype=torch.float32, device=device)
    logsum = torch.empty(count, heads, splits, dtype=torch.float32, device=device)
    block, warps, stages = TILES[max(rows.dtype.itemsize, 4 if q_latent.dtype == torch.float32 else 1)]
    start.launch(
        _attend_kernel,
        (count, triton.cdiv(heads, HEADS), splits),
        *(q_latent, q_shared, rows, page_table, lengths, partial, logsum),
        *(q_latent.stride(0), q_latent.stride(1), q_shared.stride(0), q_shared.stride(1)),
        *(rows.stride(0), page_table.stride(0), heads, splits, scale),
        LATENT=latent,
        SHARED=q_shared.shape[2],
        PAGE=rows.shape[1],
        BLOCK_H=HEADS,
        BLOCK_N=min(block, rows.shape[1]),
        HALF=rows.dtype == torch.float8_e4m3fn and q_latent.dtype == torch.bfloat16,
        num_warps=warps,
        num_stages=stages,
    )
    out = torch.empty(heads, count, latent, dtype=q_latent.dtype, device=device)
    start.launch(
        _combine_kernel,
        (count, heads),
        *(partial, logsum, out, count, heads, splits),
        LATENT=latent,
        SPLITS=triton.next_power_of_2(splits),
        num_warps=2,
    )
    return out


def decode(q: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, kv_b: Tensor) -> Tensor:
    """One token each of R sequences over their pages; see ``cpu.decode``. ``lengths`` int32 [R] on the device."""
    latent = kv_b.shape[2]
    nope = q.shape[-1] - (rows.shape[2] - latent)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope])
    context = attend_latent(absorbed, q[..., nope:], rows, page_table, lengths, q.shape[-1] ** -0.5)
    return torch.bmm(context, kv_b[:, nope:].transpose(1, 2)).transpose(0, 1)
