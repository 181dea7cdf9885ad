"""Options of the scheduler, and the two sets of them that behaviours ``k3`` and ``sglang`` stand for."""

from __future__ import annotations

from dataclasses import dataclass

from k3stack.errors import UserError


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How requests are queued, admitted and cut. ``validate`` raises UserError naming the field."""

    context: int
    """Most tokens of prompt and output together."""
    max_running: int = 256
    """Rows: requests that may run at a time, memory permitting."""
    chunk_tokens: int = 8192
    """Most prompt tokens computed in one step, over all requests."""
    max_queued: int = 4096
    """Requests that may wait; the next one is rejected."""
    aging_s: float = 30.0
    """A request of priority p is treated as one of priority 0 that came p times this earlier, so that a lower
    priority waits, but not for ever."""
    priority_preemption: bool = True
    """A waiting request may take the memory of running ones of a lower priority."""
    clip_max_tokens: bool = False
    """Shorten an explicit ``max_tokens`` that prompt and memory leave no room for, instead of refusing it."""
    check_when_idle: bool = True
    """Check the conservation of memory whenever the last request has ended."""

    def validate(self) -> SchedulerOptions:
        """Check ranges; returns self."""
        for name, least in (("context", 2), ("max_running", 1), ("chunk_tokens", 1), ("max_queued", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)
        if self.aging_s < 0:
            raise UserError(f"aging_s is {self.aging_s}; it must be 0 or more", param="aging_s")
        return self
