"""The product by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out] in x's dtype, summed in the wide dtype."""
    return torch.stack([(widen(weight) * widen(row)).sum(1) for row in x]).to(x.dtype)
