"""MXFP4 experts of a decode step: few tokens an expert, so what counts is how fast the weights' bytes are taken in.

Written a thread at a time: every tensor here has one value a thread. Weights lie in the order of ``mxfp4.tiles``. A
warp takes the strips of 16 rows of two matrices and 8 tokens; the tiles of 128 columns of both strips are copied to
shared memory one after the other, some of them ahead, every thread copying what it will take itself: 16 bytes each of
two rows of a strip, one group of 32 columns with one scale. They are as a matrix instruction (m16n8k16) wants them: a
word of 8 codes becomes four registers of two neighbouring columns by seven logic operations and four multiplications,
and activations are taken as they lie in memory. Products are exact, sums in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.activation.triton import glu
from k3stack.kernels.launch import await_inputs
from k3stack.kernels.mxfp4.tiles import COLUMNS
from k3stack.kernels.mxfp4.triton import SHIFT
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

TILE, TOKENS = 16, 8
"""Weight rows and tokens of a matrix instruction."""


@dataclass(frozen=True, slots=True)
class Warps:
    """Of one program: ``columns`` warps share the columns of the same rows, ``rows`` times over; steps of the loop are
    ``unroll``ed. A warp has room for ``stages`` (2 to 4) tiles of each strip in shared memory, where they arrive one
    after the other; a thread has at most so many ``registers``."""

    columns: int
    rows: int
    unroll: int = 1
    stages: int = 4
    registers: int | None = None


SOME = (Warps(1, 4, 2, registers=96), Warps(1, 4, 2, registers=96))
"""Of the product into the experts and the one out of them (``benchmarks.tiles``)."""

STAGE_BYTES = tl.constexpr(4 * 512 + 2 * 64)
"""Bytes of one stage of a warp: 16 a thread for two rows of two strips, and two scales of each."""
# Every thread copies the codes that it will take itself, and half a warp each strip's scales.
_COPY = tl.constexpr("""
{
.reg .pred p;
setp.ne.b32 p, $5, 0;
@p cp.async.cg.shared.global.L2::256B [$1], [$2], 16;
@p cp.async.cg.shared.global.L2::256B [$1 + 512], [$2 + 512], 16;
@p cp.async.cg.shared.global.L2::256B [$1 + 1024], [$3], 16;
@p cp.async.cg.shared.global.L2::256B [$1 + 1536], [$3 + 512], 16;
@p cp.async.ca.shared.global [$6 + 2048], [$4], 4;
cp.async.commit_group;
mov.b32 $0, 0;
}
""")
_TAKE = tl.constexpr("""
ld.shared.v4.b32 {$0, $1, $2, $3}, [$18];
ld.shared.v4.b32 {$4, $5, $6, $7}, [$18 + 512];
ld.shared.v4.b32 {$8, $9, $10, $11}, [$18 + 1024];
ld.shared.v4.b32 {$12, $13, $14, $15}, [$18 + 1536];
ld.shared.u16 $16, [$19 + 2048];
ld.shared.u16 $17, [$19 + 2112];
""")
# Where a token is. What other threads have instead goes into sums that nobody takes.
_LOAD_ACTIVATIONS = tl.constexpr("""
{
.reg .pred p;
setp.ne.b32 p, $17, 0;
@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$16];
@p ld.global.nc.v4.b32 {$4, $5, $6, $7}, [$16 + APART];
@p ld.global.nc.v4.b32 {$8, $9, $10, $11}, [$16 + 2 * APART];
@p ld.global.nc.v4.b32 {$12, $13, $14, $15}, [$16 + 3 * APART];
}
""")
_IN_ROW = tl.constexpr(_LOAD_ACTIVATIONS.value.replace("APART", "16"))
_IN_TURN = tl.constexpr(_LOAD_ACTIVATIONS.value.replace("APART", "64"))
# Codes come out 2^-126 times what they stand for: the bits of e2m1 below bfloat16's sign, in the lowest bits of its
# exponent and the highest of its mantissa (0.5 is a subnormal number). lop3 with 0xEA is (a and b) or c.
_WORD = tl.constexpr("""
{
.reg .b32 s, m, p0, p1, p2, p3, r0, r1, r2, r3; .reg .f32 d0, d1, d2, d3;
and.b32 p0, $4, 0x81C081C0;
and.b32 r0, $5, 0x81C081C0;
shl.b32 m, $4, 3; and.b32 p1, m, 0x81C081C0;
shl.b32 m, $5, 3; and.b32 r1, m, 0x81C081C0;
shl.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; shl.b32 s, $4, 1; lop3.b32 p2, s, 0x80008000, m, 0xEA;
shl.b32 m, $5, 6; and.b32 m, m, 0x01C001C0; shl.b32 s, $5, 1; lop3.b32 r2, s, 0x80008000, m, 0xEA;
shr.b32 m, $4, 3; and.b32 m, m, 0x01C001C0; shl.b32 s, $4, 2; lop3.b32 p3, s, 0x80008000, m, 0xEA;
shr.b32 m, $5, 3; and.b32 m, m, 0x01C001C0; shl.b32 s, $5, 2; lop3.b32 r3, s, 0x80008000, m, 0xEA;
mul.rn.bf16x2 p0, p0, $6; mul.rn.bf16x2 p1, p1, $6; mul.rn.bf16x2 p2, p2, $6; mul.rn.bf16x2 p3, p3, $6;
mul.rn.bf16x2 r0, r0, $7; mul.rn.bf16x2 r1, r1, $7; mul.rn.bf16x2 r2, r2, $7; mul.rn.bf16x2 r3, r3, $7;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0, d1, d2, d3}, {p0, r0, p1, r1}, {$8, $9}, {$12, $13, $14, $15};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {p2, r2, p3, r3}, {$10, $11}, {d0, d1, d2, d3};
}
""")


@triton.jit
def four_words(words, at):
    return tl.load(words + at), tl.load(words + at + 1), tl.load(words + at + 2), tl.load(words + at + 3)


@triton.jit
def room_of(thread, ROOM: tl.constexpr, ASM: tl.constexpr):
    """Where this program's shared memory for tiles begins."""
    if ASM:
        return tl.inline_asm_elementwise(ROOM, "=r,r", [thread], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return thread


@triton.jit
def copy_tile(place, codes_a, codes_b, scales, live, lane):
    """Start copying a thread's part of a tile of each strip to ``place`` in shared memory, where ``live``: 16 bytes of
    codes from here and 512 on, and four of ``scales``."""
    tl.inline_asm_elementwise(
        _COPY,
        "=r,r,l,l,l,r,r",
        [
            place + lane * 16, codes_a.to(tl.int64), codes_b.to(tl.int64), scales.to(tl.int64), live.to(tl.int32),
            place + lane * 4,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def take_tile(place, lane, LEFT: tl.constexpr):
    """Wait for the oldest stage; ``LEFT`` (to 3) may still be under way. Of each strip: eight words (four of row r,
    four of row r + 8); then both's scales."""
    WAIT: tl.constexpr = (
        "cp.async.wait_group 0; bar.warp.sync 0xffffffff;"
        if LEFT == 0
        else "cp.async.wait_group 1; bar.warp.sync 0xffffffff;"
        if LEFT == 1
        else "cp.async.wait_group 2; bar.warp.sync 0xffffffff;"
        if LEFT == 2
        else "cp.async.wait_group 3; bar.warp.sync 0xffffffff;"
    )
    return tl.inline_asm_elementwise(
        WAIT + _TAKE,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [place + lane * 16, place + lane * 2],
        dtype=(tl.int32,) * 18,
        is_pure=False,
        pack=1,
    )


@triton.jit
def activations(x, there, ASM: tl.constexpr, TURN: tl.constexpr = False):
    """32 bfloat16 values of neighbouring columns a thread, as 16 pairs; any where no token is ``there``: loads of few
    tokens take the first-level cache less time. TURN: four neighbouring threads have eight of them in turn."""
    LOAD: tl.constexpr = _IN_TURN if TURN else _IN_ROW
    APART: tl.constexpr = 16 if TURN else 4
    if ASM:
        return tl.inline_asm_elementwise(
            LOAD,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r",
            [x.to(tl.int64), there.to(tl.int32)],
            dtype=(tl.int32,) * 16,
            is_pure=False,
            pack=1,
        )
    else:
        return four_words(x, 0) + four_words(x, APART) + four_words(x, 2 * APART) + four_words(x, 3 * APART)


@triton.jit
def _pair(word, factor, I: tl.constexpr):
    """The ``I``-th register of two codes as two fp32 numbers, scaled."""
    if I == 0:
        p = word & -2118024768
    elif I == 1:
        p = (word << 3) & -2118024768
    elif I == 2:
        p = ((word << 6) & 0x01C001C0) | ((word << 1) & -2147450880)
    else:
        p = ((word >> 3) & 0x01C001C0) | ((word << 2) & -2147450880)
    scale = (factor << 16).to(tl.float32, bitcast=True)
    return (p << 16).to(tl.float32, bitcast=True) * scale, (p & -65536).to(tl.float32, bitcast=True) * scale


@triton.jit
def _rows_by_tokens(a, b, PER: tl.constexpr):
    """The part of a product to which one register of each side contributes: [warps, 8 rows, 8 tokens]."""
    return tl.sum(tl.reshape(a, [PER, 8, 1, 4]) * tl.reshape(b, [PER, 1, 8, 4]), 3)


@triton.jit
def _word_in_steps(word, factor, x0, x1, x2, x3, PER: tl.constexpr):
    """Products of 8 rows and 8 tokens a warp over the columns of the words, as the two values a thread."""
    acc = tl.zeros([PER, 8, 8], tl.float32)
    x = (x0, x1, x2, x3)
    for i in tl.static_range(4):
        low, high = _pair(word, factor, i)
        acc += _rows_by_tokens(low, (x[i] << 16).to(tl.float32, bitcast=True), PER)
        acc += _rows_by_tokens(high, (x[i] & -65536).to(tl.float32, bitcast=True), PER)
    even, odd = tl.split(tl.reshape(acc, [PER, 8, 4, 2]))
    return tl.reshape(even, [PER * 32]), tl.reshape(odd, [PER * 32])


@triton.jit
def _word(a, b, fa, fb, x0, x1, x2, x3, c, PER: tl.constexpr, ASM: tl.constexpr):
    """Add the products of two words (rows r and r + 8) to a thread's four sums."""
    if ASM:
        return tl.inline_asm_elementwise(
            _WORD,
            "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f",
            [a, b, fa, fb, x0, x1, x2, x3, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        d0, d1 = _word_in_steps(a, fa, x0, x1, x2, x3, PER)
        d2, d3 = _word_in_steps(b, fb, x0, x1, x2, x3, PER)
        return c[0] + d0, c[1] + d1, c[2] + d2, c[3] + d3


@triton.jit
def add_tile(w, I: tl.constexpr, scales, live, x, c, PER: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr):
    """Add the products of the tile at ``w[I]`` to a thread's four sums. scales: the bytes of rows r and r + 8 (see
    SHIFT), and others above them."""
    fa = (scales & 255) * 0x00800080 + (126 - SHIFT) * 0x00800080
    fb = ((scales >> 8) & 255) * 0x00800080 + (126 - SHIFT) * 0x00800080
    if not EVEN:
        fa = tl.where(live, fa, 0)
        fb = tl.where(live, fb, 0)
    c = _word(w[I], w[I + 4], fa, fb, x[0], x[1], x[2], x[3], c, PER, ASM)
    c = _word(w[I + 1], w[I + 5], fa, fb, x[4], x[5], x[6], x[7], c, PER, ASM)
    c = _word(w[I + 2], w[I + 6], fa, fb, x[8], x[9], x[10], x[11], c, PER, ASM)
    c = _word(w[I + 3], w[I + 7], fa, fb, x[12], x[13], x[14], x[15], c, PER, ASM)
    return c


@triton.jit
def _sums(
    x, there, packed, scale, first, second, tiles, room, thread,
    KW: tl.constexpr, PER: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """A thread's sums over its warp's tiles of the strips ``first`` and ``second``, times tokens. x: int32 pointers to
    the thread's token, if one is ``there``; packed, scale: int32 and int16 pointers to the expert; room: see
    ``room_of``. WAIT: x is another kernel's result."""
    kw = thread // 32 % KW
    lane = thread % 32
    codes_a = packed + first * (tiles * 256) + lane * 4
    codes_b = packed + second * (tiles * 256) + lane * 4
    # Copies are of four bytes at least: half a warp has a strip's.
    strip = tl.where(lane < 16, first, second) if ASM else first
    scales_a = scale + strip * (tiles * 32) + (lane % 16 * 2 if ASM else lane)
    scales_b = scale + second * (tiles * 32) + lane
    zero = thread.to(tl.float32) * 0.0
    c = (zero, zero, zero, zero)
    d = (zero, zero, zero, zero)
    if ASM:
        place = room + thread // 32 * (STAGES * STAGE_BYTES)
        for i in tl.static_range(STAGES - 1):
            at = kw + i * KW
            copy_tile(
                place + i * STAGE_BYTES, codes_a + at * 256, codes_b + at * 256, scales_a + at * 32, at < tiles, lane,
            )  # fmt: skip
    await_inputs(WAIT)
    x += thread % 4 * 16
    slot = 0
    for step in tl.range(0, tiles, KW, loop_unroll_factor=UNROLL):
        now = step + kw
        live = now < tiles
        if not EVEN:
            now = tl.minimum(now, tiles - 1)
        if ASM:
            w = take_tile(place + slot * STAGE_BYTES, lane, STAGES - 2)
            of_a = w[16]
            of_b = w[17]
            next_slot = slot + (STAGES - 1)
            next_slot = tl.where(next_slot >= STAGES, next_slot - STAGES, next_slot)
            at = step + kw + (STAGES - 1) * KW
            copy_tile(
                place + next_slot * STAGE_BYTES, codes_a + at * 256, codes_b + at * 256, scales_a + at * 32,
                at < tiles, lane,
            )  # fmt: skip
            slot = tl.where(slot == STAGES - 1, 0, slot + 1)
        else:
            w = (
                four_words(codes_a + now * 256, 0)
                + four_words(codes_a + now * 256, 128)
                + four_words(codes_b + now * 256, 0)
                + four_words(codes_b + now * 256, 128)
            )
            of_a = tl.load(scales_a + now * 32).to(tl.int32)
            of_b = tl.load(scales_b + now * 32).to(tl.int32)
        own = activations(x + now * 64, there, ASM)
        c = add_tile(w, 0, of_a, live, own, c, PER, EVEN, ASM)
        d = add_tile(w, 8, of_b, live, own, d, PER, EVEN, ASM)
    return c, d


@triton.jit
def _together(c, d, KW: tl.constexpr, RW: tl.constexpr):
    """Sums of the warps that share rows: [RW * 32, 2 tokens, 2 rows that are 8 apart, 2 strips]."""
    low = tl.join(tl.join(c[0], c[1]), tl.join(c[2], c[3]))
    high = tl.join(tl.join(d[0], d[1]), tl.join(d[2], d[3]))
    every = tl.join(low, high)
    if KW > 1:
        every = tl.reshape(tl.sum(tl.reshape(every, [RW, KW, 32, 2, 2, 2]), 1), [RW * 32, 2, 2, 2])
    return every


@triton.jit
def _in_kernel(
    x, packed, scale, lists, counts, out, x_row, width, inner, capacity, beta, linear_beta, factor,
    TOPK: tl.constexpr, SITU: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, ROOM: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 RW inner columns (gate and up, then the activation) of one expert's tokens, 8 at a time."""
    await_inputs(PDL)
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    lists += expert * capacity
    tiles = width // 128
    packed += expert * 2 * inner * (width // 8)
    scale += expert * 2 * inner * (width // 64)
    thread = tl.arange(0, 32 * KW * RW)
    room = room_of(thread, ROOM, ASM)
    strip = tl.program_id(0) * RW + thread // 32 // KW
    # Results: threads of the warps that remain once those that shared rows are added up.
    end = tl.arange(0, 32 * RW)
    n = (tl.program_id(0) * RW + end // 32) * 16 + end % 32 // 4
    for m0 in range(0, count, 8):
        place = m0 + thread % 32 // 4
        pair = tl.load(lists + tl.minimum(place, count - 1))
        own = x + (pair // TOPK).to(tl.int64) * x_row
        c, d = _sums(
            own, place < count, packed, scale, strip, strip + inner // 16, tiles, room, thread,
            KW, KW * RW, UNROLL, EVEN, ASM, STAGES, False,
        )  # fmt: skip
        gate, up = tl.split(_together(c, d, KW, RW) * factor)
        # Rounded as the reference does.
        gate = gate.to(DTYPE).to(tl.float32)
        y = glu(gate, up.to(DTYPE).to(tl.float32), beta, linear_beta, SITU)
        token = m0 + (end % 4 * 2)[:, None, None] + tl.arange(0, 2)[None, :, None]
        to = tl.load(lists + tl.minimum(token, count - 1)).to(tl.int64) * inner
        column = n[:, None, None] + (tl.arange(0, 2) * 8)[None, None, :]
        tl.store(out + to + column, y.to(out.dtype.element_ty), mask=token < count)


@triton.jit
def _out_kernel(
    x, packed, scale, lists, counts, out, inner, width, capacity, factor,
    KW: tl.constexpr, RW: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr, ROOM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """32 RW columns of the down product of one expert's tokens, 8 at a time. The first weights are on their way before
    the activations are waited for: who chose which expert was known before the kernel that these come from."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    if count == 0:
        await_inputs(PDL)
    lists += expert * capacity
    tiles = inner // 128
    packed += expert * width * (inner // 8)
    scale += expert * width * (inner // 64)
    thread = tl.arange(0, 32 * KW * RW)
    room = room_of(thread, ROOM, ASM)
    strip = (tl.program_id(0) * RW + thread // 32 // KW) * 2
    end = tl.arange(0, 32 * RW)
    n = (tl.program_id(0) * RW + end // 32) * 32 + end % 32 // 4
    for m0 in range(0, count, 8):
        place = m0 + thread % 32 // 4
        pair = tl.load(lists + tl.minimum(place, count - 1))
        own = x + pair.to(tl.int64) * (inner // 2)
        c, d = _sums(
            own, place < count, packed, scale, strip, strip + 1, tiles, room, thread,
            KW, KW * RW, UNROLL, EVEN, ASM, STAGES, PDL,
        )  # fmt: skip
        total = _together(c, d, KW, RW) * factor
        token = m0 + (end % 4 * 2)[:, None, None, None] + tl.arange(0, 2)[None, :, None, None]
        to = tl.load(lists + tl.minimum(token, count - 1)).to(tl.int64) * width
        column = n[:, None, None, None] + (tl.arange(0, 2) * 8)[None, None, :, None]
        column += (tl.arange(0, 2) * 16)[None, None, None, :]
        tl.store(out + to + column, total.to(out.dtype.element_ty), mask=token < count)


def results(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    groups: tuple[Tensor, Tensor],
    top_k: int,
    warps: tuple[Warps, Warps],
    *,
    asm: bool = True,
) -> Tensor:
    """Each choice's expert output [T top_k, L] in bfloat16; choices of experts elsewhere are left unwritten.

    x bfloat16 [T, L] (rows may lie apart); weights in tiles; groups: of ``triton_group.group``. Strips that are no
    multiple of a program's are an error. ``asm`` False: the same arithmetic without inline assembly (Triton's
    interpreter has none).
    """
    tokens, width = x.shape
    count, double, _ = w13.shape
    inner = double // 2
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    # Two activations to a word.
    pairs = x.view(torch.int32)
    factor = 2.0**SHIFT.value
    w = warps[0]
    start.launch(
        _in_kernel,
        (inner // (TILE * w.rows), count),
        *(pairs, *words_of(w13), *groups, hidden, pairs.stride(0), width),
        *(inner, tokens, activation.beta, activation.linear_beta, factor),
        TOPK=top_k,
        SITU=activation.kind == "situ",
        **_options(w, width, asm),
        DTYPE=tl.bfloat16,
    )
    w = warps[1]
    start.launch(
        _out_kernel,
        (width // (2 * TILE * w.rows), count),
        *(hidden.view(torch.int32), *words_of(w2), *groups, out, inner, width, tokens, factor),
        **_options(w, inner, asm),
    )
    return out


def words_of(w: Mxfp4Weight) -> tuple[Tensor, Tensor]:
    return w.packed.view(torch.int32), w.scale.view(torch.int16)


def _options(w: Warps, width: int, asm: bool) -> dict[str, Any]:
    room = w.columns * w.rows * w.stages * STAGE_BYTES.value
    return {
        "KW": w.columns,
        "RW": w.rows,
        "UNROLL": w.unroll,
        "EVEN": width % (COLUMNS * w.columns) == 0,
        "ASM": asm,
        "ROOM": f"{{ .shared .align 128 .b8 tiles[{room}]; mov.u32 $0, tiles; }}",
        "STAGES": w.stages,
        "num_warps": w.columns * w.rows,
        "maxnreg": w.registers,
    }
