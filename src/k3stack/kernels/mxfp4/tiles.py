"""The order in which the GPU's kernels take MXFP4 weights: tiles of 16 rows x 128 columns, codes ready for two shifts.

A strip of 16 rows takes the place that it has in the stored order; in it lies tile after tile of 128 columns. A tile's
codes are 16 rows of 64 bytes, so that four neighbouring threads that take 16 bytes each have a row, and a warp 512
bytes in one piece; a tile's scales lie row by row for the rows 0 to 7, the two of rows r and r + 8 side by side.

A word holds columns 0 to 7, the even ones in its lower half, the odd ones in its upper. Each half has four codes at
``SIGNS`` and ``MAGNITUDES``: a bfloat16 number has its sign at bit 15, the last two bits of its exponent and the first
of its mantissa at 8 to 6, so that columns 0 and 1 are there already, 2 and 3 are three places to the right, and the
others want two shifts.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from k3stack.kernels.mxfp4.reference import GROUP

ROWS, COLUMNS = 16, 128
SIGNS, MAGNITUDES = (15, 12, 14, 13), (6, 3, 0, 9)
"""Of columns 0, 2, 4, 6 (and 1, 3, 5, 7): the place of the sign, and that of the lowest of the three other bits."""
LARGEST = 192
"""Scale byte (2^65) up to which the kernels need no look at overflow."""
PIECE = 1 << 26
"""Bytes that are laid out at a time."""


def fits(packed: Tensor, scale: Tensor) -> bool:
    """Whether weights [E, rows, ...] are whole tiles and no scale is out of the kernels' range (or NaN)."""
    rows, columns = packed.shape[1], 2 * packed.shape[2]
    if rows % ROWS or columns % COLUMNS:
        return False
    return scale.is_meta or int(scale.max()) <= LARGEST


def lay_out(packed: Tensor, scale: Tensor) -> None:
    """Bring codes uint8 [E, rows, columns / 2] and scales uint8 [E, rows, columns / 32] from the stored order into
    tiles, in place."""
    first, second = _words_of_stored(packed.device.type, packed.device.index)
    for own in packed.split(max(PIECE // packed[0].numel(), 1)):
        pairs = own.view(torch.int16).int().bitwise_and_(0xFFFF).view(-1, 2)
        words = first.index_select(0, pairs[:, 0]).bitwise_or_(second.index_select(0, pairs[:, 1]))
        own.copy_(_codes_in_tiles(words.view(torch.uint8).view(own.shape)))
    scale.copy_(_scales_in_tiles(scale))


def stored(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The stored order [rows, ...] again of one expert's tiles: copies."""
    rows, half = packed.shape
    groups = scale.shape[1]
    lines = packed.view(rows // ROWS, -1, ROWS, COLUMNS // 2).transpose(1, 2).reshape(rows, half)
    halves = lines.contiguous().view(torch.int16).int().bitwise_and_(0xFFFF).view(-1, 2)
    nibbles = _stored_of_halves(packed.device.type, packed.device.index)
    words = nibbles.index_select(0, halves[:, 0]) | nibbles.index_select(0, halves[:, 1]) << 4
    own = scale.view(rows // ROWS, -1, 8, COLUMNS // GROUP, 2).permute(0, 4, 2, 1, 3)
    return words.view(torch.uint8).view(rows, half), own.reshape(rows, groups)


def _codes_in_tiles(packed: Tensor) -> Tensor:
    count, rows, _ = packed.shape
    return packed.view(count, rows // ROWS, ROWS, -1, COLUMNS // 2).transpose(2, 3).reshape(packed.shape)


def _scales_in_tiles(scale: Tensor) -> Tensor:
    count, rows, _ = scale.shape
    own = scale.view(count, rows // ROWS, 2, 8, -1, COLUMNS // GROUP)
    return own.permute(0, 1, 4, 3, 5, 2).reshape(scale.shape)


def _placed(code: Tensor, i: int) -> Tensor:
    """The bits of codes int32 that are the ``i``-th of their halves."""
    return (code >> 3 & 1) << SIGNS[i] | (code & 7) << MAGNITUDES[i]


@cache
def _words_of_stored(kind: str, index: int | None) -> tuple[Tensor, Tensor]:
    """int32 [65536] twice: what the lower and the upper 16 bits of a stored word contribute to the word in order."""
    four = torch.arange(1 << 16, dtype=torch.int32, device=torch.device(kind, index))
    parts = []
    for i in (0, 2):
        even = _placed(four & 15, i) | _placed(four >> 8 & 15, i + 1)
        odd = _placed(four >> 4 & 15, i) | _placed(four >> 12 & 15, i + 1)
        parts.append(even | odd << 16)
    return parts[0], parts[1]


@cache
def _stored_of_halves(kind: str, index: int | None) -> Tensor:
    """int32 [65536]: the four codes of a half, in the lower nibbles of four bytes."""
    half = torch.arange(1 << 16, dtype=torch.int32, device=torch.device(kind, index))
    codes = [(half >> SIGNS[i] & 1) << 3 | half >> MAGNITUDES[i] & 7 for i in range(4)]
    return codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24
