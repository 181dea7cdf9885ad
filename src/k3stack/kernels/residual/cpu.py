"""The mix as batched products. Shapes and meaning as in ``reference``."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def mix(rows: Tensor, score: Tensor, eps: float) -> Tensor:
    """See ``reference.mix``."""
    if rows.shape[1] == 1:
        return rows[:, 0]
    r = widen(rows)
    scale = torch.rsqrt(torch.linalg.vecdot(r, r).div_(r.shape[-1]).add_(eps))
    weights = torch.softmax((r @ score).mul_(scale), dim=-1)
    return torch.bmm(weights.unsqueeze(1), r).squeeze(1).to(rows.dtype)
