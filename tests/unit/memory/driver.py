"""A scheduler that does anything at any moment, against the twin device: two plans in flight, no policy, no mercy."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from k3stack.estimate.pools import PoolPlan
from k3stack.memory import Memory
from k3stack.memory.ops import CopyPage, SetPage, SetState
from tests.unit.memory.twin import VOCAB, Device, Plan, free_now


@dataclass
class Live:
    """One running request as a scheduler sees it."""

    ids: list[int]
    """Prompt and the outputs known so far."""
    prompt: int
    issued: int
    """Tokens computed once all issued plans have run; the last of them may not be known yet."""
    limit: int


class Driver:
    def __init__(self, plan: PoolPlan, rng: random.Random, **options: object) -> None:
        self.memory = Memory(plan, **options)  # type: ignore[arg-type]
        self.device = Device(plan)
        self.rng = rng
        self.live: dict[int, Live] = {}
        self.flight: deque[tuple[Plan, dict[int, tuple[int, ...]]]] = deque()
        self.waiting: list[tuple[int, ...]] = []
        self.histories = [self._tokens(rng.randint(1, 30)) for _ in range(4)]
        self.rows = 6
        self.pinned: dict[int, set[int]] = {}
        self.held_before: set[int] = set()
        self.operations = 0
        self.finished = 0
        self.depth = rng.choice([1, 2, 2])

    def _tokens(self, n: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCAB) for _ in range(n))

    def prompt(self) -> tuple[int, ...]:
        """A new request: often a history, or the beginning of one, with a little more."""
        rng = self.rng
        if self.waiting and rng.random() < 0.5:
            return self.waiting.pop()
        base = rng.choice(self.histories)
        if rng.random() < 0.3:
            base = base[: rng.randint(0, len(base))]
        return (base + self._tokens(rng.choice([0, 0, 1, 3, 9])))[:60] or self._tokens(1)

    def turn(self) -> None:
        """One plan: anything may end, begin, grow or be computed; then perhaps a result comes in."""
        if self.rng.random() < 0.05:
            self.alone()
        rng, memory, plan = self.rng, self.memory, Plan()
        prompts: dict[int, tuple[int, ...]] = {}
        gone: set[int] = set()
        for row in list(self.live):
            if rng.random() < 0.08 or (self.live[row].issued >= self.live[row].limit and rng.random() < 0.7):
                self._close(row, plan)
                gone.add(row)
        for row in range(self.rows):
            if row not in self.live and row not in gone and rng.random() < 0.4:
                self._open(row, self.prompt(), plan, prompts)
        if rng.random() < 0.05:
            self.operations += 1
            plan.before += memory.compact()
        if rng.random() < 0.01:
            self.operations += 1
            memory.flush()
        if rng.random() < 0.05 and self.live:
            self.operations += 1
            row = rng.choice(list(self.live))
            memory.pin(row)
            self.pinned.setdefault(row, set()).update(memory._rows[row].pages)
        for row in list(self.live):
            if rng.random() < 0.7:
                self._work(row, plan)
        if rng.random() < 0.03 and self.live:
            row = rng.choice(list(self.live))
            if all(row != added[0] for added in plan.added):
                self._close(row, plan)
        for row, start, ids, _ in plan.work:
            end = start + (1 if ids is None else len(ids))
            if end <= self.live[row].prompt or memory.wants_decode_snapshot(row, end):
                self.operations += 1
                plan.after += memory.snapshot(row, self.live[row].ids, end)
        if rng.random() < 0.5:  # not always: it does at once what memory would do when it has to
            memory.check()
        elif rng.random() < 0.5:
            memory.rest()
        self._pins_held(plan)
        if not memory._owed:  # else moves are still to come, out of pages that count as free already
            plan.free_pages, plan.free_blocks = free_now(memory)
        self.flight.append((plan, prompts))
        while len(self.flight) > self.depth or (self.flight and rng.random() < 0.3):
            self._commit()

    def alone(self) -> None:
        """A row that an empty memory would hold gets its room whenever it is the only one."""
        rng, plan, prompts = self.rng, Plan(), {}
        for row in list(self.live):
            self._close(row, plan)
        self.flight.append((plan, {}))
        while self.flight:
            self._commit()
        plan, ids = Plan(), self.prompt()
        length = len(ids) + rng.choice([0, 1, 20])
        if not self.memory.could_open(length):
            return
        self._open(0, ids, plan, prompts)
        assert 0 in self.live, "refused though nothing else runs"
        grown = self.memory.extend(0, length)
        assert grown is not None, "no room to grow though nothing else runs"
        plan.pages.append((0, grown.pages))
        plan.before += grown.ops
        self.memory.check()
        self.flight.append((plan, prompts))

    def _open(self, row: int, ids: tuple[int, ...], plan: Plan, prompts: dict[int, tuple[int, ...]]) -> None:
        self.operations += 2
        looked = self.memory.lookup(ids)
        opened = self.memory.open(row, ids)
        if opened is None:
            self.waiting.append(ids)
            return
        assert opened.cached == looked.cached < len(ids)
        plan.added.append((row, opened.state_block, opened.pages, opened.cached))
        plan.before += opened.ops
        prompts[row] = ids
        self.live[row] = Live(list(ids), len(ids), opened.cached, len(ids) + self.rng.choice([1, 2, 5, 20]))

    def _work(self, row: int, plan: Plan) -> None:
        live, memory = self.live[row], self.memory
        start = live.issued
        if start < len(live.ids):
            end = min(len(live.ids), start + self.rng.choice([1, 2, 5, 16, 64]))
            self.operations += 1
            end = memory.cut(row, start, end)
            assert start < end
            ids: tuple[int, ...] | None = tuple(live.ids[start:end])
        elif start == len(live.ids) and self.flight and start < live.limit:
            end, ids = start + 1, None  # its token is still on its way
        else:
            return
        self.operations += 1
        grown = memory.extend(row, end)
        if grown is None:
            if self.rng.random() < 0.5 and all(row != added[0] for added in plan.added):
                self._close(row, plan, resume=True)
            return
        if grown.pages:
            plan.pages.append((row, grown.pages))
        plan.before += grown.ops
        sample = end >= len(live.ids)
        plan.work.append((row, start, ids, sample))
        live.issued = end

    def _pins_held(self, plan: Plan) -> None:
        """Nothing is moved out of a pinned page, and none counts as free."""
        held = {page for pages in self.pinned.values() for page in pages if page >= 0}
        free, _ = free_now(self.memory)
        assert not held & free
        told = {(op.row, op.index): op.page for op in plan.before if isinstance(op, SetPage)}
        moves = {op.dst: op.src for op in plan.before if isinstance(op, CopyPage)}
        assert not {moves[page] for page in told.values() if page in moves} & self.held_before & held
        self.held_before = held

    def _close(self, row: int, plan: Plan, resume: bool = False) -> None:
        rng = self.rng
        live = self.live.pop(row)
        self.pinned.pop(row, None)
        planned = [start for other, start, *_ in plan.work if other == row]
        live.issued = planned[0] if planned else live.issued
        known = min(live.issued, len(live.ids))
        exact = live.issued <= len(live.ids) and rng.random() < 0.8
        keep = rng.random() < 0.9
        self.operations += 1
        self.memory.close(row, live.ids[:known], state_at=live.issued if exact else None, keep=keep, resume=resume)
        plan.ended.append(row)
        plan.before = [op for op in plan.before if not (isinstance(op, SetPage | SetState) and op.row == row)]
        plan.work = [w for w in plan.work if w[0] != row]
        plan.pages = [p for p in plan.pages if p[0] != row]
        self.finished += 1
        if resume:
            self.waiting.append(tuple(live.ids))
        elif keep and len(live.ids) < 60:
            self.histories[rng.randrange(4)] = tuple(live.ids)

    def _commit(self) -> None:
        plan, prompts = self.flight.popleft()
        tokens = self.device.run(plan, prompts)
        waiting = {row for later, _ in self.flight for row in later.ended} | {
            row for later, _ in self.flight for row, *_ in later.added
        }
        follow: list[object] = []
        for row, start, ids, sample in plan.work:
            live = self.live.get(row)
            if live is None or row in waiting:
                continue
            if sample:
                live.ids.append(tokens[row])
            end = start + (1 if ids is None else len(ids))
            self.operations += 1
            follow += self.memory.advance(row, live.ids, end)
        if follow:
            # They belong to the next plan; nothing else is planned between here and there.
            self.carry(follow)

    def carry(self, ops: list[object]) -> None:
        plan = Plan(before=list(ops))  # type: ignore[arg-type]
        plan.free_pages, plan.free_blocks = set(), set()
        self.flight.append((plan, {}))
