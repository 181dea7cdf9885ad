"""MXFP4 experts of a decode step: few tokens an expert, so what counts is how fast the weights' bytes are taken in.

A word of 4 bytes holds the codes of 8 neighbouring columns. Its nibbles i and i + 4 become one register of two fp16
numbers by two shifts and two logic operations, and are multiplied with the activations of columns i and i + 4 at once.
fp16 holds a bfloat16 activation exactly once it is scaled by a power of two; 8 products are added in fp16, everything
else in fp32. A weight's scale is applied to the sum over its 32 columns. No tensor cores: with one or two tokens they
would be idle, and the weights would have to pass through shared memory.
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
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

WORDS = 8
"""Columns of one word."""
TOP = tl.constexpr(14)
"""Activations are scaled so that a token's largest lies between 2^14 and 2^15."""
INNER_FACTOR = tl.constexpr(512.0)
"""SiTU's outputs are below 4 * 25: times 2^9 they are finite in fp16. (Where all are below 1e-4, bits are lost.)"""


@dataclass(frozen=True, slots=True)
class Rows:
    """One program's tile: weight rows, groups of 32 columns a pass, tokens at once, warps."""

    n: int
    groups: int
    tokens: int
    warps: int


ONE = Rows(16, 32, 1, 8)
SOME = Rows(16, 16, 2, 4)

# Codes come out 2^-14 times what they stand for: the bits of e2m1 below fp16's sign, in the lowest bits of its exponent
# and the highest of its mantissa. lop3 with 0xEA is (a and b) or c.
_UNPACK = tl.constexpr("""
{
.reg .b32 s, m;
shl.b32 s, $4, 12; shl.b32 m, $4, 9; and.b32 s, s, 0x80008000; lop3.b32 $0, m, 0x0E000E00, s, 0xEA;
shl.b32 s, $4, 8; shl.b32 m, $4, 5; and.b32 s, s, 0x80008000; lop3.b32 $1, m, 0x0E000E00, s, 0xEA;
shl.b32 s, $4, 4; shl.b32 m, $4, 1; and.b32 s, s, 0x80008000; lop3.b32 $2, m, 0x0E000E00, s, 0xEA;
shr.b32 m, $4, 3; and.b32 s, $4, 0x80008000; lop3.b32 $3, m, 0x0E000E00, s, 0xEA;
}
""")
_DOT = tl.constexpr("""
{
.reg .b32 p; .reg .b16 a, b; .reg .f32 x, y;
mul.rn.f16x2 p, $1, $5;
fma.rn.f16x2 p, $2, $6, p;
fma.rn.f16x2 p, $3, $7, p;
fma.rn.f16x2 p, $4, $8, p;
mov.b32 {a, b}, p;
cvt.f32.f16 x, a; cvt.f32.f16 y, b; add.f32 $0, x, y;
}
""")


@triton.jit
def _codes(word, ASM: tl.constexpr):
    """Four registers of two fp16 codes (2^-14 times) from a word: nibbles (0, 4), (1, 5), (2, 6), (3, 7)."""
    if ASM:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [word], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        return (
            ((word << 12) & -2147450880) | ((word << 9) & 0x0E000E00),
            ((word << 8) & -2147450880) | ((word << 5) & 0x0E000E00),
            ((word << 4) & -2147450880) | ((word << 1) & 0x0E000E00),
            (word & -2147450880) | ((word >> 3) & 0x0E000E00),
        )


