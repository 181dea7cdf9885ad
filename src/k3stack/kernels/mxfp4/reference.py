"""Decoding by the definition, one value at a time."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(packed: Tensor, scale: Tensor) -> Tensor:
    """packed uint8 [rows, columns / 2] (low nibble = even column), scale uint8 [rows, columns / 32] -> float64.

    A nibble is a sign bit and an index into ``MAGNITUDES``; a scale byte b stands for 2^(b - 127), and 255 for NaN.
    """
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half, dtype=torch.float64)
    for r in range(rows):
        for c in range(2 * half):
            code = (int(packed[r, c // 2]) >> (4 * (c % 2))) & 15
            byte = int(scale[r, c // GROUP])
            factor = float("nan") if byte == 255 else 2.0 ** (byte - 127)
            out[r, c] = (-1.0 if code & 8 else 1.0) * MAGNITUDES[code & 7] * factor
    return out
