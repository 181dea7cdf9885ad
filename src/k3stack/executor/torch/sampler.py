"""Chooses tokens: every field of ``SamplingParams``, vectorised over the rows of a step.

Order: penalties, bias, ids banned by ``min_tokens``, grammar mask; then greedy, or temperature, top-k, top-p (over
what top-k kept) and min-p (against the best token), and one draw by the inverse of the cumulative distribution.
top-k, top-p and min-p each cut at a value, and tokens that equal it stay: the outcome depends on no sorting order.
Log-probabilities are those of the network's own logits, before all of this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from k3stack.executor.torch.noise import uniform
from k3stack.executor.torch.penalties import PenaltyCounts
from k3stack.scheduler.plan import RowAdd

TOP_P_PREFIX = 1024
"""Largest values looked at first for top-p; only rows whose mass is not within them are sorted in full."""
COLDEST = 1e-5
"""Temperatures below are greedy: dividing by them would overflow."""
_SEED_MASK = (1 << 64) - 1
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sampled:
    """Tokens [N] int64, and a value [N] each: not finite where a row's logits were unusable."""

    tokens: torch.Tensor
    best: torch.Tensor


class Sampler:
    """Holds the sampling parameters of every row, indexed by row number."""

    def __init__(self, vocab: int, device: torch.device, rows: int = 256) -> None:
        self._vocab = vocab
        self._device = device
        self._shaped = np.zeros(rows, bool)
        """Rows whose choice is not simply the largest logit (the ban by min_tokens apart)."""
        self._temperature = np.zeros(rows)
        self._top_p = np.ones(rows)
        self._top_k = np.zeros(rows, np.int64)
        self._min_p = np.zeros(rows)
        self._seed = np.zeros(rows, np.uint64)
        self._min_tokens = np.zeros(rows, np.int64)
        self._outputs = np.zeros(rows, np.int64)
        self._banned: dict[int, tuple[int, ...]] = {}
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._penalties = PenaltyCounts(vocab, device)
        self._not_greedy = 0
        """Live rows that are shaped or still below min_tokens at their start; 0: every batch is plainly greedy."""

    def add(self, add: RowAdd) -> None:
        """A row begins with its parameters; ``output_count`` continues the stream of its seed."""
        row, params = add.row, add.sampling
        while row >= len(self._shaped):
            self._grow()
        greedy = params.temperature < COLDEST or params.top_k == 1
        self._temperature[row] = 0.0 if greedy else params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = max(params.top_k, 0)
        self._min_p[row] = params.min_p
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        self._seed[row] = seed & _SEED_MASK
        self._outputs[row] = add.output_count
        banned = (*add.eos_ids, *params.stop_token_ids)
        self._min_tokens[row] = params.min_tokens if banned else 0
        if self._min_tokens[row]:
            self._banned[row] = tuple(i for i in banned if i < self._vocab)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self._device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64, device=self._device)
            self._bias[row] = ids, values
        has_penalty = self._penalties.add(add)
        self._shaped[row] = not greedy or has_penalty or bool(params.logit_bias)
        self._not_greedy += bool(self._shaped[row] or self._min_tokens[row])

    def end(self, row: int) -> None:
        """The row is gone."""
        self._not_greedy -= bool(self._shaped[row] or self._min_tokens[row])
        self._shaped[row] = False
        self._min_tokens[row] = 0
        self._banned.pop(row, None)
        self._bias.pop(row, None)
        self._penalties.end(row)

    def _grow(self) -> None:
        for name in ("_shaped", "_temperature", "_top_p", "_top_k", "_min_p", "_seed", "_min_tokens", "_outputs"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))

    def sample(self, logits: torch.Tensor, rows: Ints, masks: Mapping[int, bytes] | None = None) -> Sampled:
        """One token for each row. ``logits`` [N, vocab], ``rows`` [N] row numbers, ``masks`` by index into ``rows``."""
        best, tokens = logits.max(dim=-1)  # of equal values the first, that is the lowest id
        if self._not_greedy or masks:
            shaped = self._shaped[rows] | (self._outputs[rows] < self._min_tokens[rows])
            if masks:
                shaped[list(masks)] = True
            indices = np.flatnonzero(shaped)
            if len(indices):
                where = torch.from_numpy(indices).to(self._device)
                chosen, value = self._choose(logits, indices, where, rows[indices], masks or {})
                tokens[where] = chosen
                # An unusable row stays unusable, whatever shaping made of it.
                best[where] = torch.where(best[where].isfinite(), value, best[where])
        self._outputs[rows] += 1
        self._penalties.count(rows, tokens)
        return Sampled(tokens, best)

    def _choose(
        self, logits: torch.Tensor, indices: Ints, where: torch.Tensor, rows: Ints, masks: Mapping[int, bytes]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and largest shaped logits for the rows at ``indices`` of the batch."""
        shaped = logits.index_select(0, where)
        self._penalties.apply(shaped, rows)
        below = self._outputs[rows] < self._min_tokens[rows]
        for i, row in enumerate(rows.tolist()):
            if (bias := self._bias.get(row)) is not None:
                shaped[i, bias[0]] += bias[1].to(shaped.dtype)
            if below[i]:
                shaped[i, list(self._banned[row])] = -torch.inf
            if (mask := masks.get(int(indices[i]))) is not None:
                shaped[i].masked_fill_(~unpack_mask(mask, self._vocab).to(self._device), -torch.inf)
        best, tokens = shaped.max(dim=-1)
        random = np.flatnonzero(self._temperature[rows] > 0.0)
        if len(random):
            at = torch.from_numpy(random).to(self._device)
            tokens[at] = self._draw(shaped.index_select(0, at), rows[random])
        return tokens, best

    def _draw(self, logits: torch.Tensor, rows: Ints) -> torch.Tensor:
        """Random tokens [n] from ``logits`` [n, vocab], which is overwritten."""
        device = self._device
        scaled = logits.div_(torch.from_numpy(self._temperature[rows]).to(device, logits.dtype).unsqueeze(1))
        top = scaled.amax(dim=-1, keepdim=True)
        weights = (scaled - top).exp_()  # 1 for the best token, so every threshold below is a weight
        top_k = self._top_k[rows]
        threshold = torch.zeros(len(rows), dtype=weights.dtype, device=device)
        if (top_k > 0).any():
            k = np.where(top_k > 0, np.minimum(top_k, self._vocab), self._vocab)
            largest = int(np.where(top_k > 0, k, 1).max())
            values = weights.topk(largest, dim=-1).values
            at = torch.from_numpy(np.minimum(k, largest) - 1).to(device).unsqueeze(1)
            limited = torch.from_numpy(top_k > 0).to(device)
            threshold = torch.where(limited, values.gather(1, at).squeeze(1), threshold)
        top_p = self._top_p[rows]
        nucleus = np.flatnonzero(top_p < 1.0)
        if len(nucleus):
            at = torch.from_numpy(nucleus).to(device)
            share = torch.from_numpy(top_p[nucleus]).to(device)
            threshold[at] = torch.maximum(threshold[at], _nucleus(weights[at], threshold[at], share))
        threshold = torch.maximum(threshold, torch.from_numpy(self._min_p[rows]).to(device, weights.dtype))
        weights.masked_fill_(weights < threshold.unsqueeze(1), 0.0)
        u = torch.from_numpy(uniform(self._seed[rows], self._outputs[rows])).to(device)
        return _inverse_cdf(weights, u)


def _nucleus(weights: torch.Tensor, floor: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The weight [n] of the last token of the smallest set that holds ``share`` of the mass above ``floor``."""
    kept = weights.masked_fill(weights < floor.unsqueeze(1), 0.0)
    # cumsum, not sum: its order of additions is the same for a row alone and in any batch.
    wanted = kept.cumsum(dim=-1, dtype=torch.float64)[:, -1] * share
    threshold, inside = _last_of_prefix(kept, wanted, min(TOP_P_PREFIX, kept.shape[1]))
    if not bool(inside.all()):
        rest = torch.nonzero(~inside).squeeze(1)
        threshold[rest] = _last_of_prefix(kept[rest], wanted[rest], kept.shape[1])[0]
    return threshold


def _last_of_prefix(kept: torch.Tensor, wanted: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight at which the sorted weights' sum reaches ``wanted``, and whether it does within the ``count`` largest."""
    values = kept.topk(count, dim=-1).values
    mass = values.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(mass, wanted.unsqueeze(1)).clamp_(max=count - 1)
    inside = (mass[:, -1] >= wanted) if count < kept.shape[1] else torch.ones_like(wanted, dtype=torch.bool)
    return values.gather(1, index).squeeze(1), inside


def _inverse_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token [n] whose cumulative weight exceeds ``u`` of the total; weights [n, vocab] of at least 0."""
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    total = mass[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(u * total, below_total)
    # A row without any finite weight finds nothing; its result is discarded, but the id must be a valid one.
    return torch.searchsorted(mass, target.unsqueeze(1), right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def unpack_mask(mask: bytes, vocab: int) -> torch.Tensor:
    """Allowed-token bits (little-endian) -> bool [vocab]. Raises ValueError when there are too few."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    if len(bits) < vocab:
        raise ValueError(f"a mask of {len(bits)} bits for a vocabulary of {vocab}")
    return torch.from_numpy(bits[:vocab].view(np.bool_))
