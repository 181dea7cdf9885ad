"""The event queue of a simulation: what happens next, in order of time and, at equal times, of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from k3stack.errors import BugError
from k3stack.scheduler.clock import VirtualClock


class EventQueue:
    """Callbacks at virtual times. ``run`` moves the clock from one to the next until nothing is left."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call back at ``time`` (now, if that has passed already would be a bug of the caller)."""
        if time < self.clock.now():
            raise BugError(f"an event at {time} s was asked for at {self.clock.now()} s")
        heapq.heappush(self._heap, (time, self._order, call))
        self._order += 1

    @property
    def next_time(self) -> float:
        """When the next event is; infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def run(self, until: float = float("inf")) -> None:
        """Run events in order up to and including time ``until``."""
        heap, clock = self._heap, self.clock
        while heap and heap[0][0] <= until:
            time, _, call = heapq.heappop(heap)
            clock.sleep_until(time)
            call()
