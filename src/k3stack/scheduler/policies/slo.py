"""Policy ``slo``: prompts start only when every live stream's schedule has room for them.

A stream's schedule: its token n is due n times the target's time per token after its first. A prompt is computed when
that makes no stream late; until then the streams decode and so build up room. Prompts go by earliest deadline of
their first token; those that cannot be on time any more go behind those that can, and when not all can, the largest
gives way first (Moore and Hodgson's rule). Nothing is forced but by the guard against starvation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from k3stack.errors import UserError
from k3stack.estimate.work import StepLoad
from k3stack.scheduler.cost import CorrectedCost, StepCost
from k3stack.scheduler.policy import Decision, View
from k3stack.scheduler.request import Entry, Phase

DECODE = Decision()
INF = float("inf")
DEFAULT_ANSWER = 200.0
"""Tokens of an answer before any has ended."""
LOOK_AHEAD = 256
"""Waiting requests, in the order of their turn, that are considered each time."""
MOST_DECODE = 0.8
"""Share of the device that streams are taken to need at most, when estimating how long prompts take beside them."""
GUARD_EARLY = 0.95
"""The guard acts at this share of its time, since a step in flight has to end first."""
LEAST_CHUNK = 64
"""Tokens below which a chunk is not cut."""
GAP_MARGIN = 0.95
"""Share of the bound on the longest gap that a predicted step may take."""


@dataclass(frozen=True, slots=True)
class SloOptions:
    """How policy ``slo`` trades. ``validate`` raises UserError naming the field."""

    guard_s: float = 20.0
    """No request waits longer than this for its start, as far as ``guard_share`` allows."""
    guard_share: float = 0.5
    """Most of the time that prompts started by the guard may take while others could still be on time."""
    max_gap_s: float | None = None
    """Longest time between two tokens of a stream that a step may cause; chunks are cut to keep it."""
    mixed: bool = True
    """Streams decode in the same step as a chunk."""
    outside_s: float = 0.0
    """Time between the end of a prompt's last step and the moment its first token counts as delivered."""

    def validate(self) -> SloOptions:
        if self.guard_s <= 0 or not 0 < self.guard_share <= 1 or self.outside_s < 0:
            raise UserError(
                f"guard {self.guard_s:g} s, guard share {self.guard_share:g}, outside {self.outside_s:g} s: the guard "
                "must be above 0, its share above 0 and at most 1, the time outside 0 or more",
                param="guard_s",
            )
        if self.max_gap_s is not None and self.max_gap_s <= 0:
            raise UserError(f"max_gap_s is {self.max_gap_s:g}; it must be above 0", param="max_gap_s")
        return self


class _Prompt(NamedTuple):
    """A prompt that could be computed next."""

    due: float
    """When its computation must be over."""
    order: int
    seconds: float
    """That its computation takes by itself."""
    left: int
    """Tokens to compute."""
    entry: Entry


