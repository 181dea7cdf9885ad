"""MXFP4 weights unpacked in registers.

In the stored order the two nibbles of a byte are neighbouring columns. A product over all columns is the sum of one
over the even and one over the odd columns, so that nothing has to be interleaved: activations are given as their even
and odd halves. (The order of ``mxfp4.tiles`` needs less to unpack it.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SHIFT = tl.constexpr(64)
"""bfloat16 weights are made 2^-64 times what they are, so that no power of two on the way leaves the format; scales of
2^-60 to 2^64 are exact, smaller ones become 0. The accumulated sum is multiplied by 2^64."""

# One register holds four bytes. A nibble's sign and its three other bits are moved to where bfloat16 has its sign, the
# two lowest bits of its exponent and the highest of its mantissa: a number 2^-126 times the code's, also for 0.5, which
# is a subnormal one. 0x4140 and 0x4342 spread two bytes over two halves. lop3 with 0xEA is (a and b) or c.
_UNPACK = tl.constexpr("""
{
.reg .b32 t0, t1, s, m;
prmt.b32 t0, $4, 0, 0x4140;
prmt.b32 t1, $4, 0, 0x4342;
shl.b32 s, t0, 12; shl.b32 m, t0, 6; and.b32 s, s, 0x80008000; lop3.b32 $0, m, 0x01C001C0, s, 0xEA;
shl.b32 s, t1, 12; shl.b32 m, t1, 6; and.b32 s, s, 0x80008000; lop3.b32 $1, m, 0x01C001C0, s, 0xEA;
shl.b32 s, t0, 8; shl.b32 m, t0, 2; and.b32 s, s, 0x80008000; lop3.b32 $2, m, 0x01C001C0, s, 0xEA;
shl.b32 s, t1, 8; shl.b32 m, t1, 2; and.b32 s, s, 0x80008000; lop3.b32 $3, m, 0x01C001C0, s, 0xEA;
}
""")


@triton.jit
def unpack(codes, scale, BF16: tl.constexpr):
    """codes uint8 [N, G, 16], scale uint8 [N, G, 1] -> even and odd columns [N, G, 16] (bf16: see SHIFT)."""
    if BF16:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        # 2^126 to undo the placing, 2^(b - 127) for the scale, 2^-64: a biased exponent of b + 62.
        bits = tl.minimum(tl.maximum(scale.to(tl.int32) + (126 - SHIFT), 0), 254) << 7
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        return low * factor, high * factor
    else:
        factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        wide = codes.to(tl.int32)
        return _value(wide & 15) * factor, _value(wide >> 4) * factor


# The same from two halves of words in the order of ``mxfp4.tiles``.
_UNPACK_TILES = tl.constexpr("""
{
.reg .b32 s, m;
and.b32 $0, $4, 0x81C081C0;
shl.b32 m, $4, 3; and.b32 $1, m, 0x81C081C0;
shl.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; shl.b32 s, $4, 1; lop3.b32 $2, s, 0x80008000, m, 0xEA;
shr.b32 m, $4, 3; and.b32 m, m, 0x01C001C0; shl.b32 s, $4, 2; lop3.b32 $3, s, 0x80008000, m, 0xEA;
}
""")


@triton.jit
def unpack_tiles(halves, scale, BF16: tl.constexpr):
    """halves int16 [N, C] of words in the order of ``mxfp4.tiles``, scale uint8 [N, C] -> columns 0 (or 1), 2, 4 and 6
    of each word, [N, C] four times (bf16: see SHIFT; a scale is at most 192)."""
    if BF16:
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK_TILES,
            "=&r,=&r,=&r,=&r,r",
            [halves],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        bits = (scale.to(tl.int16) + (126 - SHIFT)) << 7
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        return a * factor, b * factor, c * factor, d * factor
    else:
        factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        h = halves.to(tl.int32)
        return (
            _value(((h >> 12) & 8) | ((h >> 6) & 7)) * factor,
            _value(((h >> 9) & 8) | ((h >> 3) & 7)) * factor,
            _value(((h >> 11) & 8) | (h & 7)) * factor,
            _value(((h >> 10) & 8) | ((h >> 9) & 7)) * factor,
        )


@triton.jit
def _value(nibble):
    bits = ((nibble & 8) << 28) | ((nibble & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


def halves(x: Tensor) -> Tensor:
    """x [T, in] -> [T, in]: the even columns, then the odd ones."""
    return x.view(x.shape[0], -1, 2).transpose(1, 2).reshape(x.shape)
