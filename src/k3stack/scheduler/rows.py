"""The row table: which request is which row, how far each is planned, and which rows decode."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from k3stack.scheduler.request import Entry

NEVER = 1 << 62


class Schedules(NamedTuple):
    """Of all streams, side by side, once the steps planned have run."""

    due: npt.NDArray[np.float64]
    """When the next token is due, seconds on the scheduler's clock; inf: no deadline."""
    pace: npt.NDArray[np.float64]
    """Seconds a token may take on average."""
    outputs: npt.NDArray[np.int64]
    """Tokens each will have."""
    left: npt.NDArray[np.int64]
    """Tokens that each could still get by its limit."""


class RowTable:
    """Rows 0..n-1. The bulk of a decode step is done on arrays; only rows that are *due* are looked at one by one.

    A row is due when its length has reached its ``horizon``: it needs a page, a snapshot is near, or its last token
    is planned.
    """

    def __init__(self, rows: int) -> None:
        self.length: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        """Tokens in cache and state once every plan issued has run."""
        self.horizon: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        self.due0: npt.NDArray[np.float64] = np.full(rows, np.inf)
        self.pace: npt.NDArray[np.float64] = np.zeros(rows)
        """The row's next token is due at ``due0 + pace * length`` (``Entry.due0``)."""
        self.prompt: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        self.final: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        """``Entry.prompt_len`` and ``Entry.final`` of the row."""
        self.room = [0] * rows
        """Tokens that the row's pages have room for."""
        self.snap = [NEVER] * rows
        """Length at which the next snapshot is wanted during decode."""
        self.running: dict[int, Entry] = {}
        self.priorities: dict[int, int] = {}
        """How many rows each priority has."""
        self._free = list(range(rows))
        self._members: dict[int, Entry] = {}
        self._dirty = False
        self._rows: tuple[int, ...] = ()
        self._array: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self._entries: list[Entry] = []
        self._former: list[Entry] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def size(self) -> int:
        return len(self.room)

    @property
    def lowest_free(self) -> int:
        """The row that ``take`` would give; there must be one."""
        return self._free[0]

    def take(self, entry: Entry, length: int) -> int:
        """``entry`` becomes the lowest free row, with ``length`` tokens in place."""
        row = heapq.heappop(self._free)
        entry.row = row
        self.running[row] = entry
        self.priorities[entry.request.priority] = self.priorities.get(entry.request.priority, 0) + 1
        self.length[row] = length
        self.room[row] = 0
        self.snap[row] = NEVER
        self.due0[row] = np.inf
        self.prompt[row], self.final[row] = entry.prompt_len, entry.final
        return row

    def drop(self, entry: Entry) -> None:
        """``entry`` leaves its row, whose number may be taken again at once: plans name rows ended before added."""
        row = entry.row
        self.stop_decode(row)
        del self.running[row]
        priority = entry.request.priority
        self.priorities[priority] -= 1
        if not self.priorities[priority]:
            del self.priorities[priority]
        entry.row = -1
        heapq.heappush(self._free, row)

    def start_decode(self, row: int, entry: Entry) -> None:
        self._members[row] = entry
        self._dirty = True

    def stop_decode(self, row: int) -> None:
        if self._members.pop(row, None) is not None:
            self._dirty = True

    @property
    def decoding(self) -> int:
        return len(self._members)

    def decode_set(self) -> tuple[tuple[int, ...], list[Entry]]:
        """The decode rows and their entries; the same objects until the set changes. Not to be modified."""
        self._refresh()
        return self._rows, self._entries

    def _refresh(self) -> None:
        if self._dirty:
            self._rows = tuple(self._members)
            # Perhaps nothing else holds the entries that left: freeing a long prompt's ids takes longer than a plan.
            self._former += self._entries
            self._entries = list(self._members.values())
            self._array = np.array(self._rows, np.intp)
            self._dirty = False

    def rest(self) -> None:
        """Let go of the entries that left the decode set."""
        self._former.clear()

    def due(self) -> list[int]:
        """Decode rows that need a look before their next token."""
        self._refresh()
        rows = self._array
        if not len(rows):
            return []
        late = self.length[rows] >= self.horizon[rows]
        return rows[late].tolist() if late.any() else []

    def schedules(self, special: list[Entry]) -> Schedules:
        """Of the decode rows, and of those of ``special``."""
        self._refresh()
        rows = self._array
        if special:
            rows = np.concatenate((rows, np.array([e.row for e in special], np.intp)))
        pace, length = self.pace[rows], self.length[rows]
        outputs = length - self.prompt[rows] + 1
        return Schedules(self.due0[rows] + pace * length, pace, outputs, self.final[rows] - length)

    def context(self, rows: tuple[int, ...]) -> int:
        """Lengths of ``rows`` together."""
        at = self._array if rows is self._rows and not self._dirty else np.array(rows, np.intp)
        return int(self.length[at].sum())

    def set_due(self, entry: Entry) -> None:
        """``entry``'s first token is known, or it goes on after a preemption."""
        due0 = entry.due0
        self.due0[entry.row] = due0
        self.pace[entry.row] = entry.pace if due0 < np.inf else 0.0

    def step(self, rows: tuple[int, ...]) -> None:
        """Every one of ``rows`` (what ``decode_set`` gave, or a part of it) has one more token planned."""
        if rows is self._rows and not self._dirty:
            self.length[self._array] += 1
        elif rows:
            self.length[np.array(rows, np.intp)] += 1

    def steps_until_due(self) -> int:
        """How many more tokens every decode row can take before one of them is due."""
        self._refresh()
        rows = self._array
        return int((self.horizon[rows] - self.length[rows]).min()) if len(rows) else 0

    def skip(self, steps: int) -> None:
        """Every decode row has ``steps`` more tokens planned; none gets beyond its horizon."""
        self._refresh()
        self.length[self._array] += steps
