"""What a policy sees of the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from k3stack.scheduler.core import Core
from k3stack.scheduler.request import Entry, Phase
from k3stack.scheduler.rows import Schedules

LOOKUP_S = 1.0
"""Age at which the look-up of a waiting prompt's cached prefix is repeated, if memory has changed since."""


class CoreView:
    """``policy.View`` on the scheduler's core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._found: dict[str, tuple[float, int, int]] = {}
        """Of waiting requests: when looked up, at which epoch of memory, tokens not cached."""
        self._answers: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._answered = 0

    @property
    def now(self) -> float:
        return self._core.clock.now()

    @property
    def waiting(self) -> Sequence[Entry]:
        return self._core.queue.entries

    @property
    def prefilling(self) -> Sequence[Entry]:
        return self._core.prefilling

    @property
    def decoding(self) -> int:
        return self._core.rows.decoding + len(self._core.special)

    @property
    def starting(self) -> Collection[Entry]:
        return self._core.starting.values()

    def schedules(self) -> Schedules:
        return self._core.rows.schedules(self._core.special)

    @property
    def context(self) -> int:
        rows = self._core.rows
        return rows.context(rows.decode_set()[0]) + sum(int(rows.length[e.row]) for e in self._core.special)

    def uncached(self, entry: Entry) -> int:
        core = self._core
        if entry.phase is not Phase.WAITING:
            return len(entry.ids) - int(core.rows.length[entry.row])
        now = core.clock.now()
        found = self._found.get(entry.rid)
        if found is None or (now - found[0] > LOOKUP_S and found[1] != core.epoch):
            found = now, core.epoch, len(entry.ids) - core.memory.lookup(entry.ids).cached
            if len(self._found) > 2 * len(core.queue) + 100:
                self._found = {e.rid: self._found[e.rid] for e in core.queue if e.rid in self._found}
            self._found[entry.rid] = found
        return found[2]

    def answers(self) -> npt.NDArray[np.int64]:
        core = self._core
        if len(self._answers) != len(core.answers) or self._answered != core.answered:
            self._answers, self._answered = np.sort(np.array(core.answers, np.int64)), core.answered
        return self._answers

    @property
    def free_rows(self) -> int:
        return self._core.rows.free

    @property
    def could_start(self) -> bool:
        core = self._core
        waiting = core.queue.entries
        if core.rows.free or not waiting:
            return bool(waiting)
        return core.options.priority_preemption and min(core.rows.priorities) < waiting[0].request.priority

    @property
    def chunk_tokens(self) -> int:
        return self._core.options.chunk_tokens
