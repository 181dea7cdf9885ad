"""Decoding by table, and encoding (for tests and for writing checkpoints of the published layout)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from k3stack.kernels.mxfp4.reference import GROUP, MAGNITUDES

_VALUES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.bfloat16)
_SCALES = torch.cat([torch.ldexp(torch.ones(255), torch.arange(-127, 128)), torch.tensor([float("nan")])]).bfloat16()
"""[256]: 2^(byte - 127), NaN for 255. All of them, and every product with a code, are exact in bfloat16."""
PIECE = 1 << 18
"""Values decoded at a time; their scratch memory stays in the CPU's cache."""


@cache
def _fours() -> Tensor:
    """int64 [65536]: the four bfloat16 values of two bytes (read as one little-endian number)."""
    pairs = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=1)
    fours = torch.cat([pairs.repeat(256, 1), pairs.repeat_interleave(256, dim=0)], dim=1)
    return fours.contiguous().view(torch.int64).view(-1)


def decode_into(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Decode packed uint8 [rows, columns / 2] and scale uint8 [rows, columns / 32] into ``out`` [rows, columns].

    Exact in bfloat16, float32 and float64.
    """
    rows, columns = out.shape
    step = max(1, PIECE // columns)
    for r in range(0, rows, step):
        target = out[r : r + step]
        codes = packed[r : r + step].view(torch.uint16).int().view(-1)
        values = _fours().index_select(0, codes).view(torch.bfloat16).view(-1, GROUP)
        factors = _SCALES.index_select(0, scale[r : r + step].int().view(-1)).unsqueeze(1)
        if target.dtype == torch.bfloat16 and target.is_contiguous():
            torch.mul(values, factors, out=target.view(-1, GROUP))
        else:
            target.copy_(values.mul_(factors).view(-1, columns))


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest MXFP4 of values [rows, columns] (columns a multiple of 32): packed and scale as ``decode_into`` takes.

    The scale is the largest power of two for which the group's largest magnitude is at least 4 (OCP's rule), so the
    largest may be clipped to 6.
    """
    rows, columns = values.shape
    groups = values.float().view(rows, columns // GROUP, GROUP)
    top = groups.abs().amax(-1)
    exponent = torch.where(top > 0, torch.frexp(top).exponent - 3, torch.zeros_like(top, dtype=torch.int32))
    exponent = exponent.clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    magnitudes = torch.tensor(MAGNITUDES)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8)
    codes |= (torch.signbit(scaled)).to(torch.uint8) << 3
    codes = codes.view(rows, columns // 2, 2)
    packed = codes[..., 0] | (codes[..., 1] << 4)
    return packed.contiguous(), (exponent + 127).to(torch.uint8)
