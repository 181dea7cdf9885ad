"""Router and experts in torch: tokens grouped by expert. Shapes and meaning as in ``reference``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear.cpu import Weight
from k3stack.kernels.linear.stacked import Stack, filled_rows
from k3stack.kernels.precision import widen

FEW_ROWS = 1024
"""Up to this many grouped rows one activation of all of them costs less than one an expert."""

CALL_BYTES = 1 << 20
"""Bytes that are read in the time that a product of its own costs beside the product."""
ROWS_A_READ = 6.0
"""Rows whose product with a weight takes as long as reading the weight."""


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

    Few tokens go through all experts of a stack at once. Else each expert's tokens lie together, and groups of few
    tokens are filled up (with token 0, whose extra results nobody reads), which is faster than computing fewer rows.
    """
    tokens, top_k = ids.shape
    if isinstance(w13, Stack) and isinstance(w2, Stack):
        hits = torch.zeros(tokens, len(w13), dtype=torch.int64, device=x.device).scatter_(1, ids, 1).cumsum_(0)
        counts_each: list[int] = hits[-1].tolist()
        if _stacked_is_faster(counts_each, w13, w2):
            return _stacked(x, ids, weights, hits, max(2, *counts_each), w13, w2, activation)
    if tokens == 1:
        return _experts_of_one(x, ids[0].tolist(), weights, w13, w2, activation)
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(w13))
    if isinstance(w13, Stack) and isinstance(w2, Stack):
        few = torch.tensor(filled_rows(w13.fast_rows, w2.fast_rows))[counts.clamp(max=linear.ONE_IMAGE)]
        sizes = torch.where(counts > linear.ONE_IMAGE, (counts + linear.IMAGE - 1) // linear.IMAGE * linear.IMAGE, few)
    else:
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


def _stacked_is_faster(counts: list[int], w13: Stack, w2: Stack) -> bool:
    """Whether all experts in one product, each with as many rows as the busiest, take less time than products of
    their own for those that are in use."""
    rows = max(2, *counts)
    if rows > linear.ONE_IMAGE:
        return False
    size, used = w13.expert_bytes + w2.expert_bytes, len(counts) - counts.count(0)
    together = len(w13) * size * max(1.0, rows / ROWS_A_READ)
    one_by_one = used * (2 * CALL_BYTES + size * max(1.0, sum(counts) / used / ROWS_A_READ))
    return together <= one_by_one


def _stacked(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    hits: Tensor,
    rows: int,
    w13: Stack,
    w2: Stack,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """All experts at once, ``rows`` each; ``hits`` [T, E] counts each expert's tokens up to and with each token."""
    count, (tokens, top_k) = hits.shape[1], ids.shape
    place = (hits.gather(1, ids).sub_(1)).mul_(count).add_(ids).view(-1)
    # Rows that no token takes hold token 0: nobody reads their results.
    source = torch.zeros(rows * count, dtype=torch.int64, device=x.device).index_copy_(0, place, _owners(tokens, top_k))
    inner = activation(w13.product(x.index_select(0, source)))
    results = widen(w2.product(inner).index_select(0, place)).view(tokens, top_k, -1)
    return torch.bmm(weights.unsqueeze(1), results).squeeze(1).to(x.dtype)


@lru_cache(maxsize=4)
def _owners(tokens: int, top_k: int) -> Tensor:
    """[T * k]: the token of each choice."""
    with torch.inference_mode(False):
        return torch.arange(tokens).repeat_interleave(top_k)


def _experts_of_one(
    x: Tensor,
    chosen: list[int],
    weights: Tensor,
    w13: Sequence[Weight],
    w2: Sequence[Weight],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The experts of a single token: nothing to group, every expert reads the same rows."""
    fill = linear.ROWS - 1
    if isinstance(w13, Stack) and isinstance(w2, Stack):
        fill = filled_rows(w13.fast_rows, w2.fast_rows)[1] - 1
    rows = F.pad(x, (0, 0, 0, fill))
    inner = activation(torch.cat([linear.linear(rows, w13[e])[:1] for e in chosen]))
    filled = F.pad(inner.unsqueeze(1), (0, 0, 0, fill))
    results = torch.cat([linear.linear(filled[j], w2[e])[:1] for j, e in enumerate(chosen)])
    return (weights @ widen(results)).to(x.dtype)
