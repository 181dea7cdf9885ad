"""Router and experts in torch: tokens grouped by expert. Shapes and meaning as in ``reference``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

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
    if tokens == 1:
        return _experts_of_one(x, ids[0].tolist(), weights, w13, w2, activation)
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(w13))
    sizes = torch.where(counts > 0, counts.clamp(min=linear.ROWS), counts)
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    place = torch.arange(flat.shape[0], device=x.device) + shift[flat[order]]
    used = [(e, n) for e, n in enumerate(sizes.tolist()) if n]
    source = torch.zeros(sum(n for _, n in used), dtype=torch.int64, device=x.device)
    source[place] = order.div(top_k, rounding_mode="floor")
    sizes_used = [n for _, n in used]
    groups = x.index_select(0, source).split(sizes_used)
    hidden = [linear.linear(group, w13[e]) for group, (e, _) in zip(groups, used, strict=True)]
    if source.shape[0] <= FEW_ROWS:
        inner = activation(torch.cat(hidden)).split(sizes_used)
    else:
        inner = tuple(activation(h) for h in hidden)
    results = widen(torch.cat([linear.linear(h, w2[e]) for h, (e, _) in zip(inner, used, strict=True)]))
    where = torch.empty_like(place)
    where[order] = place
    # One fused pass: gather each token's k results, weigh and add them, in the order of ids.
    return F.embedding_bag(where.view(tokens, top_k), results, per_sample_weights=weights, mode="sum").to(x.dtype)


def _experts_of_one(
    x: Tensor,
    chosen: list[int],
    weights: Tensor,
    w13: Sequence[Weight],
    w2: Sequence[Weight],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The experts of a single token: nothing to group, every expert reads the same rows."""
    rows = F.pad(x, (0, 0, 0, linear.ROWS - 1))
    inner = activation(torch.cat([linear.linear(rows, w13[e])[:1] for e in chosen]))
    filled = F.pad(inner.unsqueeze(1), (0, 0, 0, linear.ROWS - 1))
    results = torch.cat([linear.linear(filled[j], w2[e])[:1] for j, e in enumerate(chosen)])
    return (weights @ widen(results)).to(x.dtype)
