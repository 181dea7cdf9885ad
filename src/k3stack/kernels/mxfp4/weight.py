"""Experts' weights that stay in MXFP4 in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3stack.kernels.mxfp4.reference import GROUP, MAGNITUDES


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Weights [E, out, in] of E experts: packed uint8 [E, out, in / 2], scale uint8 [E, out, in / 32]."""

    packed: Tensor
    scale: Tensor

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
        packed, scale = self.packed[expert].int(), self.scale[expert].int()
        pair = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        values = codes[pair & 7] * (1 - 2 * (pair >> 3))
        factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale - 127).repeat_interleave(GROUP, 1)
        return (values * factor).to(dtype)
