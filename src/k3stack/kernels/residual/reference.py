"""The mix by its formula, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def mix(rows: Tensor, score: Tensor, eps: float) -> Tensor:
    """Softmax-weighted mean of a token's rows.

    rows [T, n, D] (bank rows, then the running prefix), score [D] = norm weight x scorer (wide)
    -> [T, D] in rows' dtype. A row's score is ``sum_d r g w / sqrt(mean_d r^2 + eps)``; the un-normalised rows are
    averaged.
    """
    out = []
    for token in widen(rows):
        s = torch.stack([(r * score).sum() / torch.sqrt((r * r).mean() + eps) for r in token])
        a = torch.exp(s - s.max())
        out.append((a / a.sum()) @ token)
    return torch.stack(out).to(rows.dtype)
