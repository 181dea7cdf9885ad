"""MLA decode of many heads in Gluon over rows in bfloat16: both operands of the products come from shared memory.

Products are formed transposed as in ``triton_warp``, a page's rows by the heads, by the instructions for four warps,
which read cache rows where they were copied to.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma

from k3stack.kernels.launch import await_inputs

HEADS = (16, 32)
"""Heads that one program may have."""
FEW = 4
"""Sequences up to which the smaller number is better."""
ROWS = 64
"""Cache rows of a page: those of a tile, for which the instructions are."""
PROGRAMS, FEW_PROGRAMS = 132, 134
"""Programs that fill the device, one a multiprocessor of an H200; how many share out the caches of few sequences."""

_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _ask(source, left, latent, shared):
    """Have a tile of rows copied; of those beyond ``left`` zeros."""
    ROW: gl.constexpr = latent.shape[1] + shared.shape[1]
    LATENT: gl.constexpr = latent.shape[1]
    SHARED: gl.constexpr = shared.shape[1]
    TOKENS: gl.constexpr = latent.shape[0]
    n = gl.arange(0, TOKENS, gl.SliceLayout(1, _WIDE))
    c = gl.arange(0, LATENT, gl.SliceLayout(0, _WIDE))
    async_copy.async_copy_global_to_shared(latent, source + (n[:, None] * ROW + c[None, :]), mask=(n < left)[:, None])
    n = gl.arange(0, TOKENS, gl.SliceLayout(1, _NARROW))
    c = gl.arange(0, SHARED, gl.SliceLayout(0, _NARROW))
    from_shared = source + LATENT + (n[:, None] * ROW + c[None, :])
    async_copy.async_copy_global_to_shared(shared, from_shared, mask=(n < left)[:, None])
    async_copy.commit_group()


@gluon.jit
def _pass(latent, shared, ql, qs, weights, best, total, context, left, scale):
    """One tile, of which ``left`` rows count. best: the score that weights are relative to; total: their sums, row by
    row of a tile; context [latent, heads]."""
    TOKENS: gl.constexpr = latent.shape[0]
    HEADS: gl.constexpr = ql.shape[0]
    LAYOUT: gl.constexpr = context.type.layout
    s = gl.zeros([TOKENS, HEADS], gl.float32, LAYOUT)
    s = warpgroup_mma(latent, ql.permute((1, 0)), s)
    s = warpgroup_mma(shared, qs.permute((1, 0)), s) * scale
    n = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    s = gl.where((n < left)[:, None], s, -float("inf"))
    top = gl.maximum(best, gl.max(s, 0))
    old = gl.exp2(best - top)
    p = gl.exp2(s - top[None, :])
    total = total * old[None, :] + p
    weights.permute((1, 0)).store(p.to(latent.dtype))
    fence_async_shared()
    gl.thread_barrier()
    context = warpgroup_mma(latent.permute((1, 0)), weights.permute((1, 0)), context * old[None, :])
    return top, total, context


@gluon.jit
def attend_kernel(
    q_latent, q_shared, rows, table, lengths, partial, logsum,
    latent_head, latent_row, shared_row, shared_head, page_stride, table_row, heads, splits, scale,
    LATENT: gl.constexpr, SHARED: gl.constexpr, PAGE: gl.constexpr, HEADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See ``triton.attend_latent``. A tile is a page. Grid: groups of HEADS heads, sequences, splits.

    Cache rows are read while the kernel before this one makes the queries (``launch.await_inputs``): what wrote them
    must come before that one."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    KIND: gl.constexpr = rows.dtype.element_ty
    first, row, split = gl.program_id(0) * HEADS, gl.program_id(1).to(gl.int64), gl.program_id(2)
    length = gl.load(lengths + row)
    part = gl.cdiv(gl.cdiv(length, PAGE), splits)
    begin, end = split * part, gl.minimum(split * part + part, gl.cdiv(length, PAGE))
    h = first + gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
    to = (row * heads + h) * splits + split
    if begin >= end:
        await_inputs(PDL)
        gl.store(logsum + to, gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(0, LAYOUT)), mask=h < heads)
        return
    latents = gl.allocate_shared_memory(KIND, [2, PAGE, LATENT], _ROWS)
    shareds = gl.allocate_shared_memory(KIND, [2, PAGE, SHARED], _ROWS)
    pages = table + row * table_row
    for i in gl.static_range(2):
        page = gl.load(pages + gl.minimum(begin + i, end - 1))
        _ask(rows + page * page_stride, length - (begin + i) * PAGE, latents.index(i), shareds.index(i))
    next_page = gl.load(pages + gl.minimum(begin + 2, end - 1))
    await_inputs(PDL)
    ql = gl.allocate_shared_memory(KIND, [HEADS, LATENT], _ROWS)
    own = first + gl.arange(0, HEADS, gl.SliceLayout(1, _WIDE))[:, None]
    c = gl.arange(0, LATENT, gl.SliceLayout(0, _WIDE))[None, :]
    ql.store(gl.load(q_latent + own * latent_head + row * latent_row + c, mask=own < heads, other=0.0))
    qs = gl.allocate_shared_memory(KIND, [HEADS, SHARED], _ROWS)
    own = first + gl.arange(0, HEADS, gl.SliceLayout(1, _NARROW))[:, None]
    c = gl.arange(0, SHARED, gl.SliceLayout(0, _NARROW))[None, :]
    qs.store(gl.load(q_shared + own * shared_head + row * shared_row + c, mask=own < heads, other=0.0))
    weights = gl.allocate_shared_memory(KIND, [HEADS, PAGE], _ROWS)
    scale *= _LOG2E
    best = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    total = gl.zeros([PAGE, HEADS], gl.float32, LAYOUT)
    context = gl.zeros([LATENT, HEADS], gl.float32, LAYOUT)
    at = 0
    for n in range(begin, end):
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        latent, shared = latents.index(at), shareds.index(at)
        best, total, context = _pass(latent, shared, ql, qs, weights, best, total, context, length - n * PAGE, scale)
        gl.thread_barrier()
        page = next_page
        next_page = gl.load(pages + gl.minimum(n + 3, end - 1))
        # What comes after the last tile is of no use; nothing of it is copied.
        _ask(rows + page * page_stride, gl.where(n + 2 < end, length - (n + 2) * PAGE, 0), latent, shared)
        at = 1 - at
    async_copy.wait_group(0)
    total = gl.sum(total, 0)
    c = gl.arange(0, LATENT, gl.SliceLayout(1, LAYOUT))
    gl.store(partial + to[None, :] * LATENT + c[:, None], context / total[None, :], mask=(h < heads)[None, :])
    gl.store(logsum + to, best / _LOG2E + gl.log(total), mask=h < heads)


def heads_of(heads: int, count: int, latent: int, shared: int, page_rows: int) -> int | None:
    """Heads of a program for these sizes; None: others serve them."""
    if (latent, shared, page_rows) != (512, 64, ROWS):
        return None
    return HEADS[heads > HEADS[0] and count > FEW]


def splits_of(count: int, groups: int) -> int:
    """Parts that each of ``count`` caches is cut into, which ``groups`` of heads read."""
    return max((FEW_PROGRAMS if count <= FEW else PROGRAMS) // (count * groups), 1)
