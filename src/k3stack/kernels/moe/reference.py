"""Router and experts token by token (architecture, sections 2.7 and 2.8)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def route(
    logits: Tensor, bias: Tensor, top_k: int, scaling: float, renormalize: bool, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts by ``sigmoid(logits) + bias``; weigh them by the sigmoid alone.

    logits [T, E] (wide), bias [E] -> ids int64 [T, k], weights [T, k] (wide): ``s / (sum s + 1e-20) * scaling``.
    ``forced`` int64 [T, k]: take these experts instead.
    """
    scores = 1 / (1 + torch.exp(-logits))
    ids = forced if forced is not None else torch.argsort(scores + bias, dim=-1, descending=True)[:, :top_k]
    weights = torch.stack([scores[t, ids[t]] for t in range(ids.shape[0])])
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Weighted sum of each token's experts.

    x [T, L], ids and weights [T, k], w13 [E, 2 I, L] (gate rows, then up rows), w2 [E, L, I] -> [T, L] in x's dtype.
    An expert's output is rounded to x's dtype, the weighted sum is formed in the wide dtype.
    """
    out = []
    for t in range(x.shape[0]):
        terms = [weights[t, j] * widen(w2[e] @ activation(w13[e] @ x[t])) for j, e in enumerate(ids[t].tolist())]
        out.append(torch.stack(terms).sum(0))
    return torch.stack(out).to(x.dtype)
