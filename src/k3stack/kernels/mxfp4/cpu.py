"""Decoding by table, and encoding (for tests and for writing checkpoints of the published layout)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.mxfp4.reference import GROUP, MAGNITUDES

_VALUES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=1)
"""[256, 2]: the even and the odd column of every byte."""
_SCALES = torch.cat([torch.ldexp(torch.ones(255), torch.arange(-127, 128)), torch.tensor([float("nan")])])
"""[256]: 2^(byte - 127), NaN for 255. All of them, and every product with a code, are exact in float32 and bfloat16."""


def decode_into(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Decode packed uint8 [rows, columns / 2] and scale uint8 [rows, columns / 32] into ``out`` [rows, columns].

    Exact in bfloat16, float32 and float64. Works in slices of rows so that scratch memory stays small.
    """
    rows, columns = out.shape
    step = max(1, (1 << 20) // columns)
    for r in range(0, rows, step):
        pairs = F.embedding(packed[r : r + step].int(), _PAIRS)
        factor = F.embedding(scale[r : r + step].int(), _SCALES.unsqueeze(1))
        values = pairs.view(pairs.shape[0], columns // GROUP, GROUP) * factor
        out[r : r + step] = values.view(-1, columns)


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
