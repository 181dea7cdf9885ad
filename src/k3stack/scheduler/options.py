"""Options of the scheduler, and the two sets of them that behaviours ``k3`` and ``sglang`` stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3stack.errors import UserError
from k3stack.scheduler.request import Target


@dataclass(frozen=True, slots=True)
class SglangEstimate:
    """SGLang's guess of how much output running requests will still have (its ``schedule_conservativeness``)."""

    conservativeness: float = 1.0
    """Scales the share of ``max_tokens`` held back for each running request: 0.7 times this at first."""
    decay_steps: int = 600
    """Decode steps over which the share falls to its least."""
    least_share: float = 0.14
    """Of the first share."""
    clip_tokens: int = 4096
    """Most output tokens held back for one request."""
    finish_order: bool = False
    """Fixed-length requests (``ignore_eos``) are admitted by simulating the order in which requests finish instead.
    That server does so when its prefix cache is off."""


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

    target: Target | None = None
    """Latency target of requests that bring none."""
    sglang: SglangEstimate | None = None
    """Behaviour ``sglang``: its rules of admission, chunks and retraction in place of ours."""

    @classmethod
    def for_sglang(cls, *, estimate: SglangEstimate | None = None, **fields: Any) -> SchedulerOptions:
        """Behaviour ``sglang`` with that server's other habits: no preemption by priority, outputs clipped."""
        return cls(
            **{"priority_preemption": False, "clip_max_tokens": True, **fields}, sglang=estimate or SglangEstimate()
        )

    def validate(self) -> SchedulerOptions:
        """Check ranges; returns self."""
        for name, least in (("context", 2), ("max_running", 1), ("chunk_tokens", 1), ("max_queued", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)
        if self.aging_s < 0:
            raise UserError(f"aging_s is {self.aging_s}; it must be 0 or more", param="aging_s")
        if self.sglang is not None and not self.sglang.conservativeness > 0:
            raise UserError(
                f"conservativeness is {self.sglang.conservativeness}; it must be above 0", param="conservativeness"
            )
        return self
