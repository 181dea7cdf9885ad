"""The life of requests between queue, row and end: the state that planning and committing share."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from k3stack.errors import BugError
from k3stack.memory.ops import Op, SetPage, SetState
from k3stack.scheduler.options import SchedulerOptions
from k3stack.scheduler.plan import PagesAppend
from k3stack.scheduler.queue import WaitingQueue
from k3stack.scheduler.request import Entry, Event, FinishEvent, FinishReason, Phase, Refusal, Request, Times
from k3stack.scheduler.rows import RowTable
from k3stack.scheduler.seams import Clock, RowMemory

ANSWERS = 256
"""Lengths of answers that are remembered, for policies to expect others of."""


@dataclass(slots=True)
class Flight:
    """A plan whose result is awaited: whose tokens it brings, in the plan's order."""

    step: int
    rows: tuple[int, ...]
    """Row numbers of ``decode``, side by side."""
    decode: list[Entry]
    work: list[tuple[Entry, bool]]
    """Entry, and whether its work samples a token."""
    masked: list[tuple[int, Entry]]
    """Rows whose sampler waits for a mask, and whose they were when the plan was made."""
    void: bool = False
    """Its step, or one before it, failed: the result says nothing."""


@dataclass(slots=True)
class Pending:
    """Parts of the next plan that are already decided: they wait while there is nothing to run."""

    ended: list[int] = field(default_factory=list)
    pages: list[PagesAppend] = field(default_factory=list)
    before: list[Op] = field(default_factory=list)

    def forget(self, row: int) -> None:
        """``row`` ends: nothing about its tables matters any more. Copies of data stay, others may rely on them."""
        self.pages = [p for p in self.pages if p.row != row]
        self.before = [op for op in self.before if not (isinstance(op, (SetPage, SetState)) and op.row == row)]


