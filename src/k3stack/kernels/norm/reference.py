"""Norms written out over one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis in the wide dtype, rounded to x's dtype, times ``weight``.

    x [..., D], weight [D] -> [..., D] in x's dtype.
    """
    rows = [
        (widen(r) / torch.sqrt((widen(r) ** 2).mean() + eps)).to(x.dtype) * weight for r in x.reshape(-1, x.shape[-1])
    ]
    return torch.stack(rows).reshape(x.shape)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``RMSNorm(x) * weight * sigmoid(gate)`` over the last axis, all in the wide dtype, in gate's dtype.

    x [..., K], gate [..., K], weight [K] (wide).
    """
    a, g = widen(x), widen(gate)
    norm = a / torch.sqrt((a**2).mean(-1, keepdim=True) + eps)
    return (norm * weight / (1 + torch.exp(-g))).to(gate.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis; eps is added to the sum. Wide dtype."""
    a = widen(x)
    return a / torch.sqrt((a**2).sum(-1, keepdim=True) + eps)
