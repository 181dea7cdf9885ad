"""Chooses tokens: every field of ``SamplingParams``, vectorised over the rows of a step.

Order: penalties, bias, ids banned by ``min_tokens``, grammar mask; then greedy, or a random draw (see ``draw``).
Log-probabilities are those of the network's own logits, before all of this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from k3stack.executor.torch.draw import DrawParams, draw
from k3stack.executor.torch.noise import uniform
from k3stack.executor.torch.penalties import PenaltyCounts
from k3stack.kernels.select import select_least_kept
from k3stack.kernels.upload import upload
from k3stack.scheduler.plan import RowAdd

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
        self._least_kept = select_least_kept(device)
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

    def sample(
        self,
        logits: torch.Tensor,
        rows: Ints,
        masks: Mapping[int, bytes] | None = None,
        *,
        overwrite: bool = False,
    ) -> Sampled:
        """One token for each row. ``logits`` [N, vocab], ``rows`` [N] row numbers, ``masks`` by index into ``rows``.

        ``overwrite``: nobody needs the logits afterwards.
        """
        if self._not_greedy or masks:
            tokens, best = self._mixed(logits, rows, masks or {}, overwrite)
        else:
            tokens, best = _argmax(logits), logits.amax(dim=-1)
        self._outputs[rows] += 1
        self._penalties.count(rows, tokens)
        return Sampled(tokens, best)

    def _mixed(
        self, logits: torch.Tensor, rows: Ints, masks: Mapping[int, bytes], overwrite: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and largest logits of a batch in which some rows are not plainly greedy."""
        shaped = self._shaped[rows] | (self._outputs[rows] < self._min_tokens[rows])
        shaped[list(masks)] = True
        indices, plain = np.flatnonzero(shaped), np.flatnonzero(~shaped)
        best = logits.amax(dim=-1)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        if len(plain):
            at = upload(plain, self._device)
            tokens[at] = _argmax(logits.index_select(0, at))
        if len(indices):
            at = upload(indices, self._device)
            own = logits if overwrite and not len(plain) else logits.index_select(0, at)
            own_masks = {i: masks[index] for i, index in enumerate(indices.tolist()) if index in masks}
            changed = self._shape(own, rows[indices], own_masks)
            if changed:
                # A row that was unusable stays so, whatever shaping made of it.
                best[at] = torch.where(best[at].isfinite(), own.amax(dim=-1), best[at])
            tokens[at] = self._pick(own, rows[indices])
        return tokens, best

    def _shape(self, logits: torch.Tensor, rows: Ints, masks: Mapping[int, bytes]) -> bool:
        """Penalties, bias, bans and masks, in place; False where there was nothing to do."""
        changed = self._penalties.apply(logits, rows)
        below = self._outputs[rows] < self._min_tokens[rows]
        if not self._bias and not masks and not below.any():
            return changed
        for i, row in enumerate(rows.tolist()):
            if (bias := self._bias.get(row)) is not None:
                logits[i, bias[0]] += bias[1].to(logits.dtype)
            if below[i]:
                logits[i, list(self._banned[row])] = -torch.inf
            if (mask := masks.get(i)) is not None:
                logits[i].masked_fill_(~upload(unpack_mask(mask, self._vocab), self._device), -torch.inf)
        return True

    def _pick(self, logits: torch.Tensor, rows: Ints) -> torch.Tensor:
        """Tokens [n] from shaped ``logits`` [n, vocab], which may be overwritten."""
        is_random = self._temperature[rows] > 0.0
        if is_random.all():
            return self._draw(logits, rows)
        tokens = _argmax(logits)
        if is_random.any():
            at = np.flatnonzero(is_random)
            where = upload(at, self._device)
            tokens[where] = self._draw(logits.index_select(0, where), rows[at])
        return tokens

    def _draw(self, logits: torch.Tensor, rows: Ints) -> torch.Tensor:
        """A random token [n] each of ``rows`` [n]."""
        values = (
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            uniform(self._seed[rows], self._outputs[rows]),
        )
        limited = (self._top_k[rows] > 0) | (self._top_p[rows] < 1.0)
        params = DrawParams(*(upload(v, self._device) for v in values))
        return draw(logits, params, limited, self._min_p[rows] > 0.0, self._least_kept)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index [n] of the largest of ``logits`` [n, vocab]; of equals the lowest."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # a tenth of the time of torch's
    return logits.argmax(dim=-1)


def unpack_mask(mask: bytes, vocab: int) -> torch.Tensor:
    """Allowed-token bits (little-endian) -> bool [vocab]. Raises ValueError when there are too few."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    if len(bits) < vocab:
        raise ValueError(f"a mask of {len(bits)} bits for a vocabulary of {vocab}")
    return torch.from_numpy(bits[:vocab].view(np.bool_))
