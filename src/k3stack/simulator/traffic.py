"""Drives a workload into servers on the event queue, and keeps one record a request as a load client would."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from k3stack.config.sampling import SamplingParams
from k3stack.scheduler.request import Event, FinishEvent, Request, TokenEvent
from k3stack.scheduler.request import Target as scheduler_target
from k3stack.simulator.content import Content
from k3stack.simulator.events import EventQueue
from k3stack.simulator.server import SimServer
from k3stack.workload.records import End, Record
from k3stack.workload.sessions import Session, Workload
from k3stack.workload.target import Target

Submit = Callable[[Request, int], None]
"""Takes a request and its session: a deployment's way in."""

_ENDS: dict[str, End] = {"stop": "stop", "length": "length", "abort": "abort", "rejected": "rejected", "error": "error"}


@dataclass(slots=True)
class _Open:
    """A request under way."""

    session: Session
    record: Record
    last_s: float = -1.0
    cached_known: bool = False


class Traffic:
    """Sessions in, records out. ``host``: seconds that a prompt of so many tokens takes to reach the scheduler."""

    def __init__(
        self,
        workload: Workload,
        events: EventQueue,
        submit: Submit,
        *,
        target: Target,
        host: Callable[[int], float] = lambda tokens: 0.0,
        token_times: bool = False,
    ) -> None:
        self.records: list[Record] = []
        self.content = Content()
        self._workload, self._events, self._submit = workload, events, submit
        # Policies that plan against a target know the one that the run is judged by.
        self._target = scheduler_target(target.ttft_s, target.tpot_s)
        self._host, self._token_times = host, token_times
        self._open: dict[str, _Open] = {}
        self._waiting = deque(workload.sessions)
        self._on_done: Callable[[int], None] = lambda session: None

    def start(self, on_done: Callable[[int], None]) -> None:
        """Put the first arrivals on the queue. ``on_done`` is told every session that is over."""
        self._on_done = on_done
        if self._workload.concurrency is None:
            self._next_arrival()
            return
        for _ in range(min(self._workload.concurrency, len(self._waiting))):
            self._arrive(self._waiting.popleft(), 0)

    def _next_arrival(self) -> None:
        """One pending arrival at a time keeps the queue small."""
        if self._waiting:
            session = self._waiting.popleft()

            def come() -> None:
                self._arrive(session, 0)
                self._next_arrival()

            self._events.at(max(session.arrival_s, self._events.clock.now()), come)

    def _arrive(self, session: Session, turn: int) -> None:
        now, this = self._events.clock.now(), session.turns[turn]
        rid = f"{session.sid}.{turn}"
        record = Record(
            rid=rid,
            session=session.sid,
            turn=turn,
            arrival_s=now,
            sent_s=now,
            prompt_tokens=session.prompt_tokens(turn),
            asked_tokens=this.output_tokens,
            tool_call=this.tool_call,
            stream=session.stream,
            priority=this.priority,
            token_s=[] if session.stream or self._token_times else None,
        )
        self.records.append(record)
        self._open[rid] = _Open(session, record)
        request = Request(
            rid=rid,
            prompt_ids=self.content.prompt(session, turn),
            sampling=SamplingParams(max_tokens=this.output_tokens, ignore_eos=True, temperature=0.0),
            priority=this.priority,
            arrival=now,
            target=self._target,
            whole=this.tool_call,
        )
        before = self._host(record.prompt_tokens)
        if before:
            self._events.at(now + before, lambda: self._submit(request, session.sid))
        else:
            self._submit(request, session.sid)

    def deliver(self, server: SimServer, events: Sequence[Event]) -> None:
        """What a server reports: tokens are stamped with the virtual time."""
        now = self._events.clock.now()
        for event in events:
            if isinstance(event, TokenEvent):
                self.tokens(event.rid, len(event.tokens), now)
            else:
                server.outstanding -= 1
                self.finished(event, now)

    def tokens(self, rid: str, count: int, now: float) -> None:
        """``count`` tokens of a request arrived at ``now``."""
        if not count:
            return
        open_ = self._open[rid]
        record = open_.record
        record.output_tokens += count
        if record.first_s is None:
            record.first_s = now
        elif now - open_.last_s > record.longest_gap_s:
            record.longest_gap_s = now - open_.last_s
        open_.last_s = now
        if record.token_s is not None:
            record.token_s.extend([now] * count)

    def stream(self, rids: Sequence[str], times: Sequence[float]) -> None:
        """One more token of each of ``rids`` arrived at each of ``times``; none of them is a first token."""
        gap = max((b - a for a, b in pairwise(times)), default=0.0)
        for rid in rids:
            open_ = self._open[rid]
            record = open_.record
            record.output_tokens += len(times)
            record.longest_gap_s = max(record.longest_gap_s, gap, times[0] - open_.last_s)
            open_.last_s = times[-1]
            if record.token_s is not None:
                record.token_s.extend(times)

    def prefilled(self, rid: str, event: FinishEvent) -> None:
        """What a prefill server says of a request that it hands on: tokens reused, and when it began."""
        open_ = self._open[rid]
        open_.record.cached_tokens = event.cached_tokens
        open_.record.started_s = event.times.started
        open_.cached_known = True

    def finished(self, event: FinishEvent, now: float) -> None:
        """The end of a request: its record is complete, the session's next turn is due after its pause."""
        open_ = self._open.pop(event.rid)
        record, session = open_.record, open_.session
        record.end = _ENDS[event.reason]
        record.error = event.message or None
        record.finished_s = now
        if record.started_s is None:
            record.started_s = event.times.started
        if not open_.cached_known:
            record.cached_tokens = event.cached_tokens
        turn = record.turn + 1
        if record.ok and turn < len(session.turns):
            self._events.at(now + session.turns[turn].think_s, lambda: self._arrive(session, turn))
            return
        self.content.done(session)
        self._on_done(session.sid)
        if self._workload.concurrency is not None and self._waiting:
            self._arrive(self._waiting.popleft(), 0)
