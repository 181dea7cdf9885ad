"""Waiting requests in the order of their turn."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from k3stack.errors import BugError
from k3stack.scheduler.request import Entry


class WaitingQueue:
    """Entries sorted by ``Entry.key``. Removal and insertion are a binary search and a move of memory."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def push(self, entry: Entry) -> None:
        insort(self._entries, entry)

    def remove(self, entry: Entry) -> None:
        at = bisect_left(self._entries, entry)
        if at == len(self._entries) or self._entries[at] is not entry:
            raise BugError(f"{entry!r} is not in the queue")
        del self._entries[at]

    @property
    def entries(self) -> list[Entry]:
        """The queue itself, in order: to look at, not to change."""
        return self._entries
