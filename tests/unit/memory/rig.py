"""Rows driven by hand, one plan at a time, against the twin device."""

from __future__ import annotations

from typing import Any

from k3stack.estimate.pools import PoolPlan
from k3stack.memory import Memory, Opened
from k3stack.memory.ops import Op
from tests.unit.memory.twin import Device, Plan, free_now, sampled


class Rig:
    """Each method is one plan, executed at once and checked by the device."""

    def __init__(self, plan: PoolPlan, **options: Any) -> None:
        self.memory = Memory(plan, **options)
        self.device = Device(plan)
        self.ids: dict[int, list[int]] = {}
        self.at: dict[int, int] = {}
        self.ops: list[Op] = []
        """Every operation so far."""

    def _run(self, plan: Plan) -> None:
        self.memory.check()
        plan.free_pages, plan.free_blocks = free_now(self.memory)
        self.ops += plan.before + plan.after
        self.device.run(plan, {row: tuple(ids) for row, ids in self.ids.items()})

    def open(self, row: int, ids: tuple[int, ...]) -> Opened | None:
        opened = self.memory.open(row, ids)
        if opened is not None:
            self.ids[row], self.at[row] = list(ids), opened.cached
            self._run(Plan(added=[(row, opened.state_block, opened.pages, opened.cached)], before=list(opened.ops)))
        return opened

    def compute(self, row: int, end: int, *, snapshot: bool = True, advance: bool = True) -> bool:
        """Tokens up to ``end`` in one chunk; past the known ones the sampled one. False: no room."""
        grown = self.memory.extend(row, end)
        if grown is None:
            return False
        ids = self.ids[row]
        if end > len(ids):
            assert end == len(ids) + 1
            ids.append(sampled(tuple(ids)))
        plan = Plan(before=list(grown.ops), pages=[(row, grown.pages)] if grown.pages else [])
        plan.work = [(row, self.at[row], tuple(ids[self.at[row] : end]), False)]
        if snapshot:
            plan.after += self.memory.snapshot(row, ids, end)
        self.at[row] = end
        self._run(plan)
        if advance:
            self.apply(self.memory.advance(row, ids, end))
        return True

    def apply(self, ops: tuple[Op, ...]) -> None:
        """A plan of operations alone."""
        if ops:
            self._run(Plan(before=list(ops)))

    def close(self, row: int, *, exact: bool = True, **how: Any) -> None:
        self.memory.close(row, self.ids[row], state_at=self.at[row] if exact else None, **how)
        self._run(Plan(ended=[row]))

    def serve(self, ids: tuple[int, ...], outputs: int = 3, *, chunk: int = 1 << 30, row: int = 0) -> int:
        """A whole request; returns the tokens it reused. Its ids with the outputs are in ``ids[row]``."""
        opened = self.open(row, ids)
        assert opened is not None, "refused"
        while self.at[row] < len(ids):
            end = self.memory.cut(row, self.at[row], min(len(ids), self.at[row] + chunk))
            assert self.compute(row, end)
        for _ in range(outputs):
            assert self.compute(row, self.at[row] + 1)
        self.close(row)
        return opened.cached
