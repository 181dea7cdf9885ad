"""A step being put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from k3stack.scheduler.plan import RowAdd, RowWork
from k3stack.scheduler.request import Entry


@dataclass(slots=True)
class Work:
    """A row's ``RowWork``, and its length after the step."""

    entry: Entry
    work: RowWork
    end: int


@dataclass(slots=True)
class Draft:
    """Rows added, work and snapshots of the step; ``drop`` takes a row out again that was preempted meanwhile."""

    added: dict[int, RowAdd] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)
    skip: set[int] = field(default_factory=set)
    """Decode rows that sit this step out."""
    snapshots: list[Entry] = field(default_factory=list)
    """Decode rows whose state is to be kept after the step."""
    decode: bool = False

    def drop(self, entry: Entry, row: int) -> bool:
        """True when ``row`` was added in this very step, so that the executor never hears of it."""
        self.work = [w for w in self.work if w.entry is not entry]
        self.snapshots = [e for e in self.snapshots if e is not entry]
        return self.added.pop(row, None) is not None
