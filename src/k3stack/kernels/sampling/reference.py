"""The least weight that is kept, by sorting."""

from __future__ import annotations

import torch
from torch import Tensor


def least_kept(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """weights [n, vocab] of at least 0, of which the largest is 1; top_k int64 [n] (0: all), top_p and min_p float64
    [n] -> [n]: tokens of this weight and more are kept.

    top-k keeps the k largest, top-p the largest of these until they have that share of their sum, min-p what is at
    least that share of the largest. Weights that equal the last one kept stay.
    """
    ordered = weights.double().sort(dim=1, descending=True).values
    nth = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1]) - 1
    floor = torch.where(top_k > 0, ordered.gather(1, nth.unsqueeze(1)).squeeze(1), 0.0)
    mass = ordered.masked_fill(ordered < floor.unsqueeze(1), 0.0).cumsum(1)
    at = torch.searchsorted(mass, (mass[:, -1] * top_p).unsqueeze(1)).clamp_(max=ordered.shape[1] - 1)
    by_mass = torch.where(top_p < 1.0, ordered.gather(1, at).squeeze(1), 0.0)
    return torch.maximum(torch.maximum(floor, by_mass).to(weights.dtype), min_p.to(weights.dtype))
