"""The event queue of a simulation: what happens next, in order of time, then of rank, then of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from k3stack.errors import BugError
from k3stack.scheduler.clock import VirtualClock

LAST_RANK = 1 << 30
"""After everything else at its time."""


class EventQueue:
    """Callbacks at virtual times. ``run`` moves the clock from one to the next until nothing is left."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = 0
        self._cancelled: set[int] = set()
        self.reached = (0.0, 0)
        """Time and rank up to which everything has happened; the highest of both at equal times."""

    def at(self, time: float, call: Callable[[], None], rank: int = 0) -> int:
        """Call back at ``time`` (one that has passed already would be a bug of the caller). At equal times lower ranks
        come first: arrivals have 0, servers their number, so that the order does not hang on who asked when. Returns
        what ``cancel`` takes."""
        if time < self.clock.now():
            raise BugError(f"an event at {time} s was asked for at {self.clock.now()} s")
        heapq.heappush(self._heap, (time, rank, self._order, call))
        self._order += 1
        return self._order - 1

    def cancel(self, event: int) -> None:
        """Forget an event that has not happened."""
        self._cancelled.add(event)

    def run(self, until: float = float("inf")) -> None:
        """Run events in order up to and including time ``until``."""
        heap, clock = self._heap, self.clock
        while heap and heap[0][0] <= until:
            time, rank, order, call = heapq.heappop(heap)
            if order in self._cancelled:
                self._cancelled.remove(order)
                continue
            clock.sleep_until(time)
            self.reached = max(self.reached, (time, rank))
            call()
        if until < float("inf"):
            self.reached = max(self.reached, (until, LAST_RANK))
