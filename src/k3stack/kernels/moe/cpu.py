"""Router and experts in torch: tokens grouped by expert. Shapes and meaning as in ``reference``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear.cpu import Weight
from k3stack.kernels.precision import widen

FEW_ROWS = 1024
"""Up to this many grouped rows one activation of all of them costs less than one an expert."""


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
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Sequence[Weight],
    w2: Sequence[Weight],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """See ``reference.experts``; w13 and w2 may be packed, one weight an expert.

    Each expert's tokens lie together. Groups of few tokens are filled up to ``linear.ROWS`` (with token 0, whose extra
    results nobody reads), which is faster than computing fewer rows.
    """
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(w13))
    sizes = torch.where(counts > 0, counts.clamp(min=linear.ROWS), counts)
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    place = torch.arange(flat.shape[0], device=x.device) + shift[flat[order]]
    used = [(e, n) for e, n in enumerate(sizes.tolist()) if n]
    source = torch.zeros(sum(n for _, n in used), dtype=torch.int64, device=x.device)
    source[place] = order.div(top_k, rounding_mode="floor")
    groups = x[source].split([n for _, n in used])
    hidden = [linear.linear(group, w13[e]) for group, (e, _) in zip(groups, used, strict=True)]
    if source.shape[0] <= FEW_ROWS:
        inner = activation(torch.cat(hidden)).split([n for _, n in used])
    else:
        inner = tuple(activation(h) for h in hidden)
    results = torch.cat([linear.linear(h, w2[e]) for h, (e, _) in zip(inner, used, strict=True)])
    where = torch.empty_like(place)
    where[order] = place
    terms = widen(results[where]).view(tokens, top_k, -1)
    return torch.bmm(weights.unsqueeze(1), terms).squeeze(1).to(x.dtype)
