"""Repetition, presence and frequency penalties: counts of each row's tokens on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from k3stack.kernels.upload import upload
from k3stack.scheduler.plan import RowAdd

Ints = npt.NDArray[np.int64]


class PenaltyCounts:
    """Token counts for the rows that have a penalty, in slots of [vocab] each; others cost nothing.

    Repetition looks at prompt and output: a positive logit is divided by it, a negative one multiplied. Presence and
    frequency look at the output alone and are subtracted (once if present; for each occurrence).
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._slot = np.full(256, -1, np.int64)
        self._free: list[int] = []
        self._counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._factors = torch.zeros(0, 3, dtype=torch.float64, device=device)
        self._used = 0

    def add(self, add: RowAdd) -> bool:
        """Take the row in if it has a penalty; True if so."""
        params = add.sampling
        while add.row >= len(self._slot):
            self._slot = np.concatenate((self._slot, np.full_like(self._slot, -1)))
        factors = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if factors == (1.0, 0.0, 0.0):
            return False
        slot = self._take_slot()
        self._slot[add.row] = slot
        self._used += 1
        self._factors[slot] = torch.tensor(factors, dtype=torch.float64, device=self._device)
        self._counts[slot] = self._bincount(add.output_ids)
        self._in_prompt[slot] = self._bincount(add.prompt_ids) > 0
        return True

    def end(self, row: int) -> None:
        """Give the row's slot back, if it has one."""
        if row < len(self._slot) and self._slot[row] >= 0:
            self._free.append(int(self._slot[row]))
            self._slot[row] = -1
            self._used -= 1

    def apply(self, logits: torch.Tensor, rows: Ints) -> bool:
        """Change ``logits`` [n, vocab] of ``rows`` [n] in place; False where none of them has a penalty."""
        if not self._used:
            return False
        at = np.flatnonzero(self._slot[rows] >= 0)
        if not len(at):
            return False
        where = upload(at, self._device)
        slots = upload(self._slot[rows[at]], self._device)
        counts = self._counts[slots]
        factors = self._factors[slots].to(logits.dtype)
        repetition, presence, frequency = (factors[:, i : i + 1] for i in range(3))
        values = logits[where]
        punished = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where((counts > 0) | self._in_prompt[slots], punished, values)
        logits[where] = values - presence * (counts > 0) - frequency * counts
        return True

    def count(self, rows: Ints, tokens: torch.Tensor) -> None:
        """``tokens`` [N] join the output of ``rows`` [N]."""
        if not self._used:
            return
        at = np.flatnonzero(self._slot[rows] >= 0)
        if len(at):
            slots = upload(self._slot[rows[at]], self._device)
            self._counts[slots, tokens[upload(at, self._device)]] += 1

    def _take_slot(self) -> int:
        if not self._free:
            old = len(self._counts)
            more = max(4, old)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(more, self._vocab)))
            self._factors = torch.cat((self._factors, self._factors.new_zeros(more, 3)))
            self._free = list(range(old + more - 1, old - 1, -1))
        return self._free.pop()

    def _bincount(self, ids: tuple[int, ...]) -> torch.Tensor:
        counts = np.bincount(np.asarray(ids, np.int64), minlength=self._vocab)
        return upload(counts.astype(np.int32), self._device)
