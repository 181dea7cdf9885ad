"""A clock that only moves when told: for tests and simulation."""

from __future__ import annotations

from k3stack.errors import BugError


class VirtualClock:
    """``sleep_until`` returns at once, at the time asked for."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep_until(self, t: float) -> None:
        self._now = max(self._now, t)

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise BugError(f"time cannot go back by {-seconds} s")
        self._now += seconds
