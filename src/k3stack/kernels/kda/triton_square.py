"""KDA of chunks, products within tiles by Hopper's matrix instructions (``triton_chunk`` says when)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))


@gluon.jit
def _square(part, r, SUB: gl.constexpr):
    """A square's columns among the tile's tokens, and how many tokens after each the row is that has its number."""
    HALF: gl.constexpr = 2 * SUB
    column = gl.where(part == 0, r, gl.where(part == 1, r // SUB * HALF + r % SUB, (part - 2) * HALF + r))
    return column, gl.where(part == 0, HALF, gl.where(part == 1, SUB, 0))


@gluon.jit
def _decayed(q, k, c, beta, q_out, k_out, w_out, fade, first, i, K: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr):
    """Write ROWS rows of q exp(c), k exp(c_C - c) and beta k exp(c), and exp(c_C)."""
    BLOCK: gl.constexpr = i.type.layout.parent
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, BLOCK))
    at = row[:, None] * K + i[None, :]
    qt = gl.load(q + at).to(gl.float32)
    kt = gl.load(k + at).to(gl.float32)
    ct = gl.load(c + at)
    share = gl.load(beta + row)
    end = gl.load(c + (C - 1) * K + i)
    e = gl.exp2(ct)
    gl.store(q_out + at, (qt * e).to(q_out.dtype.element_ty))
    gl.store(k_out + at, (kt * gl.exp2(end[None, :] - ct)).to(k_out.dtype.element_ty))
    gl.store(w_out + at, (kt * e * share[:, None]).to(w_out.dtype.element_ty))
    gl.store(fade + i, gl.exp2(end))


@gluon.jit
def _product(rows, keys, kr, qr, kc, factor, inverse, FOUND: gl.constexpr):
    """Begin the products of keys, and below them of queries, times ``factor``, with keys times ``inverse``."""
    HALF: gl.constexpr = keys.shape[0]
    keys.store(kc.to(gl.float32) * inverse)
    rows.slice(0, HALF, dim=0).store(kr.to(gl.float32) * factor)
    rows.slice(HALF, HALF, dim=0).store(qr.to(gl.float32) * factor)
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([2 * HALF, HALF], gl.float32, FOUND)
    return warpgroup_mma(rows, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def square_kernel(
    q, k, c, beta, a_out, qk_out, q_out, k_out, w_out, fade,
    K: gl.constexpr, C: gl.constexpr, SUB: gl.constexpr, FACTORED: gl.constexpr,
):  # fmt: skip
    """What ``triton_tile.inside_kernel`` does (FACTORED) or ``halved_kernel``, by four programs a tile, of a square of
    half its side each: between the halves, between neighbouring sub-chunks, within the first two, within the others
    (sub-chunks above the diagonal stay as they are); and of the rest a sub-chunk each that is read anyway.
    """
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    FOUND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * SUB, 8])
    HALF: gl.constexpr = 2 * SUB
    part = gl.program_id(0)
    tile = (gl.program_id(1) * gl.num_programs(2) + gl.program_id(2)).to(gl.int64)
    q += tile * C * K
    k += tile * C * K
    c += tile * C * K
    beta += tile * C
    rows = gl.allocate_shared_memory(gl.float32, [C, K], _WORDS)
    keys = gl.allocate_shared_memory(gl.float32, [HALF, K], _WORDS)
    i = gl.arange(0, K, gl.SliceLayout(0, BLOCK))
    column, after = _square(part, gl.arange(0, HALF, gl.SliceLayout(1, BLOCK)), SUB)
    at = column[:, None] * K + i[None, :]
    # Decay between two tokens is split at one between them, or in the middle of two, where it is bounded.
    last = gl.where(part == 0, HALF - 1, column // SUB * SUB + SUB - 1)
    if not FACTORED:
        last = gl.where(part < 2, last, last - SUB // 2)
    split = gl.load(c + last[:, None] * K + i[None, :])
    if FACTORED:
        above = gl.where(part > 1, last - SUB, -1)
        before = gl.load(c + above[:, None] * K + i[None, :], mask=(above >= 0)[:, None], other=0.0)
        split = gl.where(part > 1, 0.5 * (split + before), split)
    cc = gl.load(c + at)
    kc = gl.load(k + at)
    cr = gl.load(c + (at + after * K))
    kr = gl.load(k + (at + after * K))
    qr = gl.load(q + (at + after * K))
    if FACTORED:
        factor = gl.exp2(cr - split)
        inverse = gl.exp2(split - cc)
    else:
        factor = gl.exp2(-gl.abs(cr - split))
        inverse = gl.exp2(-gl.abs(cc - split))
    found = _product(rows, keys, kr, qr, kc, factor, inverse, FOUND)
    # In its time.
    sub = gl.where(part == 0, 2, gl.where(part == 2, 0, part))
    to = tile * C * K
    _decayed(q, k, c, beta, q_out + to, k_out + to, w_out + to, fade + tile * K, sub * SUB, i, K, C, SUB)
    found = warpgroup_mma_wait(0, [found])
    n = gl.arange(0, C, gl.SliceLayout(1, FOUND))
    column, _ = _square(part, gl.arange(0, HALF, gl.SliceLayout(0, FOUND)), SUB)
    left, after = _square(part, n % HALF, SUB)
    if not FACTORED and part > 1:
        # Down to single tokens, which decay nothing.
        token, _shift = _square(part, gl.arange(0, HALF, gl.SliceLayout(1, BLOCK)), SUB)
        size = SUB // 2
        while size > 0:
            middle = token // size * size + (size - 1) // 2
            e = gl.exp2(-gl.abs(cr - gl.load(c + middle[:, None] * K + i[None, :])))
            gl.thread_barrier()
            finer = _product(rows, keys, kr, qr, kr, e, e, FOUND)
            finer = warpgroup_mma_wait(0, [finer])
            found = gl.where((left // size)[:, None] == (column // size)[None, :], finer, found)
            size = size // 2
    row = left + after
    own = (part == 0) | ((left // SUB)[:, None] == (column // SUB)[None, :])
    to = tile * C * C + row[:, None] * C + column[None, :]
    below = row[:, None] - column[None, :]
    a = gl.where(below > 0, found * gl.load(beta + row)[:, None], 0.0)
    gl.store(a_out + to, a, mask=own & (n < HALF)[:, None])
    gl.store(qk_out + to, gl.where(below >= 0, found, 0.0).to(qk_out.dtype.element_ty), mask=own & (n >= HALF)[:, None])
