"""Norms as a few whole-tensor torch operations. Shapes and meaning as in ``reference``.

In a decode step an operation on a few rows takes as long as finding its code and data again after a product has
streamed weights through the caches, so the number of operations is what counts.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    a = widen(x)
    scale = _inverse_length(a, eps, x.shape[-1])
    if a.dtype == x.dtype:
        return torch.mul(a, scale).mul_(weight)
    return a.mul_(scale).to(x.dtype).mul_(weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.gated_rms_norm``."""
    a = widen(x)
    y = torch.mul(a, _inverse_length(a, eps, x.shape[-1])).mul_(weight).mul_(torch.sigmoid(widen(gate)))
    return y.to(gate.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See ``reference.l2_norm``."""
    a = widen(x)
    return a * _inverse_length(a, eps, 1)


def _inverse_length(a: Tensor, eps: float, count: int) -> Tensor:
    """Of the vectors a [..., n] in the wide dtype: 1 / sqrt(sum of squares / count + eps), [..., 1]."""
    length = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, a.dtype, a.device), length, length, value=1 / count).rsqrt_()


@lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)