class Slo:
    """See the module. ``cost`` predicts steps and is corrected by those measured; targets are the requests' own."""

    def __init__(self, cost: StepCost, options: SloOptions | None = None) -> None:
        self.options = (options or SloOptions()).validate()
        self.cost = CorrectedCost(cost)
        self._flights: deque[tuple[StepLoad, float]] = deque()
        self._since = 0.0
        """When the oldest plan in flight began, as far as known."""
        self._guard_from = float("-inf")
        """Until then the guard starts nothing."""
        self._forced: str | None = None
        """The request that the guard started and that is not through yet."""
        self._raw: dict[str, tuple[int, float]] = {}
        """Of waiting requests: tokens left, and what the given cost function says of them."""

    # -- what becomes of decisions --------------------------------------------------------------------------------

    def planned(self, load: StepLoad, now: float) -> None:
        if not self._flights:
            self._since = now
        self._flights.append((load, self.cost.seconds(load)))

    def observed(self, seconds: float | None, now: float) -> None:
        load, _ = self._flights.popleft()
        self._since = now
        if seconds is not None:
            self.cost.learn(load, seconds)

    def forget(self) -> None:
        self._flights.clear()

    # -- decisions ------------------------------------------------------------------------------------------------

    def decide(self, view: View) -> Decision:
        waiting, prefilling = view.waiting, view.prefilling
        if not waiting and not prefilling:
            return DECODE
        now = view.now
        start = max(now, self._since + sum(s for _, s in self._flights)) if self._flights else now
        streams = StepLoad(decode_rows=view.decoding, decode_context=view.context, samples=view.decoding)
        step = self.cost.seconds(streams) if view.decoding else 0.0
        entries = [*prefilling, *waiting[:LOOK_AHEAD]]
        forced = self._guarded(entries, start)
        if forced is not None:
            prompt = self._prompt(view, forced, step)
            decision = self._fill(view, [prompt], streams, INF, start)
            self._guard_from = start + self._step_seconds(streams, decision.tokens) / self.options.guard_share
            self._forced = forced.rid
            return decision
        room, stretch = self._room(view, start, step)
        if room <= step:
            return DECODE
        prompts = self._in_order([self._prompt(view, e, step) for e in entries], start, stretch)
        return self._fill(view, prompts, streams, room, start)

    def _room(self, view: View, start: float, step: float) -> tuple[float, float]:
        """Seconds that a step beginning at ``start`` may take before a stream that can still meet its target is late
        with its next token; and by how much the streams' needs stretch the time a prompt takes."""
        dues, paces = view.schedules()
        answer = view.mean_outputs or DEFAULT_ANSWER
        # A stream that lags by more than it can be expected to make up again is given up.
        live = (dues < INF) & (dues > start - answer * np.maximum(paces - step, 0.0))
        room, pace = INF, INF
        if live.any():
            room = float(dues[live].min()) - start
            pace = float(paces[live].min())
        for entry in view.starting:
            if entry.request.whole:
                room = min(room, entry.first_due + 2 * entry.pace - start)
            elif start <= entry.first_due:
                room = min(room, entry.pace)
            pace = min(pace, entry.pace)
        if room == INF:
            return INF, 1.0
        share = min(step / pace, MOST_DECODE)
        return room if self.options.mixed else room - step, 1.0 / (1.0 - share)

    # -- the order of prompts -------------------------------------------------------------------------------------

    def _prompt(self, view: View, entry: Entry, step: float) -> _Prompt:
        left = view.uncached(entry)
        cached = self._raw.get(entry.rid)
        if cached is None or cached[0] != left:
            if len(self._raw) > 4 * LOOK_AHEAD:
                self._raw.clear()
            cached = left, self._prompt_seconds(len(entry.ids) - left, left, view.chunk_tokens)
            self._raw[entry.rid] = cached
        due = entry.first_due - self.options.outside_s
        if entry.request.whole:
            # Its last token counts: while it decodes faster than its pace it makes up for a late start.
            answer = min(view.mean_outputs or DEFAULT_ANSWER, entry.limit)
            due += answer * max(0.0, entry.pace - step)
        elif entry.first_at is not None and entry.due0 < INF:
            due = entry.due0 + entry.pace * len(entry.ids)  # it was preempted, and its next token is due
        return _Prompt(due, entry.order, cached[1] * self.cost.factors[1], left, entry)

    def _prompt_seconds(self, prefix: int, left: int, chunk: int) -> float:
        """What the given cost function says of a prompt by itself: ``left`` tokens after ``prefix``."""
        seconds = 0.0
        while left > 0:
            take = min(left, chunk)
            seconds += self.cost.cost.seconds(with_chunk(StepLoad(), prefix, take))
            prefix, left = prefix + take, left - take
        return seconds

    @staticmethod
    def _in_order(prompts: list[_Prompt], start: float, stretch: float) -> list[_Prompt]:
        """Started ones, then by priority: those that can be on time by deadline, then the others by arrival.

        Of those that cannot all be on time the largest is put off until the rest are (Moore and Hodgson: the most
        deadlines that one machine can keep).
        """
        ready = [p for p in prompts if p.entry.phase is Phase.PREFILL]
        waiting = [p for p in prompts if p.entry.phase is Phase.WAITING]
        t = start + sum(p.seconds for p in ready) * stretch
        for priority in sorted({p.entry.request.priority for p in waiting}, reverse=True):
            kept: list[tuple[float, int]] = []
            level = sorted(p for p in waiting if p.entry.request.priority == priority)
            dropped = set()
            for i, p in enumerate(level):
                if start + p.seconds > p.due:
                    dropped.add(i)
                    continue
                t += p.seconds * stretch
                heappush(kept, (-p.seconds, i))
                if t > p.due:
                    seconds, largest = heappop(kept)
                    t += seconds * stretch
                    dropped.add(largest)
            ready += [p for i, p in enumerate(level) if i not in dropped]
            ready += sorted((level[i] for i in dropped), key=lambda p: p.order)
        return ready

    def _guarded(self, entries: Sequence[Entry], start: float) -> Entry | None:
        """Who has waited too long and may be started, or gone on with, regardless of the streams."""
        limit = start - self.options.guard_s * GUARD_EARLY
        late = [e for e in entries if e.rid == self._forced or (e.started_at is None and e.queued_at <= limit)]
        if not late or start < self._guard_from:
            return None
        return min(late, key=lambda e: (e.rid != self._forced, e.queued_at))

    # -- the size of the step -------------------------------------------------------------------------------------

    def _step_seconds(self, streams: StepLoad, tokens: int, prefix: int = 0) -> float:
        return self.cost.seconds(with_chunk(streams if self.options.mixed else StepLoad(), prefix, tokens))

    def _fill(self, view: View, prompts: list[_Prompt], streams: StepLoad, room: float, start: float) -> Decision:
        """The first prompts that fit into the step's tokens and into ``room`` seconds."""
        load = streams if self.options.mixed else StepLoad()
        chosen: list[Entry] = []
        tokens, due = 0, INF
        gap = INF if not view.decoding else self._gap(streams)
        for p in prompts:
            take = min(p.left, view.chunk_tokens - tokens)
            if take <= 0:
                break
            prefix = len(p.entry.ids) - p.left
            more = with_chunk(load, prefix, take)
            seconds = self.cost.seconds(more)
            on_time = start + p.seconds <= p.due
            if chosen and (seconds > min(room, gap) or start + seconds > due or not on_time):
                break
            if seconds > room:
                break
            if seconds > gap:
                take = self._cut(load, prefix, take, gap)
                more = with_chunk(load, prefix, take)
            load = more
            chosen.append(p.entry)
            tokens += take
            due = min(due, p.due)
            if take < p.left or not on_time:
                break
        if not chosen:
            return DECODE
        return Decision(chunks=chosen, tokens=tokens, mixed=self.options.mixed)

    def _gap(self, streams: StepLoad) -> float:
        """Most seconds of a step under the bound on the longest gap; inf where no step with a chunk can keep it."""
        bound = self.options.max_gap_s
        if bound is None:
            return INF
        bound *= GAP_MARGIN
        if not self.options.mixed:
            bound -= self.cost.seconds(streams)
        return bound if self._step_seconds(streams, LEAST_CHUNK) <= bound else INF

    def _cut(self, load: StepLoad, prefix: int, most: int, seconds: float) -> int:
        """The largest chunk of at least ``LEAST_CHUNK`` and at most ``most`` tokens whose step keeps ``seconds``."""
        low, high = min(LEAST_CHUNK, most), most
        while high - low > LEAST_CHUNK:
            mid = (low + high) // 2
            if self.cost.seconds(with_chunk(load, prefix, mid)) <= seconds:
                low = mid
            else:
                high = mid
        return low


def with_chunk(load: StepLoad, prefix: int, tokens: int) -> StepLoad:
    """``load`` and one more chunk of ``tokens`` after ``prefix``, which samples."""
    return replace(
        load,
        chunk_rows=load.chunk_rows + 1,
        chunk_tokens=load.chunk_tokens + tokens,
        chunk_prefix=load.chunk_prefix + prefix,
        chunk_pairs=load.chunk_pairs + tokens * (prefix + tokens / 2),
        samples=load.samples + 1,
    )
