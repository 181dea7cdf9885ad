"""Norms as a few whole-tensor torch operations. Shapes and meaning as in ``reference``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    a, width = widen(x), x.shape[-1:]
    if a.dtype == x.dtype:
        return F.rms_norm(a, width, weight, eps)
    return F.rms_norm(a, width, None, eps).to(x.dtype).mul_(weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.gated_rms_norm``."""
    y = F.rms_norm(widen(x), x.shape[-1:], weight, eps).mul_(torch.sigmoid(widen(gate)))
    return y.to(gate.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See ``reference.l2_norm``."""
    a = widen(x)
    length = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    return a * length.square_().add_(eps).rsqrt_()