class Core:
    """Live requests, rows, queue, events and counters. Every move of a request goes through a method here."""

    def __init__(self, memory: RowMemory, options: SchedulerOptions, clock: Clock) -> None:
        self.memory = memory
        self.options = options
        self.clock = clock
        self.page_tokens = memory.plan.layout.page_tokens
        self.state_tokens = memory.plan.layout.pages_per_block * self.page_tokens
        """Tokens whose pages take as much as a state."""
        self.snap_grain = memory.plan.layout.page_rows
        """Snapshots while decoding are looked for at multiples of this length."""
        self.rows = RowTable(options.max_running)
        self.queue = WaitingQueue()
        self.live: dict[str, Entry] = {}
        self.prefilling: list[Entry] = []
        """By rank."""
        self.special: list[Entry] = []
        """Decoding rows whose steps are ``RowWork``, by start."""
        self.pending = Pending()
        self.flights: deque[Flight] = deque()
        self.events: list[Event] = []
        self.next_step = 0
        self.committed = -1
        self.reset = False
        """The next plan must tell the executor to forget everything."""
        self.epoch = 0
        """Counts occasions on which memory may have got room."""
        self.pressure = False
        """Memory ran out and somebody was preempted: until a request leaves, nobody else starts."""
        self.starting: dict[str, Entry] = {}
        """Streams whose first token is in flight."""
        self.answers: deque[int] = deque(maxlen=ANSWERS)
        """Output tokens of the requests that ended by themselves lately."""
        self.answered = 0
        """How many have."""
        self.gone: list[Entry] = []
        """Ended ones, kept until there is time to free their tokens one by one."""
        self.counts: Counter[str] = Counter()
        self._order = 0

    # -- queue ----------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request, limit: int) -> None:
        now = self.clock.now()
        arrival = now if request.arrival is None else request.arrival
        entry = Entry(
            request, now, arrival - request.priority * self.options.aging_s, self._order, limit, self.options.target
        )
        self._order += 1
        self.live[request.rid] = entry
        self.queue.push(entry)

    def refuse(self, request: Request, refusal: Refusal, message: str) -> None:
        """The end of a request that never became live."""
        now = self.clock.now()
        queued = now if request.arrival is None else request.arrival
        self.counts["rejected"] += 1
        self.events.append(
            FinishEvent(
                rid=request.rid,
                reason="rejected",
                message=message,
                refusal=refusal,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=0,
                output_tokens=0,
                times=Times(queued, None, None, now),
            )
        )

    # -- rows -----------------------------------------------------------------------------------------------------

    def occupy(self, entry: Entry, cached: int) -> int:
        """A waiting entry starts as a row whose first ``cached`` tokens are in place; memory is open for it."""
        self.queue.remove(entry)
        row = self.rows.take(entry, cached)
        entry.phase = Phase.PREFILL
        entry.mark = self._next_mark(entry)
        at = sum(1 for e in self.prefilling if e < entry)
        self.prefilling.insert(at, entry)
        if entry.started_at is None:
            entry.started_at = self.clock.now()
            entry.cached = cached
        self.counts["cached_tokens"] += cached
        return row

    def prompt_planned(self, entry: Entry) -> None:
        """The last chunk of ``entry`` is planned, its first new token with it."""
        self.prefilling.remove(entry)
        if self.rows.length[entry.row] >= entry.final:
            entry.phase = Phase.LAST
            return
        entry.phase = Phase.DECODE
        self.set_horizon(entry)
        if entry.first_at is None:
            self.starting[entry.rid] = entry
        else:
            self.rows.set_due(entry)
        if entry.special:
            self.special.append(entry)
        else:
            self.rows.start_decode(entry.row, entry)

    def last_planned(self, entry: Entry) -> None:
        """Every token that ``entry`` may have is planned."""
        entry.phase = Phase.LAST
        if entry.special:
            self.special.remove(entry)
        else:
            self.rows.stop_decode(entry.row)

    def set_horizon(self, entry: Entry) -> None:
        """When the decoding row has to be looked at next; finds the next snapshot within its room."""
        rows, row = self.rows, entry.row
        length, room = int(rows.length[row]), rows.room[row]
        snap = rows.snap[row]
        if not length < snap <= room:
            snap = self._next_snap(row, length, room)
            rows.snap[row] = snap
        rows.horizon[row] = min(entry.final, room, snap - 1)

    def _next_snap(self, row: int, length: int, room: int) -> int:
        grain = self.snap_grain
        for at in range((length // grain + 1) * grain, room + 1, grain):
            if self.memory.wants_decode_snapshot(row, at):
                return at
        return room + 1

    def _next_mark(self, entry: Entry) -> int:
        """Length of ``ids`` at which commit has to look: the limit, or a page of known tokens complete."""
        page = self.page_tokens
        known = len(entry.ids)
        return min(entry.prompt_len + entry.limit, max(known - 1, 0) // page * page + page + 1)

    def first_token(self, entry: Entry) -> None:
        """Commit has the first token of ``entry``: the schedule of its stream begins."""
        entry.first_at = self.clock.now()
        self.starting.pop(entry.rid, None)
        if entry.row >= 0:
            self.rows.set_due(entry)

    def pages_known(self, entry: Entry) -> None:
        """Commit reached ``mark``: whole pages of known tokens become shareable."""
        row = entry.row
        if row >= 0:
            length = min(int(self.rows.length[row]), len(entry.ids))
            self.pending.before.extend(self.memory.advance(row, entry.ids, length))
        entry.mark = self._next_mark(entry)

    def running(self) -> list[Entry]:
        return list(self.rows.running.values())

    def vacate(self, entry: Entry, *, keep: bool = True, resume: bool = False) -> None:
        """``entry`` leaves its row: memory keeps what can be reused (``keep``), the more so if it will ``resume``, and
        frees the rest."""
        row = entry.row
        at: int | None = int(self.rows.length[row])
        if at is not None and at > len(entry.ids):
            at = None  # steps in flight move the state past the tokens known
        if entry.phase is Phase.PREFILL:
            self.prefilling.remove(entry)
        elif entry.phase is Phase.DECODE and entry.special:
            self.special.remove(entry)
        self.starting.pop(entry.rid, None)
        self.memory.close(row, entry.ids, state_at=at, keep=keep, resume=resume)
        self.rows.drop(entry)
        self.pending.forget(row)
        self.pending.ended.append(row)
        self.epoch += 1

    def preempt(self, entry: Entry, *, keep: bool = True) -> None:
        """Back to the queue with what it has; it goes on where memory still has its prefix."""
        self.vacate(entry, keep=keep, resume=keep)
        entry.phase = Phase.WAITING
        entry.preempted += 1
        entry.resume_after = self.next_step - 1
        self.counts["preempted"] += 1
        self.queue.push(entry)

    # -- ends -----------------------------------------------------------------------------------------------------

    def end(
        self,
        entry: Entry,
        reason: FinishReason,
        *,
        matched: int | str | None = None,
        message: str = "",
        keep: bool = True,
        outputs: int | None = None,
    ) -> None:
        """The one end of a live request; ``outputs``: how many of its tokens count (None: all)."""
        if entry.phase is Phase.ENDED or self.live.pop(entry.rid, None) is not entry:
            raise BugError(f"{entry!r} ends a second time ({reason})")
        if entry.row >= 0:
            self.vacate(entry, keep=keep)
            self.pressure = False
        else:
            self.queue.remove(entry)
        entry.phase = Phase.ENDED
        self.gone.append(entry)
        self.counts[reason] += 1
        if reason in ("stop", "length"):
            self.answers.append(entry.outputs)
            self.answered += 1
        self.events.append(
            FinishEvent(
                rid=entry.rid,
                reason=reason,
                matched_stop=matched,
                message=message,
                prompt_tokens=entry.prompt_len,
                cached_tokens=entry.cached,
                output_tokens=entry.outputs if outputs is None else outputs,
                times=Times(entry.queued_at, entry.started_at, entry.first_at, self.clock.now()),
            )
        )

    def lose_device(self) -> None:
        """What lies on the device is undefined: whoever runs starts anew, nothing cached is trusted."""
        for entry in self.running():
            self.preempt(entry, keep=False)
        self.memory.flush()
        for flight in self.flights:
            flight.void = True
        self.pending = Pending()
        self.reset = True
        self.pressure = False
