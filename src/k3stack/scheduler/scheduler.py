"""``Scheduler``: the one object that decides what runs next. See ``docs/scheduler.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from k3stack.errors import BugError
from k3stack.estimate.work import StepLoad
from k3stack.scheduler.committing import Committer
from k3stack.scheduler.core import Core
from k3stack.scheduler.limits import Limits, lone_tokens
from k3stack.scheduler.options import SchedulerOptions
from k3stack.scheduler.plan import StepPlan, StepResult
from k3stack.scheduler.planning import Planner
from k3stack.scheduler.policy import Policy
from k3stack.scheduler.request import Event, Phase, Request, Stopper
from k3stack.scheduler.rules import Rules
from k3stack.scheduler.seams import Clock, RowMemory
from k3stack.scheduler.sglang_rules import SglangRules
from k3stack.scheduler.stretch import skip, turns_ahead
from k3stack.scheduler.view import CoreView

IDLE_CHECK_S = 5.0
"""Least time between two checks of conservation: each walks the whole memory."""


class MaskedRow(NamedTuple):
    """A row of a plan whose sampler waits for a mask, which follows from ``output_ids`` (all tokens it has so far)."""

    row: int
    rid: str
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges now, and counters since the start."""

    waiting: int
    prefilling: int
    decoding: int
    finishing: int
    """Rows whose last token is in flight."""
    rows: int
    steps: int
    in_flight: int
    submitted: int
    finished: dict[str, int]
    """Ended requests by reason."""
    preempted: int
    stalled: int
    """Times a running row sat a step out for want of memory."""
    admission_waits: int
    """Times a waiting request was refused by memory or rules."""
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    failed_steps: int
    rescued: int
    """Times everything stood still until all that was cached had been dropped. Behaviour k3 should never need it."""


