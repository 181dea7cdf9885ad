"""Makes the next ``StepPlan``: asks the policy, finds memory for what it wants, settles what the step leaves behind.

Two phases, in this order. First everything that needs room (rows opened and extended, victims preempted); then, when
nothing can be freed any more, what the step's forward pass makes true: lengths, shareable pages, snapshots. A
snapshot's block must not be given away by an ``open`` in the same plan, nor may a prefix be matched in the plan that
computes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3stack.memory.ops import Op
from k3stack.scheduler.core import Core, Flight
from k3stack.scheduler.draft import Draft, Work
from k3stack.scheduler.loads import step_load
from k3stack.scheduler.plan import GroupPlan, PagesAppend, RowAdd, RowWork, StepPlan
from k3stack.scheduler.policy import Decision, LearningPolicy, Policy, View
from k3stack.scheduler.request import Entry, Phase
from k3stack.scheduler.rules import Rules


class Planner:
    """``plan`` is the only entry; it may be called whenever fewer plans than the executor allows are in flight."""

    def __init__(self, core: Core, policy: Policy, rules: Rules, view: View) -> None:
        self.core = core
        self.policy = policy
        self.rules = rules
        self.view = view
        self.learner = policy if isinstance(policy, LearningPolicy) else None

    def plan(self) -> StepPlan | None:
        core = self.core
        if core.reset and core.flights:
            return None  # the executor has failed; plans behind the failed one must come back first
        plan = self._make(self.policy.decide(self.view))
        if plan is None and not core.flights and core.live:
            plan = self._insist()
        return plan

    def _insist(self) -> StepPlan | None:
        """Nothing runs and nothing will change by itself: go on regardless of what the policy holds back, then
        without what memory keeps for others."""
        core = self.core
        everything = Decision((*core.prefilling, *core.queue), core.options.chunk_tokens, mixed=True)
        plan = self._make(everything)
        if plan is None and core.live:
            for entry in core.running():
                core.preempt(entry)
            core.memory.flush()
            core.counts["rescued"] += 1
            while plan is None and core.live:
                # Alone and with nothing cached the first in the queue starts, or never will and ends.
                plan = self._make(Decision(tuple(core.queue), core.options.chunk_tokens))
        return plan

    def _make(self, decision: Decision) -> StepPlan | None:
        draft = Draft()
        if decision.mixed and decision.decode:
            self._decode(draft)
        if decision.tokens > 0:
            self._chunks(decision, draft)
        if not draft.work and not draft.decode and decision.decode:
            self._decode(draft)
        return self._settle(draft)

    # -- decode ---------------------------------------------------------------------------------------------------

    def _decode(self, draft: Draft) -> None:
        """Every row past its prompt takes one token, but for those that must wait."""
        draft.decode = True
        core = self.core
        due = [core.rows.running[row] for row in core.rows.due()]
        if len(due) > 1:
            due.sort()
        for entry in due:
            row = entry.row
            if row >= 0 and not self._ready(entry, draft):
                draft.skip.add(row)
        for entry in sorted(core.special):
            row = entry.row
            if row < 0:
                continue
            length = int(core.rows.length[row])
            if length < core.rows.horizon[row] or self._ready(entry, draft):
                work = RowWork(row=row, start=length, ids=None, sample=True, masked=entry.request.masked)
                draft.work.append(Work(entry, work, length + 1))

    def _ready(self, entry: Entry, draft: Draft) -> bool:
        """A due row: True when it can take its token, with room for it and the next horizon set."""
        core, rows, row = self.core, self.core.rows, entry.row
        length = int(rows.length[row])
        if length >= entry.final:
            core.last_planned(entry)
            return False
        if length >= rows.room[row] and not self._make_room(entry, length + 1, draft):
            return False
        if length + 1 == rows.snap[row]:
            draft.snapshots.append(entry)
            rows.horizon[row] = length + 1
        else:
            core.set_horizon(entry)
        return True

    def _make_room(self, entry: Entry, length: int, draft: Draft) -> bool:
        """Pages for ``length`` tokens of a running row, preempting whom the rules name."""
        core = self.core
        while (got := core.memory.extend(entry.row, length)) is None:
            victim = self.rules.victim(entry)
            if victim is None:
                core.counts["stalled"] += 1
                return False
            self._preempt(victim, draft)
            self.rules.preempted(victim)
            if victim is entry:
                return False
        if got.pages:
            core.pending.pages.append(PagesAppend(entry.row, tuple(got.pages)))
        core.pending.before.extend(got.ops)
        core.rows.room[entry.row] = -(-length // core.page_tokens) * core.page_tokens
        return True

    def _preempt(self, victim: Entry, draft: Draft) -> None:
        row = victim.row
        self.core.preempt(victim)
        if draft.drop(victim, row):
            self.core.pending.ended.remove(row)

    # -- chunks ---------------------------------------------------------------------------------------------------

    def _chunks(self, decision: Decision, draft: Draft) -> None:
        """Take chunks in the policy's order until the tokens are spent."""
        self.rules.begin_pass()
        left = min(decision.tokens, self.core.options.chunk_tokens)
        least = 1
        for entry in self._candidates(decision):
            if entry.phase is Phase.WAITING:
                taken = self._start(entry, left, draft)
            else:
                taken = self._continue(entry, left, draft)
            left -= taken
            if taken:
                least = self.core.page_tokens  # a last sliver of the step's tokens is not worth a row
            if left < least:
                return

    def _candidates(self, decision: Decision) -> Iterator[Entry]:
        """The policy's order; after the first waiting one that did not start, only those that have started."""
        tried = set()
        for entry in decision.chunks:
            tried.add(entry.rid)
            waiting = entry.phase is Phase.WAITING
            if not waiting and entry.phase is not Phase.PREFILL:
                continue  # preempted since the policy looked, or not a prompt at all
            yield entry
            if waiting and entry.phase is Phase.WAITING:
                break
        for entry in list(self.core.prefilling):
            if entry.rid not in tried and entry.phase is Phase.PREFILL:
                yield entry

    def _continue(self, entry: Entry, left: int, draft: Draft) -> int:
        """The next chunk of a row; returns its tokens, 0 when it has to sit out."""
        start = int(self.core.rows.length[entry.row])
        end = self.rules.chunk_end(entry, start, left)
        if end <= start or (end > self.core.rows.room[entry.row] and not self._make_room(entry, end, draft)):
            return 0
        self._add_chunk(entry, start, end, draft)
        return end - start

    def _start(self, entry: Entry, left: int, draft: Draft) -> int:
        """Admit a waiting entry with its first chunk; returns the chunk's tokens, 0 when it has to wait."""
        core, rules = self.core, self.rules
        alone = not core.rows.running
        if entry.resume_after > core.committed or (entry.blocked_at == core.epoch and not alone):
            return 0
        if not rules.may_start(entry):
            entry.blocked_at = core.epoch
            return 0
        while True:
            taken = self._try_start(entry, left, draft) if core.rows.free else -1
            if taken >= 0:
                return taken
            victim = rules.outranked(entry)
            if victim is None:
                break
            self._preempt(victim, draft)
        if alone:
            return self._start_alone(entry, left, draft)
        entry.blocked_at = core.epoch
        core.counts["admission_waits"] += 1
        return 0

    def _start_alone(self, entry: Entry, left: int, draft: Draft) -> int:
        """Nothing runs and still ``entry`` was refused: without what is cached it starts, or it never will."""
        core = self.core
        core.memory.flush()
        core.counts["rescued"] += 1
        taken = self._try_start(entry, left, draft)
        if taken >= 0:
            return taken
        core.end(
            entry,
            "error",
            message=f"no room for a first chunk of {len(entry.ids):,} tokens although nothing else runs; use a larger "
            "arena (--mem-fraction-static) or smaller chunks (--chunked-prefill-size)",
        )
        return 0

    def _try_start(self, entry: Entry, left: int, draft: Draft) -> int:
        """Tokens of the first chunk; 0 when the step has no tokens left for it, -1 when there is no room."""
        core, memory = self.core, self.core.memory
        row = core.rows.lowest_free
        if entry.request.delivered and not entry.preempted:
            return self._receive(entry, row, draft)
        opened = memory.open(row, self._matchable(entry))
        if opened is None:
            return -1
        core.pending.before.extend(opened.ops)
        end = self.rules.accept(entry, opened.cached, left)
        extended = memory.extend(row, end) if end is not None and end > opened.cached else None
        if extended is None:
            memory.close(row, entry.ids, state_at=opened.cached)
            core.pending.forget(row)
            return 0 if end == opened.cached else -1
        assert end is not None
        core.pending.before.extend(extended.ops)
        core.occupy(entry, opened.cached)
        core.rows.room[row] = -(-end // core.page_tokens) * core.page_tokens
        pages = (*opened.pages, *extended.pages)
        draft.added[row] = self._row_add(entry, opened.state_block, pages, opened.cached)
        self._add_chunk(entry, opened.cached, end, draft)
        return end - opened.cached

    def _receive(self, entry: Entry, row: int, draft: Draft) -> int:
        """Start a request whose prompt was computed elsewhere: room for all of it, and its last token as the chunk."""
        core, memory = self.core, self.core.memory
        known = len(entry.ids)
        opened = memory.open(row, entry.ids[-1:])  # nothing is matched: the rows come from outside
        if opened is None:
            return -1
        core.pending.before.extend(opened.ops)
        extended = memory.extend(row, known)
        if extended is None:
            memory.close(row, entry.ids, state_at=None, keep=False)
            core.pending.forget(row)
            return -1
        core.occupy(entry, known - 1)
        core.rows.room[row] = -(-known // core.page_tokens) * core.page_tokens
        draft.added[row] = self._row_add(entry, opened.state_block, tuple(extended.pages), known - 1)
        core.pending.before.extend(extended.ops)
        self._add_chunk(entry, known - 1, known, draft)
        return 1

    @staticmethod
    def _matchable(entry: Entry) -> list[int]:
        """The tokens whose prefix may be reused: the score of a position needs the position before it computed."""
        if entry.score_from is None:
            return entry.ids
        return entry.ids[: max(entry.score_from, 1)]

    @staticmethod
    def _row_add(entry: Entry, state_block: int, pages: tuple[int, ...], cached: int) -> RowAdd:
        sampling = entry.request.sampling
        outputs = entry.outputs
        counted = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        return RowAdd(
            row=entry.row,
            state_block=state_block,
            pages=pages,
            length=cached,
            sampling=sampling,
            prompt_ids=entry.request.prompt_ids if sampling.repetition_penalty != 1 else (),
            output_ids=tuple(entry.ids[entry.prompt_len :]) if counted else (),
            output_count=outputs,
            eos_ids=tuple(sorted(entry.stop_ids)) if outputs < sampling.min_tokens else (),
        )

    def _add_chunk(self, entry: Entry, start: int, end: int, draft: Draft) -> None:
        ids = entry.ids
        score = entry.score_from
        work = RowWork(
            row=entry.row,
            start=start,
            ids=tuple(ids[start:end]),
            sample=end == len(ids),
            masked=entry.request.masked and end == len(ids),
            score_from=score if score is not None and end >= score else None,
        )
        draft.work.append(Work(entry, work, end))

    # -- what the step makes true ---------------------------------------------------------------------------------

    def _settle(self, draft: Draft) -> StepPlan | None:
        core = self.core
        rows, entries = self._decode_rows(draft)
        if not draft.work and not rows:
            return None
        if self.learner is not None:
            load = step_load(len(rows), core.rows.context(rows), [w.work for w in draft.work])
            self.learner.planned(load, core.clock.now())
        core.rows.step(rows)
        after: list[Op] = []
        for item in draft.work:
            self._settle_work(item, after)
        for entry in draft.snapshots:
            after.extend(core.memory.snapshot(entry.row, entry.ids, int(core.rows.length[entry.row])))
            core.set_horizon(entry)
        if rows:
            core.counts["decode_tokens"] += len(rows)
            self.rules.decoded(len(rows))
        masked = [(w.work.row, w.entry) for w in draft.work if w.work.masked]
        core.flights.append(
            Flight(core.next_step, rows, entries, [(w.entry, w.work.sample) for w in draft.work], masked)
        )
        pending = core.pending
        group = GroupPlan(
            ended=tuple(pending.ended),
            added=tuple(draft.added.values()),
            pages=tuple(pending.pages),
            before=tuple(pending.before),
            decode=rows,
            work=tuple([w.work for w in draft.work]),
            after=tuple(after),
        )
        plan = StepPlan(step=core.next_step, groups=(group,), reset=core.reset)
        pending.ended, pending.pages, pending.before = [], [], []
        core.reset = False
        core.next_step += 1
        return plan

    def _decode_rows(self, draft: Draft) -> tuple[tuple[int, ...], list[Entry]]:
        if not draft.decode:
            return (), []
        rows, entries = self.core.rows.decode_set()
        if draft.skip:
            kept = [i for i, row in enumerate(rows) if row not in draft.skip]
            if len(kept) < len(rows):
                return tuple([rows[i] for i in kept]), [entries[i] for i in kept]
        return rows, entries

    def _settle_work(self, item: Work, after: list[Op]) -> None:
        core, entry, row = self.core, item.entry, item.entry.row
        core.rows.length[row] = item.end
        if item.work.ids is None:
            core.counts["decode_tokens"] += 1
            return
        core.counts["prefill_tokens"] += len(item.work.ids)
        # The snapshot first: its tokens are known, so advancing files it, and from then on it can be evicted.
        after.extend(core.memory.snapshot(row, entry.ids, item.end))
        after.extend(core.memory.advance(row, entry.ids, item.end))
        if item.work.sample:
            core.prompt_planned(entry)
