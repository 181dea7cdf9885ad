"""One random token a row: temperature, top-k, top-p and min-p, then the inverse of the cumulative distribution.

top-k, top-p (over what top-k kept) and min-p (against the best token) each cut at a value, and tokens that equal it
stay; the draw goes through the kept tokens by id. So the outcome depends on no sorting order, and, since every sum
runs in an order that is the same for a row alone and in any batch, on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from k3stack.kernels.upload import upload

PREFIXES = (64, 512)
"""Numbers of largest tokens that are looked at, in turn, before all are: in what a trained model says, the first
nearly always holds everything that top-k and top-p keep."""
CHUNK = 64
"""Tokens whose weights are added up before the running sum is taken over these sums."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of n rows as tensors [n] on the device: float64, ``top_k`` int64 with 0 for all."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    """In [0, 1): where in the cumulative distribution each row draws."""

    def rows(self, index: torch.Tensor) -> DrawParams:
        """The parameters of some rows."""
        return DrawParams(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.uniform[index]
        )


LeastKept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""See ``kernels.sampling.reference.least_kept``."""


def draw(
    logits: torch.Tensor,
    params: DrawParams,
    limited: npt.NDArray[np.bool_],
    least: npt.NDArray[np.bool_],
    least_kept: LeastKept | None = None,
) -> torch.Tensor:
    """Tokens [n] int64 from ``logits`` [n, vocab], which is overwritten. Rows without a finite logit get any id.

    What the host knows of the rows, so that it need not wait for the device to hear it: which are ``limited`` by top-k
    or top-p, and which have a ``least`` weight (min-p). ``least_kept``: the device's own way to find what they keep;
    without it (or not in float32) the largest few are looked at first, and the host waits to hear whether they are
    enough.
    """
    logits.div_(params.temperature.to(logits.dtype).unsqueeze(1))
    # 1 for the best token, so that every threshold is a weight.
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    if least_kept is not None and weights.dtype == torch.float32 and limited.any():
        threshold = least_kept(weights, params.top_k, params.top_p, params.min_p)
        return _inverse(weights.masked_fill_(weights < threshold.unsqueeze(1), 0.0), params.uniform)
    if limited.all():
        return _draw_limited(weights, params)
    if not limited.any():
        return _draw_free(weights, params, bool(least.any()))
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    rows = upload(np.flatnonzero(limited), weights.device)
    tokens[rows] = _draw_limited(weights.index_select(0, rows), params.rows(rows))
    rows = upload(np.flatnonzero(~limited), weights.device)
    tokens[rows] = _draw_free(weights.index_select(0, rows), params.rows(rows), bool(least[~limited].any()))
    return tokens


def _draw_free(weights: torch.Tensor, params: DrawParams, least: bool) -> torch.Tensor:
    """Rows without top-k and top-p; ``least``: some have a min-p."""
    if least:
        weights = weights.masked_fill_(weights < params.min_p.to(weights.dtype).unsqueeze(1), 0.0)
    return _inverse(weights, params.uniform)


def _draw_limited(weights: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Rows with a top-k or top-p: from the largest few where these are enough."""
    n, vocab = weights.shape
    tokens = torch.zeros(n, dtype=torch.int64, device=weights.device)
    total = _chunks(weights).sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)[:, -1]
    left = torch.arange(n, device=weights.device)
    for count in (*(k for k in PREFIXES if k < vocab), vocab):
        some, which = _best_chunks(weights, count)
        threshold, enough = _threshold(_largest(some, count), total, params, whole=count == vocab)
        kept = some.masked_fill(some < threshold.unsqueeze(1), 0.0)
        at = _inverse(kept, params.uniform)
        if which is not None:
            at = which.gather(1, (at // CHUNK).unsqueeze(1)).squeeze(1) * CHUNK + at % CHUNK
        tokens[left[enough]] = at[enough]
        if bool(enough.all()):
            break
        more = torch.nonzero(~enough).squeeze(1)
        left, total, weights, params = left[more], total[more], weights.index_select(0, more), params.rows(more)
    return tokens


def _best_chunks(weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The ``count`` chunks with the largest maxima, by id, side by side [n, count * CHUNK], and their numbers.

    The ``count`` largest weights are among them. All weights and None where that is not much less.
    """
    if 2 * count * CHUNK > weights.shape[1]:
        return weights, None
    chunks = _chunks(weights)
    which = chunks.amax(dim=-1).topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    return chunks.gather(1, which.unsqueeze(2).expand(-1, -1, CHUNK)).flatten(1), which


def _largest(weights: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest of each row, in descending order."""
    if weights.device.type != "cpu" or count * 32 < weights.shape[1]:
        return weights.topk(count, dim=-1).values
    ordered = np.sort(weights.numpy(), axis=-1)  # vectorised there: a sixth of torch's time
    return torch.from_numpy(ordered[:, : -count - 1 : -1].copy())


def _threshold(
    values: torch.Tensor, total: torch.Tensor, params: DrawParams, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least weight [n] that is kept, and whether all kept tokens are among ``values`` [n, k], the largest, sorted.

    ``total`` [n]: the row's whole mass, of which top-p takes its share where there is no top-k.
    """
    count = values.shape[1]
    last = values[:, -1]
    top_k = params.top_k
    nth = (torch.where(top_k > 0, top_k, 1).clamp(max=count) - 1).unsqueeze(1)
    floor = torch.where(top_k > 0, values.gather(1, nth).squeeze(1), torch.zeros_like(last))
    mass = values.masked_fill(values < floor.unsqueeze(1), 0.0).cumsum(dim=-1, dtype=torch.float64)
    wanted = torch.where(top_k > 0, mass[:, -1], total) * params.top_p
    index = torch.searchsorted(mass, wanted.unsqueeze(1)).clamp_(max=count - 1)
    by_mass = torch.where(params.top_p < 1.0, values.gather(1, index).squeeze(1), floor)
    threshold = torch.maximum(by_mass, floor)
    # What equals the smallest of these may have equals outside: then these are not surely all.
    enough = (threshold > last) & ((top_k > 0) | (mass[:, -1] >= wanted)) & (top_k <= count)
    if whole:
        enough = torch.ones_like(enough)
    return torch.maximum(threshold, params.min_p.to(threshold.dtype)), enough


def _chunks(weights: torch.Tensor) -> torch.Tensor:
    """Weights as [n, chunks, CHUNK], the last chunk filled up with zeros."""
    n, m = weights.shape
    if m % CHUNK:
        weights = torch.nn.functional.pad(weights, (0, CHUNK - m % CHUNK))
    return weights.view(n, -1, CHUNK)


def _inverse(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index [n] whose cumulative weight exceeds ``u`` of the total; weights [n, m] of at least 0.

    In two levels: the chunk, then the place in it.
    """
    m = weights.shape[1]
    chunks = _chunks(weights)
    mass = chunks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = u * mass[:, -1]
    chunk = torch.searchsorted(mass, target.unsqueeze(1), right=True).clamp_(max=mass.shape[1] - 1)
    before = torch.where(chunk > 0, mass.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    own = chunks.gather(1, chunk.unsqueeze(2).expand(-1, -1, CHUNK)).squeeze(1)
    inner = own.cumsum(dim=-1, dtype=torch.float64)
    # The chunk's sum and its running sum round differently: stay below the latter, so that a kept token is found.
    room = torch.nextafter(inner[:, -1:], torch.zeros_like(before))
    place = torch.searchsorted(inner, torch.minimum(target.unsqueeze(1) - before, room), right=True)
    # A row without any finite weight finds nothing; its result is discarded, but the id must be a valid one.
    return (chunk * CHUNK + place).squeeze(1).clamp_(max=m - 1)
