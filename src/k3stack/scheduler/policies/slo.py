"""Policy ``slo``: prompts start only when every live stream's schedule has room for them.

A stream's schedule: its token n is due n times the target's time per token after its first. A prompt is computed when
that makes no stream late; until then the streams decode and so build up room. Prompts go by earliest deadline of
their first token; those that cannot be on time any more go behind those that can, and when not all can, the largest
gives way first (Moore and Hodgson's rule). A prompt is begun without room for two reasons only: waiting would make it
late while the streams can be expected to make up for it, or the guard against starvation asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from k3stack.estimate.work import StepLoad
from k3stack.scheduler.cost import CorrectedCost, LearningCost, StepCost
from k3stack.scheduler.policies.deadlines import Prompt, in_order
from k3stack.scheduler.policies.slo_options import SloOptions
from k3stack.scheduler.policies.streams import Answers, Streams
from k3stack.scheduler.policy import Decision, View
from k3stack.scheduler.request import Entry, Phase

__all__ = ["Slo", "SloOptions"]

DECODE = Decision()
INF = float("inf")
CONSIDERED = 32
"""Waiting requests not known to be late that are put in order each time: more could hardly all be on time."""
CONSIDERED_A_ROW = 4
"""The same for each free row: with few to give, a choice among more is not worth its time."""
GUARDED = 64
"""Waiting requests, in the order of their turn, that the guard looks at."""
GUARD_EARLY = 0.7
"""The guard acts at this share of its time: a step in flight has to end first, and its share of the time may be taken.
"""
GUARD_BURST = 0.3
"""Share of the time that the guard takes at most while it spends what it has saved up."""
PREDICT_S = 1.0
"""Age at which the prediction for a waiting prompt is made anew: with what steps have taught since, and memory asked
again how much of it is cached."""
LESSONS = 4
"""Decode steps after the last prompt was planned that the cost of steps is still learned from."""
RECHECK_S = 0.05
"""How long streams without room for the next prompt are left alone: by then another prompt may have to go first."""
LEAST_CHUNK = 64
"""Tokens below which a chunk is not cut."""
GAP_MARGIN = 0.95
"""Share of the bound on the longest gap that a predicted step may take."""


class Slo:
    """See the module. ``cost`` predicts steps and is corrected by those measured; targets are the requests' own."""

    def __init__(self, cost: StepCost, options: SloOptions | None = None) -> None:
        self.options = (options or SloOptions()).validate()
        self.cost: LearningCost = cost if isinstance(cost, LearningCost) else CorrectedCost(cost)
        self._flights: deque[tuple[StepLoad, float, bool]] = deque()
        """Of each plan in flight: its load, the seconds it is predicted to take, and whether to learn from it."""
        self._lessons = LESSONS
        """Plans that will still be learned from while there is nothing but streams."""
        self._since = 0.0
        """When the oldest plan in flight began, as far as known."""
        self._standing = 0.0
        """Seconds of the steps planned since the streams last decoded."""
        self._no_room_until = float("-inf")
        """Until then streams are known to have no room for the prompt that is next, ..."""
        self._no_room_for = (0, 0, 0)
        """... as long as nobody comes or goes: waiting, begun, streams."""
        self._guard_from = float("-inf")
        """Until then the guard starts nothing."""
        self._guard_paid = float("-inf")
        """Until then the guard has had its share of the time."""
        self._forced: str | None = None
        """The request that the guard started and that is not through yet."""
        self._late: set[str] = set()
        """Waiting requests that cannot be on time any more, since ``_late_since``."""
        self._late_since = float("-inf")
        self._ended: Answers | None = None
        self._seconds_of: dict[str, tuple[int, float, float]] = {}
        """Of waiting requests: tokens left, when predicted, and seconds they take by themselves."""

    # -- what becomes of decisions --------------------------------------------------------------------------------

    def planned(self, load: StepLoad, now: float) -> None:
        if not self._flights:
            self._since = now
        seconds = self.cost.seconds(load)
        self._standing = 0.0 if load.decode_rows else self._standing + seconds
        self._flights.append((load, seconds, self._lessons > 0))
        self._lessons = max(0, self._lessons - 1)

    def observed(self, seconds: float | None, now: float) -> None:
        load, _, telling = self._flights.popleft()
        self._since = now
        if seconds is not None and telling:
            self.cost.learn(load, seconds)

    def forget(self) -> None:
        self._flights.clear()

    @property
    def decodes_alone(self) -> bool:
        """From now on steps while nothing but streams is there leave no trace, apart from what ``skipped`` is told."""
        return self._lessons <= 0 and not any(telling for _, _, telling in self._flights)

    def skipped(self, loads: Sequence[StepLoad], since: float) -> None:
        self._flights = deque((load, self.cost.seconds(load), False) for load in loads)
        self._since = since
        self._standing = 0.0
        self._lessons = 0

    # -- decisions ------------------------------------------------------------------------------------------------

    def decide(self, view: View) -> Decision:
        waiting, prefilling = view.waiting, view.prefilling
        if not prefilling and not view.could_start:
            if waiting:
                self._prepare(view)
            return DECODE
        self._lessons = LESSONS
        now = view.now
        start = max(now, self._since + sum(s for _, s, _ in self._flights)) if self._flights else now
        seen = (len(waiting), len(prefilling), view.decoding)
        if start < self._no_room_until and seen == self._no_room_for:
            return DECODE
        load = StepLoad(decode_rows=view.decoding, decode_context=view.context, samples=view.decoding)
        step = self.cost.seconds(load) if view.decoding else 0.0
        streams = self._streams(view, start, load, step)
        forced = self._guarded([*prefilling, *waiting[:GUARDED]], start)
        if forced is not None:
            decision = self._fill(view, [self._prompt(view, forced, step)], set(), streams, INF)
            self._charge_guard(start, self._seconds(load, decision.tokens))
            self._forced = forced.rid
            return decision
        prompts, on_time = self._prompts(view, streams)
        room = streams.room
        if prompts[0].order in on_time and self._worth(prompts[0], streams, view.chunk_tokens):
            room = INF
        decision = self._fill(view, prompts, on_time, streams, room)
        if decision is DECODE:
            first = prompts[0]
            seconds = self._seconds(load, min(first.left, view.chunk_tokens), len(first.entry.ids) - first.left)
            self._no_room_until, self._no_room_for = start + min(streams.wait(seconds), RECHECK_S), seen
        return decision

    def _streams(self, view: View, start: float, load: StepLoad, step: float) -> Streams:
        schedules = view.schedules()
        slack, pace = schedules.due - start, schedules.pace
        outputs, left = schedules.outputs.astype(np.float64), schedules.left.astype(np.float64)
        live = slack < INF
        if not live.all():
            slack, pace, outputs, left = slack[live], pace[live], outputs[live], left[live]
        starting = [(e, _first_slack(e, start)) for e in view.starting]
        first = [(s, e.pace, 1.0, e.limit - 1.0) for e, s in starting if s < INF]
        if first:
            columns = zip((slack, pace, outputs, left), np.array(first).T, strict=True)
            slack, pace, outputs, left = [np.concatenate(pair) for pair in columns]
        return Streams(start, load, step, slack, pace, outputs, left, lambda: self._answers(view), self.options)

    def _answers(self, view: View) -> Answers:
        """What is known of the lengths of answers; made anew only when another has ended."""
        ended = view.answers()
        if self._ended is None or ended is not self._ended.lengths:
            self._ended = Answers(ended)
        return self._ended

    def _worth(self, prompt: Prompt, streams: Streams, chunk: int) -> bool:
        """Waiting for room would make ``prompt`` late, and few streams are to be feared for if it is begun now."""
        seconds = self._seconds(streams.load, min(prompt.left, chunk), len(prompt.entry.ids) - prompt.left)
        if seconds <= streams.room:
            return False
        later = streams.start + streams.wait(seconds)
        return later + prompt.seconds > prompt.due and streams.risk(seconds) < self.options.risk

    # -- the order of prompts -------------------------------------------------------------------------------------

    def _prompts(self, view: View, streams: Streams) -> tuple[list[Prompt], set[int]]:
        """The order of prompts (see ``in_order``): those begun, the first ``CONSIDERED`` that may be on time, and of
        those known to be late, of which there may be many, the first of each priority."""
        now, start = view.now, streams.start
        if now - self._late_since > PREDICT_S:
            self._late, self._late_since = set(), now
        entries = list(view.prefilling)
        levels = set()
        most = len(entries) + min(CONSIDERED, CONSIDERED_A_ROW * max(1, view.free_rows))
        for entry in view.waiting:
            if entry.rid in self._late:
                if entry.request.priority in levels:
                    continue
                levels.add(entry.request.priority)
                most += 1
            entries.append(entry)
            if len(entries) == most:
                break
        prompts = [self._prompt(view, entry, streams.step) for entry in entries]
        order, on_time = in_order(prompts, start, streams.stretch)
        self._late.update([p.entry.rid for p in prompts if start + p.seconds > p.due])
        return order, on_time

    def _prepare(self, view: View) -> None:
        """While all rows are taken: of those next in turn, the first that nothing is known of yet."""
        for entry in view.waiting[:CONSIDERED_A_ROW]:
            if entry.rid not in self._seconds_of:
                self._predicted(view, entry)
                return

    def _predicted(self, view: View, entry: Entry) -> tuple[int, float, float]:
        """Tokens left of a prompt, when predicted, and the seconds it takes by itself."""
        known = self._seconds_of.get(entry.rid)
        fresh = known is not None and view.now - known[1] <= PREDICT_S
        if known is not None and fresh and entry.phase is Phase.WAITING:
            return known
        left = view.uncached(entry)
        if known is None or not fresh or known[0] != left:
            if len(self._seconds_of) > 4 * len(view.waiting) + 100:
                self._seconds_of.clear()
            known = left, view.now, self._prompt_seconds(len(entry.ids) - left, left, view.chunk_tokens)
            self._seconds_of[entry.rid] = known
        return known

    def _prompt(self, view: View, entry: Entry, step: float) -> Prompt:
        left, _, seconds = self._predicted(view, entry)
        due = entry.first_due - self.options.outside_s
        if entry.request.whole:
            # Its last token counts: while it decodes faster than its pace it makes up for a late start.
            answer = entry.limit if self.options.told_lengths else min(self._answers(view).mean, entry.limit)
            due += answer * max(0.0, entry.pace - step)
        elif entry.first_at is not None and entry.due0 < INF:
            due = entry.due0 + entry.pace * len(entry.ids)  # it was preempted, and its next token is due
        return Prompt(due, entry.order, seconds, left, entry)

    def _prompt_seconds(self, prefix: int, left: int, chunk: int) -> float:
        """Steps of a prompt by itself: ``left`` tokens after ``prefix``."""
        seconds = 0.0
        while left > 0:
            take = min(left, chunk)
            seconds += self.cost.seconds(with_chunk(StepLoad(), prefix, take))
            prefix, left = prefix + take, left - take
        return seconds

    def _guarded(self, entries: Sequence[Entry], start: float) -> Entry | None:
        """Who has waited too long and may be started, or gone on with, regardless of the streams."""
        limit = start - self.options.guard_s * GUARD_EARLY
        late = [e for e in entries if e.rid == self._forced or (e.started_at is None and e.queued_at <= limit)]
        if not late or start < self._guard_from:
            return None
        return min(late, key=lambda e: (e.rid != self._forced, e.queued_at))

    def _charge_guard(self, start: float, seconds: float) -> None:
        """The guard has started a prompt that takes so many seconds: when it may start the next."""
        share = self.options.guard_share
        self._guard_paid = max(self._guard_paid, start - self.options.guard_credit_s) + seconds / share
        self._guard_from = max(start + seconds / max(share, GUARD_BURST), self._guard_paid)

    # -- the size of the step -------------------------------------------------------------------------------------

    def _seconds(self, load: StepLoad, tokens: int, prefix: int = 0) -> float:
        """A step with a chunk, and the streams of ``load`` if they decode in it."""
        return self.cost.seconds(with_chunk(load if self.options.mixed else StepLoad(), prefix, tokens))

    def _fill(self, view: View, prompts: list[Prompt], on_time: set[int], streams: Streams, room: float) -> Decision:
        """The first prompts that fit into the step's tokens and into ``room`` seconds; one that is ``on_time`` is not
        to be made late by others in the same step."""
        load = streams.load if self.options.mixed else StepLoad()
        chosen: list[Entry] = []
        tokens, due, most = 0, INF, len(view.prefilling) + view.free_rows
        gap = INF if not view.decoding else self._gap(streams.load)
        for p in prompts:
            take = min(p.left, view.chunk_tokens - tokens)
            if take <= 0 or (chosen and (take < p.left or len(chosen) >= most)):
                break
            prefix = len(p.entry.ids) - p.left
            more = with_chunk(load, prefix, take)
            seconds = self.cost.seconds(more)
            if chosen and (seconds > min(room, gap) or streams.start + seconds > due or p.order not in on_time):
                break
            if seconds > gap:
                take = self._cut(load, prefix, take, gap)
                more = with_chunk(load, prefix, take)
                seconds = self.cost.seconds(more)
            if seconds > min(room, gap):
                break
            load = more
            chosen.append(p.entry)
            tokens += take
            if p.order not in on_time or take < p.left:
                break
            due = min(due, p.due)
        if not chosen:
            return DECODE
        return Decision(chunks=chosen, tokens=tokens, mixed=self.options.mixed)

    def _gap(self, streams: StepLoad) -> float:
        """Most seconds of a step under the bound on the longest gap; inf where no step with a chunk can keep it."""
        bound = self.options.max_gap_s
        if bound is None:
            return INF
        bound *= GAP_MARGIN
        if self.least_gap(streams) > bound:
            return INF
        return bound if self.options.mixed else bound - self.cost.seconds(streams) - self._standing

    def least_gap(self, streams: StepLoad) -> float:
        """Seconds between two tokens of ``streams`` when the smallest chunk is computed in between."""
        seconds = self._seconds(streams, LEAST_CHUNK)
        return seconds if self.options.mixed else seconds + self.cost.seconds(streams)

    def gap_note(self, beside: int = 1) -> str | None:
        """What to say at start of a bound on the gap that even the smallest chunk outlasts, by the step times known."""
        bound = self.options.max_gap_s
        if bound is None:
            return None
        least = self.least_gap(StepLoad(decode_rows=beside, decode_context=beside * LEAST_CHUNK, samples=beside))
        if least <= bound * GAP_MARGIN:
            return None
        streams = "one stream" if beside == 1 else f"{beside} streams"
        return (
            f"the bound of {1000 * bound:.0f} ms on the gap between two tokens cannot be kept while prompts are "
            f"computed: the smallest chunk ({LEAST_CHUNK} tokens) takes {1000 * least:.0f} ms beside {streams}. "
            f"Prompts go on as if there were no bound; one of {1000 * least / GAP_MARGIN:.0f} ms or more could be kept"
        )

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


def _first_slack(entry: Entry, start: float) -> float:
    """Seconds after ``start`` at which the second token of a stream is due whose first is in flight until then."""
    if entry.request.whole:
        return entry.first_due + 2 * entry.pace - start
    return entry.pace if start <= entry.first_due < INF else INF


def with_chunk(load: StepLoad, prefix: int, tokens: int) -> StepLoad:
    """``load`` and one more chunk of ``tokens`` after ``prefix``, which samples."""
    return StepLoad(
        decode_rows=load.decode_rows,
        decode_context=load.decode_context,
        verify=load.verify,
        chunk_rows=load.chunk_rows + 1,
        chunk_tokens=load.chunk_tokens + tokens,
        chunk_prefix=load.chunk_prefix + prefix,
        chunk_pairs=load.chunk_pairs + tokens * (prefix + tokens / 2),
        samples=load.samples + 1,
    )