@triton.jit
def _both(a, b):
    """The two products of two registers of fp16 pairs, added, in fp32."""
    low = (a & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((a >> 16) & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    x = (b & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    y = ((b >> 16) & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low * x + high * y


@triton.jit
def _dot(c0, c1, c2, c3, x0, x1, x2, x3, ASM: tl.constexpr):
    """The sum of a word's 8 products."""
    if ASM:
        return tl.inline_asm_elementwise(
            _DOT, "=f,r,r,r,r,r,r,r,r", [c0, c1, c2, c3, x0, x1, x2, x3], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return _both(c0, x0) + _both(c1, x1) + _both(c2, x2) + _both(c3, x3)


@triton.jit
def _weigh(words, scale, x0, x1, x2, x3, y0, y1, y2, y3, first, second, TWO: tl.constexpr, ASM: tl.constexpr):
    """Add this pass's products to the sums [N, G] of one or two tokens. words [N, G, 4], scale [N, G] as bytes."""
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    c0, c1, c2, c3 = _codes(words, ASM)
    first += tl.sum(_dot(c0, c1, c2, c3, x0, x1, x2, x3, ASM), 2) * factor
    if TWO:
        second += tl.sum(_dot(c0, c1, c2, c3, y0, y1, y2, y3, ASM), 2) * factor
    return first, second


@triton.jit
def _activations(x, at, there, words):
    """The four registers of each word [1, G, 4] of one token."""
    x0 = tl.load(x + at, mask=there, other=0)
    x1 = tl.load(x + words + at, mask=there, other=0)
    x2 = tl.load(x + 2 * words + at, mask=there, other=0)
    x3 = tl.load(x + 3 * words + at, mask=there, other=0)
    return x0, x1, x2, x3


@triton.jit
def _prepare_kernel(x, out, factors, x_row, words, BLOCK: tl.constexpr):
    """One token's activations as fp16 in the order of the codes, and what its sums must be multiplied with."""
    token = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK)[:, None]
    i = tl.arange(0, 8)[None, :]
    value = tl.load(x + token * x_row + w * 8 + i, mask=w < words, other=0.0).to(tl.float32)
    exponent = (tl.max(tl.max(tl.abs(value), 1), 0).to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(254 + TOP - exponent, 254) << 23
    down = tl.minimum(exponent + 14 - TOP, 254) << 23
    half = (value * up.to(tl.float32, bitcast=True)).to(tl.float16)
    tl.store(out + token * words * 8 + ((i % 4) * words + w) * 2 + i // 4, half, mask=w < words)
    tl.store(factors + token, down.to(tl.float32, bitcast=True))


@triton.jit
def _in_kernel(
    x, factors, packed, scale, lists, counts, out, words, inner, capacity, beta, linear_beta,
    TOPK: tl.constexpr, SITU: tl.constexpr, N: tl.constexpr, G: tl.constexpr, TWO: tl.constexpr, ASM: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """N inner columns (gate and up, then the activation) of one expert's tokens, one or two at a time."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    STEP: tl.constexpr = 2 if TWO else 1
    n = tl.program_id(0) * N + tl.arange(0, N)
    g = tl.arange(0, G)
    j = tl.arange(0, 4)[None, None, :]
    live = n < inner
    gate_row = expert * 2 * inner + n
    up_row = gate_row + inner
    groups = words // 4
    for m in range(0, count, STEP):
        pair = tl.load(lists + expert * capacity + m).to(tl.int64)
        other = tl.load(lists + expert * capacity + tl.minimum(m + STEP - 1, count - 1)).to(tl.int64)
        xs = x + pair // TOPK * words * 4
        ys = x + other // TOPK * words * 4
        gate = tl.zeros([N, G], tl.float32)
        up = tl.zeros([N, G], tl.float32)
        gate_2 = tl.zeros([N, G], tl.float32)
        up_2 = tl.zeros([N, G], tl.float32)
        for g0 in range(0, groups, G):
            here = g0 + g < groups
            at = (g0 + g)[None, :, None] * 4 + j
            there = here[None, :, None]
            both = live[:, None] & here[None, :]
            w_gate = tl.load(packed + gate_row[:, None, None] * words + at, mask=both[:, :, None], other=0)
            w_up = tl.load(packed + up_row[:, None, None] * words + at, mask=both[:, :, None], other=0)
            s_gate = tl.load(scale + gate_row[:, None] * groups + (g0 + g)[None, :], mask=both, other=0)
            s_up = tl.load(scale + up_row[:, None] * groups + (g0 + g)[None, :], mask=both, other=0)
            x0, x1, x2, x3 = _activations(xs, at, there, words)
            y0, y1, y2, y3 = x0, x1, x2, x3
            if TWO:
                y0, y1, y2, y3 = _activations(ys, at, there, words)
            gate, gate_2 = _weigh(w_gate, s_gate, x0, x1, x2, x3, y0, y1, y2, y3, gate, gate_2, TWO, ASM)
            up, up_2 = _weigh(w_up, s_up, x0, x1, x2, x3, y0, y1, y2, y3, up, up_2, TWO, ASM)
        f = tl.load(factors + pair // TOPK)
        _store_inner(
            out + pair * inner, tl.sum(gate, 1) * f, tl.sum(up, 1) * f, n, inner, live, beta, linear_beta, SITU, DTYPE
        )
        if TWO:
            f = tl.load(factors + other // TOPK)
            _store_inner(
                out + other * inner,
                tl.sum(gate_2, 1) * f,
                tl.sum(up_2, 1) * f,
                n,
                inner,
                live,
                beta,
                linear_beta,
                SITU,
                DTYPE,
            )


@triton.jit
def _store_inner(out, gate, up, n, inner, live, beta, linear_beta, SITU: tl.constexpr, DTYPE: tl.constexpr):
    """Activate, round as the reference does, and store for the next product as ``_prepare_kernel`` stores."""
    y = glu(gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), beta, linear_beta, SITU).to(DTYPE)
    half = (y.to(tl.float32) * INNER_FACTOR).to(tl.float16)
    i = n % 8
    tl.store(out + ((i % 4) * (inner // 8) + n // 8) * 2 + i // 4, half, mask=live)


@triton.jit
def _out_kernel(
    x, packed, scale, lists, counts, out, words, width, capacity, factor,
    N: tl.constexpr, G: tl.constexpr, TWO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """N columns of the down product of one expert's tokens, one or two at a time."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    STEP: tl.constexpr = 2 if TWO else 1
    n = tl.program_id(0) * N + tl.arange(0, N)
    g = tl.arange(0, G)
    j = tl.arange(0, 4)[None, None, :]
    live = n < width
    row = expert * width + n
    groups = words // 4
    for m in range(0, count, STEP):
        pair = tl.load(lists + expert * capacity + m).to(tl.int64)
        other = tl.load(lists + expert * capacity + tl.minimum(m + STEP - 1, count - 1)).to(tl.int64)
        first = tl.zeros([N, G], tl.float32)
        second = tl.zeros([N, G], tl.float32)
        for g0 in range(0, groups, G):
            here = g0 + g < groups
            at = (g0 + g)[None, :, None] * 4 + j
            both = live[:, None] & here[None, :]
            codes = tl.load(packed + row[:, None, None] * words + at, mask=both[:, :, None], other=0)
            byte = tl.load(scale + row[:, None] * groups + (g0 + g)[None, :], mask=both, other=0)
            x0, x1, x2, x3 = _activations(x + pair * words * 4, at, here[None, :, None], words)
            y0, y1, y2, y3 = x0, x1, x2, x3
            if TWO:
                y0, y1, y2, y3 = _activations(x + other * words * 4, at, here[None, :, None], words)
            first, second = _weigh(codes, byte, x0, x1, x2, x3, y0, y1, y2, y3, first, second, TWO, ASM)
        tl.store(out + pair * width + n, (tl.sum(first, 1) * factor).to(out.dtype.element_ty), mask=live)
        if TWO:
            tl.store(out + other * width + n, (tl.sum(second, 1) * factor).to(out.dtype.element_ty), mask=live)


def results(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    lists: Tensor,
    counts: Tensor,
    top_k: int,
    rows: tuple[Rows, Rows],
    *,
    asm: bool = True,
) -> Tensor:
    """Each choice's expert output [T top_k, L] in x's dtype; choices of experts elsewhere are left unwritten.

    x [T, L], lists int32 [E, T] and counts int32 [E] of the experts here (``triton.group``). ``asm`` False: the same
    arithmetic without inline assembly (Triton's interpreter has none).
    """
    tokens, width = x.shape
    count, double, _ = w13.shape
    inner, device = double // 2, x.device
    x = x.contiguous()
    ready = torch.empty(tokens, width // 2, dtype=torch.int32, device=device)
    factors = torch.empty(tokens, dtype=torch.float32, device=device)
    start.launch(
        _prepare_kernel,
        (tokens,),
        *(x, ready.view(torch.float16), factors, x.stride(0), width // WORDS),
        BLOCK=triton.next_power_of_2(width // WORDS),
        num_warps=4,
    )
    hidden = torch.empty(tokens * top_k, inner // 2, dtype=torch.int32, device=device)
    out = torch.empty(tokens * top_k, width, dtype=x.dtype, device=device)
    t = rows[0]
    start.launch(
        _in_kernel,
        (triton.cdiv(inner, t.n), count),
        *(ready, factors, w13.packed.view(torch.int32), w13.scale, lists, counts, hidden.view(torch.float16)),
        *(width // WORDS, inner, lists.shape[1], activation.beta, activation.linear_beta),
        TOPK=top_k,
        SITU=activation.kind == "situ",
        N=t.n,
        G=t.groups,
        TWO=t.tokens == 2,
        ASM=asm,
        DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float32,
        num_warps=t.warps,
    )
    t = rows[1]
    start.launch(
        _out_kernel,
        (triton.cdiv(width, t.n), count),
        *(hidden, w2.packed.view(torch.int32), w2.scale, lists, counts, out, inner // WORDS, width, lists.shape[1]),
        2.0**14 / INNER_FACTOR.value,
        N=t.n,
        G=t.groups,
        TWO=t.tokens == 2,
        ASM=asm,
        num_warps=t.warps,
    )
    return out
