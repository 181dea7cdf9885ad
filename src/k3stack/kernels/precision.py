"""The precision in which sums, gates, softmax and states are computed beside a given compute dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; float32 and bfloat16 compute their sums in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """``x`` in the wide dtype of its own (no copy where it already is)."""
    return x.to(wide_dtype(x.dtype))
