"""Experts' weights that stay in MXFP4 in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3stack.kernels.mxfp4 import tiles
from k3stack.kernels.mxfp4.reference import GROUP, MAGNITUDES


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Weights [E, out, in] of E experts: packed uint8 [E, out, in / 2], scale uint8 [E, out, in / 32].

    ``tiled``: they lie in the order of ``mxfp4.tiles`` instead of the stored one, in the same memory.
    """

    packed: Tensor
    scale: Tensor
    tiled: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        e, rows, half = self.packed.shape
        return e, rows, 2 * half

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def plain(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The decoded matrix [out, in] of one expert."""
        codes = torch.tensor(MAGNITUDES, device=self.packed.device)
        packed, scale = self.packed[expert], self.scale[expert]
        if self.tiled:
            packed, scale = tiles.stored(packed, scale)
        packed, scale = packed.int(), scale.int()
        pair = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        values = codes[pair & 7] * (1 - 2 * (pair >> 3))
        factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale - 127).repeat_interleave(GROUP, 1)
        return (values * factor).to(dtype)


def in_tiles(w13: Mxfp4Weight, w2: Mxfp4Weight) -> tuple[Mxfp4Weight, Mxfp4Weight]:
    """Both with their memory in the order of ``mxfp4.tiles``, or as they are where one of them does not fit it; gate
    and up are to be whole tiles, and the rows of the second matrix pairs of them."""
    whole = w13.shape[1] % (2 * tiles.ROWS) == 0 and w2.shape[1] % (2 * tiles.ROWS) == 0
    if not whole or not all(tiles.fits(w.packed, w.scale) for w in (w13, w2)):
        return w13, w2
    for w in (w13, w2):
        if not w.packed.is_meta:
            tiles.lay_out(w.packed, w.scale)
    return Mxfp4Weight(w13.packed, w13.scale, True), Mxfp4Weight(w2.packed, w2.scale, True)
