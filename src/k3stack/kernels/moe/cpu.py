"""Router and experts in torch: tokens grouped by expert, no padding. Shapes and meaning as in ``reference``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.precision import wide_dtype, widen


def route(
    logits: Tensor, bias: Tensor, top_k: int, scaling: float, renormalize: bool, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference.route``."""
    scores = torch.sigmoid(logits)
    ids = forced if forced is not None else torch.topk(scores + bias, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    return ids, weights.mul_(scaling) if scaling != 1.0 else weights


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """See ``reference.experts``."""
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=w13.shape[0]).tolist()
    grouped = x[order.div(top_k, rounding_mode="floor")]
    results = torch.empty_like(grouped)
    at = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(at, at + count)
            hidden = activation(F.linear(grouped[part], w13[expert]))
            torch.mm(hidden, w2[expert].T, out=results[part])
            at += count
    terms = torch.empty_like(results)
    terms[order] = results
    wide = widen(terms.view(tokens, top_k, -1))
    return torch.bmm(weights.to(wide_dtype(x.dtype)).unsqueeze(1), wide).squeeze(1).to(x.dtype)
