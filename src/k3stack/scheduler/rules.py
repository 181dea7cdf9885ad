"""Who may start, how long a chunk is, and who gives way: the rules in which behaviours differ.

``Rules`` are those of behaviour ``k3``; ``SglangRules`` are the other set.
"""

from __future__ import annotations

from k3stack.scheduler.core import Core
from k3stack.scheduler.request import Entry, Phase

RETRY_PLANS = 32
"""A request refused by memory is tried again after this many plans even if nothing has visibly been freed: prefixes
that others compute meanwhile may have shortened it."""

GROWTH_PAGES = 4
"""Pages left to each running request when another starts under pressure."""


class Rules:
    """Behaviour ``k3``: start when there is a state block and room for the first chunk; the last in rank gives way."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def begin_pass(self) -> None:
        """A step's chunks are about to be chosen."""
        if self.core.next_step % RETRY_PLANS == 0:
            self.core.epoch += 1

    def may_start(self, entry: Entry) -> bool:
        """Asked before memory is. After a preemption for want of memory nobody starts until somebody has left, else
        two requests would push each other out in turn; unless there is room for all that it may ever need, and some
        for those that run."""
        core = self.core
        if not core.pressure or not core.rows.running or self.outranked(entry) is not None:
            return True
        growth = GROWTH_PAGES * core.page_tokens * len(core.rows.running)
        return core.memory.available_tokens >= entry.final + core.state_tokens + growth

    def accept(self, entry: Entry, cached: int, left: int) -> int | None:
        """Memory is open with ``cached`` tokens reused, ``left`` are left in the step: where the first chunk ends
        (``cached``: the step has too few tokens left). None: refused, the request waits."""
        return self.chunk_end(entry, cached, left)

    def chunk_end(self, entry: Entry, start: int, left: int) -> int:
        """Where a chunk from ``start`` ends with ``left`` tokens left in the step (``start``: none is worth it)."""
        return self.cut(entry, start, min(len(entry.ids), start + left))

    def cut(self, entry: Entry, start: int, end: int) -> int:
        """Where memory would rather have the chunk [start, end) end, for a snapshot's sake."""
        row = entry.row if entry.row >= 0 else self.core.rows.lowest_free
        return self.core.memory.cut(row, start, end)

    def victim(self, entry: Entry) -> Entry | None:
        """Who gives way when there is no room for running ``entry`` (None: ``entry`` sits the step out). Rows whose
        last token is planned are spared: they leave by themselves."""
        worst = max(e for e in self.core.rows.running.values() if e.phase is not Phase.LAST)
        return worst if entry < worst else None

    def outranked(self, entry: Entry) -> Entry | None:
        """Whose row and memory waiting ``entry`` may take: the last in rank of a lower priority."""
        if not self.core.options.priority_preemption:
            return None
        priority = entry.request.priority
        rows = self.core.rows.running.values()
        lower = [e for e in rows if e.request.priority < priority and entry < e and e.phase is not Phase.LAST]
        return max(lower, default=None)

    def preempted(self, entry: Entry) -> None:
        """``entry`` has just given way to a running one."""
        self.core.pressure = True

    def decoded(self, rows: int) -> None:
        """A decode step of ``rows`` rows is planned."""

    def idle(self) -> None:
        """The last request has ended."""