class Scheduler:
    """Requests in, plans out, results in, events out. Single-threaded; every method returns at once.

    Every submitted request ends in exactly one ``FinishEvent``.
    """

    def __init__(
        self,
        memory: RowMemory,
        policy: Policy,
        options: SchedulerOptions,
        clock: Clock,
        stopper: Stopper | None = None,
    ) -> None:
        self.options = options.validate()
        self._core = Core(memory, options, clock)
        estimate = options.sglang
        self._rules = Rules(self._core) if estimate is None else SglangRules(self._core, estimate)
        self._policy = policy
        self._planner = Planner(self._core, policy, self._rules, CoreView(self._core))
        self._committer = Committer(self._core, stopper, self._planner.learner)
        self._limits = Limits(options, lone_tokens(memory.plan))
        self._draining = False
        self._busy = False
        self._checked_at = float("-inf")

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue ``request``; its end may come at once as ``rejected``. BugError when its rid is live already."""
        core = self._core
        if request.rid in core.live:
            raise BugError(f"request id {request.rid!r} is in use")
        core.counts["submitted"] += 1
        self._busy = True
        if self._draining:
            core.refuse(request, "draining", "the server is shutting down and takes no more requests")
            return
        limit = self._limits.outputs(request)
        if isinstance(limit, str):
            core.refuse(request, "too_long" if request.prompt_ids else "invalid", limit)
        elif len(core.queue) >= self.options.max_queued:
            core.refuse(
                request,
                "queue_full",
                f"{len(core.queue):,} requests are waiting already; retry later (--max-queued-requests allows "
                f"{self.options.max_queued:,})",
            )
        else:
            core.enqueue(request, limit)

    def abort(self, rid: str, reason: str = "") -> None:
        """End a request, wherever it is. Nothing happens when it has ended already."""
        entry = self._core.live.get(rid)
        if entry is not None:
            self._core.end(entry, "abort", message=reason)

    def fail_all(self, message: str) -> None:
        """The executor is gone: every request ends with an error, plans in flight are forgotten. The next plan, for
        a new executor, says ``reset``."""
        core = self._core
        for entry in list(core.live.values()):
            core.end(entry, "error", message=message, keep=False)
        core.lose_device()
        core.flights.clear()
        if self._planner.learner is not None:
            self._planner.learner.forget()
        core.committed = core.next_step - 1

    def drain(self) -> None:
        """Take no more requests; those accepted run to their end."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def drained(self) -> bool:
        """Draining, and nothing is left."""
        return self._draining and not self._core.live and not self._core.flights

    # -- steps ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None when there is nothing to run, or nothing until a result has come. To be submitted in
        order, at most ``Executor.max_in_flight`` at a time."""
        plan = self._planner.plan()
        if plan is None and self._busy and not self._core.live and not self._core.flights:
            self._idle()
        return plan

    def commit(self, result: StepResult) -> None:
        """Apply the result of the oldest plan in flight."""
        self._committer.commit(result)

    def turns_ahead(self) -> int:
        """For a simulator: turns of pure decoding that are sure to come if no request comes or goes (``stretch``)."""
        return turns_ahead(self._core) if getattr(self._policy, "decodes_alone", False) else 0

    def skip(self, turns: int, first: tuple[int, ...], stride: int) -> None:
        """For a simulator: apply ``turns`` such turns at once, without events (see ``stretch.skip``)."""
        skip(self._core, self._rules, turns, first, stride)

    def skipped(self, loads: Sequence[StepLoad], since: float) -> None:
        """For a simulator, after ``skip``: what is in flight now, and when the oldest of it began."""
        if self._planner.learner is not None:
            self._planner.learner.skipped(loads, since)

    @property
    def decoding_rids(self) -> list[str]:
        """Requests of the decode set, in its order."""
        return [entry.rid for entry in self._core.rows.decode_set()[1]]

    def rest(self) -> None:
        """Do what can be done while the device works and nothing else is to do."""
        self._core.memory.rest()
        self._core.gone.clear()
        self._core.rows.rest()

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        core = self._core
        events, core.events = core.events, []
        return events

    def masked_rows(self) -> tuple[list[MaskedRow], list[int]]:
        """Of the oldest plan in flight: the rows that wait for a mask, and those whose request has ended meanwhile, for
        which an empty one will do. Every plan before it is committed, so their last outputs are known."""
        if not self._core.flights:
            return [], []
        flight = self._core.flights[0]
        wanted, ended = [], []
        for row, entry in flight.masked:
            if entry.ended or flight.void:
                ended.append(row)
            else:
                wanted.append(MaskedRow(row, entry.rid, entry.ids[entry.prompt_len :]))
        return wanted, ended

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running or in flight."""
        return not self._core.live and not self._core.flights

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self._core.rows.running)

    def stats(self) -> SchedulerStats:
        core, counts = self._core, self._core.counts
        phases = [entry.phase for entry in core.rows.running.values()]
        return SchedulerStats(
            waiting=len(core.queue),
            prefilling=len(core.prefilling),
            decoding=phases.count(Phase.DECODE),
            finishing=phases.count(Phase.LAST),
            rows=core.rows.size,
            steps=core.next_step,
            in_flight=len(core.flights),
            submitted=counts["submitted"],
            finished={reason: counts[reason] for reason in ("stop", "length", "abort", "rejected", "error")},
            preempted=counts["preempted"],
            stalled=counts["stalled"],
            admission_waits=counts["admission_waits"],
            prefill_tokens=counts["prefill_tokens"],
            decode_tokens=counts["decode_tokens"],
            cached_tokens=counts["cached_tokens"],
            failed_steps=counts["failed_steps"],
            rescued=counts["rescued"],
        )

    def check(self) -> None:
        """BugError unless every live request is in exactly one place, every row accounted for, and memory conserved."""
        core = self._core
        waiting = {e.rid for e in core.queue}
        running = {e.rid for e in core.rows.running.values()}
        if waiting & running or waiting | running != set(core.live):
            raise BugError(f"requests in queue and rows differ from those live: {waiting ^ running ^ set(core.live)}")
        if len(running) + core.rows.free != core.rows.size:
            raise BugError(f"{len(running)} rows taken and {core.rows.free} free of {core.rows.size}")
        if core.counts["submitted"] - sum(self.stats().finished.values()) != len(core.live):
            raise BugError("requests submitted, ended and live do not add up")
        core.memory.check()

    def _idle(self) -> None:
        self._busy = False
        self._rules.idle()
        now = self._core.clock.now()
        if self.options.check_when_idle and now - self._checked_at >= IDLE_CHECK_S:
            self._checked_at = now
            self.check()
