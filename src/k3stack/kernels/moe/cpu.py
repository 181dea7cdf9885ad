"""Router and experts in torch: tokens grouped by expert. Shapes and meaning as in ``reference``."""

from __future__ import annotations

from array import array
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
    first: int = 0,
    total: int | None = None,
) -> Tensor:
    """See ``reference.experts``; w13 and w2 may be packed, one weight an expert. They may be the experts from ``first``
    on of ``total`` that ``ids`` names: choices of others add nothing.

    Few tokens go through all experts of a stack at once. Else each expert's tokens lie together, and groups of few
    tokens are filled up (with token 0, whose extra results nobody reads), which is faster than computing fewer rows.
    """
    if total is not None and total > len(w13):
        return choices_here(experts, x, ids, weights, w13, w2, activation, first)
    tokens, top_k = ids.shape
    if isinstance(w13, Stack) and isinstance(w2, Stack) and tokens * top_k <= linear.ONE_IMAGE * len(w13):
        chosen: list[int] = ids.reshape(-1).tolist()
        counts_each, places, source = _places(chosen, len(w13), top_k)
        if _stacked_is_faster(counts_each, w13, w2):
            rows = max(linear.ROWS, *counts_each)
            return _stacked(x, weights, places, source[: rows * len(w13)], w13, w2, activation)
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


def choices_here(
    run: Callable[..., Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Sequence[Weight],
    w2: Sequence[Weight],
    activation: Callable[[Tensor], Tensor],
    first: int,
) -> Tensor:
    """``run`` (as ``experts``) for choices among more experts than w13's, which are those from ``first`` on: each
    choice that is here is a token of its own, since no token may choose an expert twice."""
    here = (ids >= first) & (ids < first + len(w13))
    token, choice = here.nonzero(as_tuple=True)
    if not len(token):
        return torch.zeros_like(x)
    own_ids, own_weights = (t[token, choice].unsqueeze(1) for t in (ids - first, weights))
    results = widen(run(x[token], own_ids, own_weights, w13, w2, activation))
    return results.new_zeros(x.shape).index_add_(0, token, results).to(x.dtype)


def _stacked_is_faster(counts: list[int], w13: Stack, w2: Stack) -> bool:
    """Whether all experts in one product, each with as many rows as the busiest, take less time than products of
    their own for those that are in use."""
    rows = max(linear.ROWS, *counts)
    if rows > linear.ONE_IMAGE:
        return False
    size, used = w13.expert_bytes + w2.expert_bytes, len(counts) - counts.count(0)
    together = len(w13) * size * max(1.0, rows / ROWS_A_READ)
    one_by_one = used * (2 * CALL_BYTES + size * max(1.0, sum(counts) / used / ROWS_A_READ))
    return together <= one_by_one


def _places(chosen: list[int], count: int, top_k: int) -> tuple[list[int], Tensor, Tensor]:
    """How often each of ``count`` experts is chosen; int64 [T * k], each choice's row among all experts' first, second,
    ... tokens; and int64 [max(T, ROWS) * count], the token of each such row (0 where there is none).

    No token chooses an expert twice. In Python: for a few hundred choices that takes less time than a dozen tensor
    operations.
    """
    nexts, rows = list(range(count)), count * max(len(chosen) // top_k, linear.ROWS)
    found = array("q", bytes(8 * (rows + len(chosen))))
    for i, e in enumerate(chosen):
        place = nexts[e]
        nexts[e] = place + count
        found[place] = i // top_k
        found[rows + i] = place
    index = torch.frombuffer(found, dtype=torch.int64)
    return [n // count for n in nexts], index[rows:], index[:rows]


def _stacked(
    x: Tensor,
    weights: Tensor,
    places: Tensor,
    source: Tensor,
    w13: Stack,
    w2: Stack,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """All experts at once; ``places`` [T * k] and ``source`` [rows * E] as of ``_places``, for the rows in use. Rows
    that no token takes hold token 0: nobody reads their results."""
    inner = activation(w13.product(x.index_select(0, source)))
    results = widen(w2.product(inner))
    starts = _starts(*weights.shape)
    return torch.embedding_bag(results, places, starts, False, 0, False, weights.reshape(-1))[0].to(x.dtype)


@lru_cache(maxsize=4)
def _starts(tokens: int, top_k: int) -> Tensor:
    """[T]: where each token's choices begin."""
    with torch.inference_mode(False):
        return torch.arange(0, tokens * top_k, top_k)


def _experts_of_one(
    x: Tensor,
    chosen: list[int],
    weights: Tensor,
    w13: Sequence[Weight],
    w2: Sequence[Weight],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The experts of a single token: nothing to group, every expert reads the same rows."""
    if isinstance(w13, Stack) and isinstance(w2, Stack):
        inner = activation(w13.single_products(x, chosen))
        results = w2.single_products(inner, chosen)
    else:
        inner = activation(torch.cat([linear.linear(x, w13[e]) for e in chosen]))
        results = torch.cat([linear.linear(row, w2[e]) for row, e in zip(inner.split(1), chosen, strict=True)])
    return (weights @ widen(results)).to(x.dtype)
