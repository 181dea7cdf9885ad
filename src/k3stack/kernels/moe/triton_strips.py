"""Sums over two strips of MXFP4 weights by warps that share their columns, and the units that programs draw.

What ``triton_units``'s kernels are made of; the arithmetic is ``triton_decode``'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3stack.kernels.moe.triton_decode import STAGE_BYTES, activations, add_tile, copy_tile, four_words, take_tile

# A program's first thread draws a unit, without waiting for it; what it drew is another register of the first thread
# until it is published.
_DRAW = tl.constexpr("""
{
.reg .pred p; .reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0; setp.ne.and.b32 p, $2, 0, p;
mov.b32 $0, 0;
@p atom.global.inc.u32 $0, [$1], 0x7fffffff;
}
""")
_PUBLISH = tl.constexpr("""
{
.reg .pred p; .reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p st.shared.b32 [$1], $2;
mov.b32 $0, 0;
}
""")
_PUBLISHED = tl.constexpr("ld.shared.b32 $0, [$1];")


@triton.jit
def draw(counter, wanted, ASM: tl.constexpr):
    """Draw a unit where one is ``wanted``: for ``publish`` alone."""
    if ASM:
        return tl.inline_asm_elementwise(
            _DRAW, "=&r,l,r", [counter.to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.atomic_add(counter, wanted.to(tl.int32))


@triton.jit
def publish(note, drawn, ASM: tl.constexpr):
    """Leave at ``note`` in shared memory what was drawn; others may read it once they have met."""
    if ASM:
        tl.inline_asm_elementwise(_PUBLISH, "=r,r,r", [note, drawn], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def published(note, drawn, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(_PUBLISHED, "=r,r", [note], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return drawn


@triton.jit
def _ahead(place, packed, scale, tile, gap, live, lane):
    """Start copying a thread's part of two tiles, ``gap`` apart, to ``place`` in shared memory, where ``live``."""
    a = tile.to(tl.int64)
    b = (tile + gap).to(tl.int64)
    # Copies are of four bytes at least: half a warp has a strip's scales.
    scales = scale + tl.where(lane < 16, a, b) * 32 + lane % 16 * 2
    copy_tile(place, packed + (a * 256 + lane * 4), packed + (b * 256 + lane * 4), scales, live, lane)


