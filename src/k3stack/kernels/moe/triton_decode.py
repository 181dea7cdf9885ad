"""MXFP4 experts of a decode step: few tokens an expert, so what counts is how fast the weights' bytes are taken in.

Written a thread at a time: every tensor here has one value a thread, so that the codes go from memory straight to where
a matrix instruction (m16n8k16) wants them, and no weight passes through shared memory. A warp takes 16 rows of two
matrices and 8 tokens. Of 128 columns a thread reads 16 bytes of two rows: one group of 32 columns each, which has one
scale. In a word of 8 codes the nibbles i and i + 4 become one register of two bfloat16 numbers by two shifts and two
logic operations; the activations of columns i and i + 4 are brought together to match. The next columns' codes are
read before the present ones are multiplied. Products are exact, sums in fp32.
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
from k3stack.kernels.mxfp4.triton import SHIFT
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

TILE, TOKENS = 16, 8
"""Weight rows and tokens of a matrix instruction."""


@dataclass(frozen=True, slots=True)
class Warps:
    """Of one program: ``columns`` warps share the columns of the same rows, ``rows`` times over; steps of the loop are
    ``unroll``ed."""

    columns: int
    rows: int
    unroll: int = 1


ONE = (Warps(4, 1, 2), Warps(8, 1, 2))
SOME = (Warps(2, 2), Warps(2, 2))
"""Of the product into the experts and the one out of them: for one token, and for more (``benchmarks.tiles``)."""

# 256 bytes come into the cache where 16 are read: the others are the next steps' and the neighbouring warps'.
_LOAD = tl.constexpr("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_IF = tl.constexpr("""
{
.reg .pred p; .reg .b32 a, b, c, d;
setp.ne.b32 p, $5, 0;
mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;
@p ld.global.nc.v4.b32 {a, b, c, d}, [$4];
prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632;
}
""")
# Codes come out 2^-126 times what they stand for: the bits of e2m1 below bfloat16's sign, in the lowest bits of its
# exponent and the highest of its mantissa (0.5 is a subnormal number). lop3 with 0xEA is (a and b) or c.
_WORD = tl.constexpr("""
{
.reg .b32 s, m, p0, p1, p2, p3, r0, r1, r2, r3; .reg .f32 d0, d1, d2, d3;
shl.b32 s, $4, 12; shl.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; lop3.b32 p0, s, 0x80008000, m, 0xEA;
shl.b32 s, $4, 8; shl.b32 m, $4, 2; and.b32 m, m, 0x01C001C0; lop3.b32 p1, s, 0x80008000, m, 0xEA;
shl.b32 s, $4, 4; shr.b32 m, $4, 2; and.b32 m, m, 0x01C001C0; lop3.b32 p2, s, 0x80008000, m, 0xEA;
shr.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; lop3.b32 p3, $4, 0x80008000, m, 0xEA;
shl.b32 s, $5, 12; shl.b32 m, $5, 6; and.b32 m, m, 0x01C001C0; lop3.b32 r0, s, 0x80008000, m, 0xEA;
shl.b32 s, $5, 8; shl.b32 m, $5, 2; and.b32 m, m, 0x01C001C0; lop3.b32 r1, s, 0x80008000, m, 0xEA;
shl.b32 s, $5, 4; shr.b32 m, $5, 2; and.b32 m, m, 0x01C001C0; lop3.b32 r2, s, 0x80008000, m, 0xEA;
shr.b32 m, $5, 6; and.b32 m, m, 0x01C001C0; lop3.b32 r3, $5, 0x80008000, m, 0xEA;
mul.rn.bf16x2 p0, p0, $6; mul.rn.bf16x2 p1, p1, $6; mul.rn.bf16x2 p2, p2, $6; mul.rn.bf16x2 p3, p3, $6;
mul.rn.bf16x2 r0, r0, $7; mul.rn.bf16x2 r1, r1, $7; mul.rn.bf16x2 r2, r2, $7; mul.rn.bf16x2 r3, r3, $7;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0, d1, d2, d3}, {p0, r0, p1, r1}, {$8, $9}, {$12, $13, $14, $15};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {p2, r2, p3, r3}, {$10, $11}, {d0, d1, d2, d3};
}
""")


@triton.jit
def _codes(words, at, ASM: tl.constexpr):
    """Four neighbouring words from ``words`` + ``at`` a thread."""
    if ASM:
        address = (words + at).to(tl.int64)
        return tl.inline_asm_elementwise(
            _LOAD, "=r,=r,=r,=r,l", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        return tl.load(words + at), tl.load(words + at + 1), tl.load(words + at + 2), tl.load(words + at + 3)


@triton.jit
def _activations(x, at, live, ASM: tl.constexpr):
    """Eight bfloat16 values from the pairs ``x`` + ``at`` on, as pairs (0, 4), (1, 5), (2, 6), (3, 7); else zeros."""
    if ASM:
        address = (x + at).to(tl.int64)
        return tl.inline_asm_elementwise(
            _LOAD_IF,
            "=r,=r,=r,=r,l,r",
            [address, live.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        a = tl.load(x + at, mask=live, other=0)
        b = tl.load(x + at + 1, mask=live, other=0)
        c = tl.load(x + at + 2, mask=live, other=0)
        d = tl.load(x + at + 3, mask=live, other=0)
        low = 65535
        high = -65536
        return (
            (a & low) | (c << 16),
            ((a >> 16) & low) | (c & high),
            (b & low) | (d << 16),
            ((b >> 16) & low) | (d & high),
        )


@triton.jit
def _pair(word, factor, LEFT: tl.constexpr, BITS: tl.constexpr):
    """One register of two codes as two fp32 numbers, scaled."""
    m = word << BITS if BITS >= 0 else word >> -BITS
    p = ((word << LEFT) & -2147450880) | (m & 0x01C001C0)
    scale = (factor << 16).to(tl.float32, bitcast=True)
    return (p << 16).to(tl.float32, bitcast=True) * scale, (p & -65536).to(tl.float32, bitcast=True) * scale


@triton.jit
def _rows_by_tokens(a, b, PER: tl.constexpr):
    """The part of a product to which one register of each side contributes: [warps, 8 rows, 8 tokens]."""
    return tl.sum(tl.reshape(a, [PER, 8, 1, 4]) * tl.reshape(b, [PER, 1, 8, 4]), 3)


@triton.jit
def _word_in_steps(word, factor, x, PER: tl.constexpr):
    """Products of 8 rows and 8 tokens a warp over the columns of the words, as the two values a thread."""
    acc = tl.zeros([PER, 8, 8], tl.float32)
    for i in tl.static_range(4):
        low, high = _pair(word, factor, 12 - 4 * i, 6 if i == 0 else 2 if i == 1 else -2 if i == 2 else -6)
        acc += _rows_by_tokens(low, (x[i] << 16).to(tl.float32, bitcast=True), PER)
        acc += _rows_by_tokens(high, (x[i] & -65536).to(tl.float32, bitcast=True), PER)
    even, odd = tl.split(tl.reshape(acc, [PER, 8, 4, 2]))
    return tl.reshape(even, [PER * 32]), tl.reshape(odd, [PER * 32])


@triton.jit
def _word(a, b, fa, fb, x, c, PER: tl.constexpr, ASM: tl.constexpr):
    """Add the products of two words (rows r and r + 8) to a thread's four sums."""
    if ASM:
        return tl.inline_asm_elementwise(
            _WORD,
            "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f",
            [a, b, fa, fb, x[0], x[1], x[2], x[3], c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        d0, d1 = _word_in_steps(a, fa, x, PER)
        d2, d3 = _word_in_steps(b, fb, x, PER)
        return c[0] + d0, c[1] + d1, c[2] + d2, c[3] + d3


@triton.jit
def _factor(scale):
    """The scale of a group as bfloat16, twice in a register; see SHIFT."""
    return tl.minimum(scale.to(tl.int32) + (126 - SHIFT), 254) * 0x00800080


@triton.jit
def _four_words(packed, r0, r1, r2, r3, at, ASM: tl.constexpr):
    """The next 16 bytes of four rows."""
    return (
        _codes(packed, (r0 + at) * 4, ASM),
        _codes(packed, (r1 + at) * 4, ASM),
        _codes(packed, (r2 + at) * 4, ASM),
        _codes(packed, (r3 + at) * 4, ASM),
    )


@triton.jit
def _four_scales(scale, r0, r1, r2, r3, at):
    return tl.load(scale + r0 + at), tl.load(scale + r1 + at), tl.load(scale + r2 + at), tl.load(scale + r3 + at)


@triton.jit
def _two_rows(a, b, sa, sb, x0, x1, x2, x3, c, PER: tl.constexpr, ASM: tl.constexpr):
    """Add the products of 16 bytes each of rows r and r + 8 to a thread's four sums."""
    fa = _factor(sa)
    fb = _factor(sb)
    c = _word(a[0], b[0], fa, fb, x0, c, PER, ASM)
    c = _word(a[1], b[1], fa, fb, x1, c, PER, ASM)
    c = _word(a[2], b[2], fa, fb, x2, c, PER, ASM)
    c = _word(a[3], b[3], fa, fb, x3, c, PER, ASM)
    return c


@triton.jit
def _sums(
    x, live, packed, scale, first, second, limit, groups, q, kw,
    KW: tl.constexpr, PER: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A thread's sums over its warp's share of the columns: rows ``first`` and ``second`` (and 8 below each) times
    tokens. x: int32 pointers to the thread's token; rows of ``limit`` and more are read as the last one."""
    r0 = tl.minimum(first, limit - 1) * groups
    r1 = tl.minimum(first + 8, limit - 1) * groups
    r2 = tl.minimum(second, limit - 1) * groups
    r3 = tl.minimum(second + 8, limit - 1) * groups
    zero = q.to(tl.float32) * 0.0
    c = (zero, zero, zero, zero)
    d = (zero, zero, zero, zero)
    own = kw * 4 + q
    last = groups - 1
    # EVEN: every step is whole; what would be read behind the last step is the last step again.
    end = groups - KW * 4
    at = own if EVEN else tl.minimum(own, last)
    words = _four_words(packed, r0, r1, r2, r3, at, ASM)
    scales = _four_scales(scale, r0, r1, r2, r3, at)
    for step in tl.range(0, groups, KW * 4, loop_unroll_factor=UNROLL):
        now = step + own if EVEN else tl.minimum(step + own, last)
        here = live if EVEN else live & (step + own < groups)
        x0 = _activations(x, now * 16, here, ASM)
        x1 = _activations(x, now * 16 + 4, here, ASM)
        x2 = _activations(x, now * 16 + 8, here, ASM)
        x3 = _activations(x, now * 16 + 12, here, ASM)
        ahead = step + KW * 4
        at = own + tl.minimum(ahead, end) if EVEN else tl.minimum(ahead + own, last)
        new_words = _four_words(packed, r0, r1, r2, r3, at, ASM)
        new_scales = _four_scales(scale, r0, r1, r2, r3, at)
        c = _two_rows(words[0], words[1], scales[0], scales[1], x0, x1, x2, x3, c, PER, ASM)
        d = _two_rows(words[2], words[3], scales[2], scales[3], x0, x1, x2, x3, d, PER, ASM)
        words = new_words
        scales = new_scales
    return c, d


@triton.jit
def _together(c, KW: tl.constexpr, RW: tl.constexpr):
    """Sums of the warps that share rows: [RW * 32]."""
    if KW == 1:
        return c
    else:
        return tl.reshape(tl.sum(tl.reshape(c, [RW, KW, 32]), 1), [RW * 32])


@triton.jit
def _share(lists, counts, capacity, experts, LONE: tl.constexpr):
    """The expert of this program and how many tokens it has. LONE: one token; ``lists`` are its choices, less the first
    expert here (``counts``: an int), and each choice has its programs."""
    if LONE:
        expert = tl.load(lists + tl.program_id(1)) - counts
        return tl.where((expert >= 0) & (expert < experts), expert, 0), ((expert >= 0) & (expert < experts)).to(
            tl.int32
        )
    else:
        expert = tl.program_id(1).to(tl.int64)
        return expert, tl.load(counts + expert)


@triton.jit
def _choice(lists, at, LONE: tl.constexpr):
    """Which choices are in an expert's list at ``at``."""
    if LONE:
        return at * 0 + tl.program_id(1)
    else:
        return tl.load(lists + at)


@triton.jit
def _in_kernel(
    x, packed, scale, lists, counts, out, x_row, width, inner, capacity, experts, beta, linear_beta, factor,
    TOPK: tl.constexpr, SITU: tl.constexpr, LONE: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 RW inner columns (gate and up, then the activation) of one expert's tokens, 8 at a time."""
    await_inputs(PDL)
    expert, count = _share(lists, counts, capacity, experts, LONE)
    if not LONE:
        lists += expert * capacity
    groups = width // 32
    thread = tl.arange(0, 32 * KW * RW)
    row = (tl.program_id(0) * RW + thread // 32 // KW) * 16 + thread % 32 // 4
    # Results: threads of the warps that remain once those that shared rows are added up.
    end = tl.arange(0, 32 * RW)
    n = (tl.program_id(0) * RW + end // 32) * 16 + end % 32 // 4
    for m0 in range(0, count, 8):
        m = m0 + thread % 32 // 4
        pair = _choice(lists, tl.minimum(m, count - 1), LONE)
        own = x + (pair // TOPK).to(tl.int64) * x_row
        c, d = _sums(
            own, m < count, packed + expert * 2 * inner * groups * 4, scale + expert * 2 * inner * groups,
            row, row + inner, 2 * inner, groups, thread % 4, thread // 32 % KW,
            KW, KW * RW, UNROLL, EVEN, ASM,
        )  # fmt: skip
        token = m0 + end % 4 * 2
        to = _choice(lists, tl.minimum(token, count - 1), LONE).to(tl.int64)
        next_to = _choice(lists, tl.minimum(token + 1, count - 1), LONE).to(tl.int64)
        for i in tl.static_range(4):
            to_row = out + (to if i % 2 == 0 else next_to) * inner
            column = n + 8 * (i // 2)
            live = (column < inner) & (token + i % 2 < count)
            gate = _together(c[i], KW, RW) * factor
            up = _together(d[i], KW, RW) * factor
            _store_inner(to_row, gate, up, column, live, beta, linear_beta, SITU, DTYPE)


@triton.jit
def _store_inner(out, gate, up, n, live, beta, linear_beta, SITU: tl.constexpr, DTYPE: tl.constexpr):
    """Activate, and round as the reference does."""
    y = glu(gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), beta, linear_beta, SITU)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _out_kernel(
    x, packed, scale, lists, counts, out, inner, width, capacity, experts, factor,
    LONE: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """32 RW columns of the down product of one expert's tokens, 8 at a time."""
    await_inputs(PDL)
    expert, count = _share(lists, counts, capacity, experts, LONE)
    if not LONE:
        lists += expert * capacity
    groups = inner // 32
    thread = tl.arange(0, 32 * KW * RW)
    row = (tl.program_id(0) * RW + thread // 32 // KW) * 32 + thread % 32 // 4
    end = tl.arange(0, 32 * RW)
    n = (tl.program_id(0) * RW + end // 32) * 32 + end % 32 // 4
    for m0 in range(0, count, 8):
        m = m0 + thread % 32 // 4
        pair = _choice(lists, tl.minimum(m, count - 1), LONE)
        own = x + pair.to(tl.int64) * (inner // 2)
        c, d = _sums(
            own, m < count, packed + expert * width * groups * 4, scale + expert * width * groups,
            row, row + 16, width, groups, thread % 4, thread // 32 % KW, KW, KW * RW, UNROLL, EVEN, ASM,
        )  # fmt: skip
        token = m0 + end % 4 * 2
        to = _choice(lists, tl.minimum(token, count - 1), LONE).to(tl.int64)
        next_to = _choice(lists, tl.minimum(token + 1, count - 1), LONE).to(tl.int64)
        for i in tl.static_range(8):
            to_row = out + (to if i % 2 == 0 else next_to) * width
            column = n + 8 * (i // 2)
            total = _together(c[i] if i < 4 else d[i - 4], KW, RW) * factor
            live = (column < width) & (token + i % 2 < count)
            tl.store(to_row + column, total.to(out.dtype.element_ty), mask=live)


def results(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    groups: tuple[Tensor, Tensor] | tuple[Tensor, int],
    top_k: int,
    warps: tuple[Warps, Warps],
    *,
    asm: bool = True,
) -> Tensor:
    """Each choice's expert output [T top_k, L] in bfloat16; choices of experts elsewhere are left unwritten.

    x bfloat16 [T, L] (rows may lie apart); groups: lists int32 [E, T] and counts int32 [E] of the experts here
    (``triton.group``), or for one token its choices int64 [1, top_k] and the first expert here. ``asm`` False: the same
    arithmetic without inline assembly (Triton's interpreter has none).
    """
    tokens, width = x.shape
    count, double, _ = w13.shape
    inner, lone = double // 2, isinstance(groups[1], int)
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    # Two activations to a word.
    pairs = x.view(torch.int32)
    factor = 2.0**SHIFT.value
    each = top_k if lone else count
    common = (groups[0], groups[1])
    w = warps[0]
    start.launch(
        _in_kernel,
        (triton.cdiv(inner, TILE * w.rows), each),
        *(pairs, w13.packed.view(torch.int32), w13.scale, *common, hidden, pairs.stride(0), width),
        *(inner, groups[0].shape[1], count, activation.beta, activation.linear_beta, factor),
        TOPK=top_k,
        SITU=activation.kind == "situ",
        LONE=lone,
        **_options(w, width, asm),
        DTYPE=tl.bfloat16,
    )
    w = warps[1]
    start.launch(
        _out_kernel,
        (triton.cdiv(width, 2 * TILE * w.rows), each),
        *(hidden.view(torch.int32), w2.packed.view(torch.int32), w2.scale, *common, out, inner, width),
        *(groups[0].shape[1], count, factor),
        LONE=lone,
        **_options(w, inner, asm),
    )
    return out


def _options(w: Warps, width: int, asm: bool) -> dict[str, int | bool]:
    return {
        "KW": w.columns,
        "RW": w.rows,
        "UNROLL": w.unroll,
        "EVEN": width % (128 * w.columns) == 0,
        "ASM": asm,
        "num_warps": w.columns * w.rows,
    }
