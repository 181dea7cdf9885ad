"""Room for what is on its way from the files into the weights: one buffer, lent out in pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from k3stack.errors import BugError
from k3stack.kernels.memory import give_back

ALIGN = 64
LARGE = 8 << 20
"""Bytes of a piece whose memory is worth giving back when it comes back."""


class Room:
    """``size`` bytes for several threads. Whoever asks for more than is free waits, and so do those after it.

    Memory is taken from the system as pieces are written to, never more than ``size`` bytes (rounded up to pages).
    ``peak`` is the most that was lent at a time.
    """

    def __init__(self, size: int) -> None:
        self.size = aligned(size)
        self.peak = 0
        self._buffer = torch.empty(self.size, dtype=torch.uint8)
        self._free = [(0, self.size)]
        self._turn = threading.Lock()
        self._returned = threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[Tensor]:
        """A uint8 tensor of ``size`` bytes (its values are arbitrary), to be used within the block only."""
        size = aligned(size)
        if not size:
            yield self._buffer[:0]
            return
        if size > self.size:
            raise BugError(f"{size:,} B of room asked for, there are {self.size:,}")
        with self._turn, self._returned:
            while (start := self._find(size)) is None:
                self._returned.wait()
            self.peak = max(self.peak, self.size - sum(b - a for a, b in self._free))
        try:
            yield self._buffer[start : start + size]
        finally:
            if size >= LARGE:
                give_back(self._buffer.data_ptr() + start, size)
            with self._returned:
                self._return(start, start + size)
                self._returned.notify()

    def _find(self, size: int) -> int | None:
        """Start of the first free range that is large enough, now taken."""
        for i, (a, b) in enumerate(self._free):
            if b - a >= size:
                self._free[i : i + 1] = [(a + size, b)] if b - a > size else []
                return a
        return None

    def _return(self, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for a, b in sorted([*self._free, (start, end)]):
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self._free = merged


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