@triton.jit
def begin_unit(
    place, packed, scale, tile, gap, tiles, live, thread, KW: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr
):
    """Start copying the first tiles of a unit's strips."""
    if ASM:
        for i in tl.static_range(STAGES):
            inside = live & (thread // 32 % KW + i * KW < tiles)
            _ahead(place + i * STAGE_BYTES, packed, scale, tile + i * KW, gap, inside, thread % 32)


@triton.jit
def sums_of_unit(
    x, there, packed, scale, tile, gap, tiles, after, more, place, slot, thread,
    KW: tl.constexpr, PER: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """A thread's sums over its warp's tiles of two strips, times tokens; then the next slot. x: int32 pointers to the
    thread's token, if one is ``there``; tile: the warp's first of one strip, ``gap`` before that of the other; after:
    the same of the next unit, if there are ``more``, whose first tiles are on their way at the end; place: the warp's
    room, where the first tiles are at ``slot``. TURN: see ``activations``."""
    kw = thread // 32 % KW
    lane = thread % 32
    zero = thread.to(tl.float32) * 0.0
    c = (zero, zero, zero, zero)
    d = (zero, zero, zero, zero)
    x += thread % 4 * (4 if TURN else 16)
    all_of_them = tl.cdiv(tiles, KW) * KW
    # Activations are asked for a step before they are needed.
    values = activations(x + tl.minimum(kw, tiles - 1) * 64, there, ASM, TURN)
    for step in tl.range(0, tiles, KW):
        now = step + kw
        live = now < tiles
        if not EVEN:
            now = tl.minimum(now, tiles - 1)
        if ASM:
            w = take_tile(place + slot * STAGE_BYTES, lane, STAGES - 1)
            of_a = w[16]
            of_b = w[17]
        else:
            a = (tile + now - kw).to(tl.int64)
            b = (tile + now - kw + gap).to(tl.int64)
            codes = packed + a * 256 + lane * 4
            w = (
                four_words(codes, 0)
                + four_words(codes, 128)
                + four_words(codes + gap * 256, 0)
                + four_words(codes + gap * 256, 128)
            )
            of_a = tl.load(scale + a * 32 + lane).to(tl.int32)
            of_b = tl.load(scale + b * 32 + lane).to(tl.int32)
        coming = activations(x + tl.minimum(now + KW, tiles - 1) * 64, there, ASM, TURN)
        c = add_tile(w, 0, of_a, live, values, c, PER, EVEN, ASM)
        d = add_tile(w, 8, of_b, live, values, d, PER, EVEN, ASM)
        if ASM:
            ahead = step + STAGES * KW
            over = ahead >= all_of_them
            ahead = tl.where(over, ahead - all_of_them, ahead)
            inside = (ahead + kw < tiles) & (more | (ahead > step))
            _ahead(place + slot * STAGE_BYTES, packed, scale, tl.where(over, after, tile) + ahead, gap, inside, lane)
            slot = tl.where(slot == STAGES - 1, 0, slot + 1)
        values = coming
    return c, d, slot


@triton.jit
def _alike(v, KW: tl.constexpr, RW: tl.constexpr):
    """Sums of the warps that share rows."""
    total = tl.sum(tl.reshape(v, [RW, KW, 32]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], [RW, KW, 32]), [RW * KW * 32])


@triton.jit
def _of_four(v, i):
    return tl.where(i == 0, v[0], tl.where(i == 1, v[1], tl.where(i == 2, v[2], v[3])))


@triton.jit
def together(c, d, room, thread, KW: tl.constexpr, RW: tl.constexpr, ASM: tl.constexpr, ADD: tl.constexpr):
    """Sums of the warps that share rows: of each strip as many of a thread's four as ``place_of_sum`` says."""
    kw = thread // 32 % KW
    if ASM:
        to = room + thread * 4
        own = room + (kw % 4 * (KW * RW * 32) + thread // (32 * KW) * (32 * KW) + thread % 32) * 4
        if KW == 2:
            a, b, e, f = tl.inline_asm_elementwise(
                ADD, "=&f,=&f,=&f,=&f,r,r,f,f,f,f,f,f,f,f",
                [to, own, c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]],
                dtype=(tl.float32,) * 4, is_pure=False, pack=1,
            )  # fmt: skip
            return (a, b), (e, f)
        else:
            a, b = tl.inline_asm_elementwise(
                ADD, "=&f,=&f,r,r,f,f,f,f,f,f,f,f",
                [to, own, c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]],
                dtype=(tl.float32,) * 2, is_pure=False, pack=1,
            )  # fmt: skip
            return (a,), (b,)
    else:
        c = (_alike(c[0], KW, RW), _alike(c[1], KW, RW), _alike(c[2], KW, RW), _alike(c[3], KW, RW))
        d = (_alike(d[0], KW, RW), _alike(d[1], KW, RW), _alike(d[2], KW, RW), _alike(d[3], KW, RW))
        if KW == 2:
            return (_of_four(c, kw), _of_four(c, kw + 2)), (_of_four(d, kw), _of_four(d, kw + 2))
        else:
            return (_of_four(c, kw % 4),), (_of_four(d, kw % 4),)


@triton.jit
def place_of_sum(thread, J: tl.constexpr, KW: tl.constexpr):
    """Of a thread's ``J``-th sums of ``together``: row of the strip, token of the eight, and whether it is to store
    them (other warps have the same where more than four share rows)."""
    i = thread // 32 % KW % 4 + J * KW
    return thread % 32 // 4 + i // 2 * 8, thread % 4 * 2 + i % 2, thread // 32 % KW < 4


def adding(columns: int, rows: int) -> str:
    """PTX that adds up the eight sums of ``columns`` warps that share rows, of which a thread takes its part."""
    threads, kept = 32 * columns * rows, max(4 // columns, 1)
    to, own = f"${2 * kept}", f"${2 * kept + 1}"
    lines = ["{ .reg .f32 t; bar.sync 0;"]
    lines += [f"st.shared.f32 [{to} + {i * threads * 4}], ${2 * kept + 2 + i};" for i in range(8)]
    lines.append("bar.sync 0;")
    for i in range(2 * kept):
        at = (i // kept * 4 + i % kept * columns) * threads * 4
        lines.append(f"ld.shared.f32 ${i}, [{own} + {at}];")
        for k in range(1, columns):
            lines.append(f"ld.shared.f32 t, [{own} + {at + k * 128}]; add.f32 ${i}, ${i}, t;")
    return " ".join([*lines, "}"])
