"""``ModelledExecutor``: a device that is only a queue of durations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3stack.errors import BugError
from k3stack.estimate.work import StepLoad
from k3stack.executor.modelled.loads import LoadMeter
from k3stack.memory.ops import CopyState
from k3stack.scheduler.plan import PLAN_VERSION, GroupPlan, GroupResult, RowResult, RowWork, StepPlan, StepResult
from k3stack.scheduler.seams import Clock


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """A step in flight: when it begins and is done on the device, in seconds on the clock."""

    step: int
    start: float
    finish: float
    load: StepLoad
    result: StepResult


class ModelledExecutor:
    """An ``Executor`` whose steps take as long as ``cost(load)`` says, one after the other.

    ``wait`` sleeps on ``clock`` until the step is done, so a virtual clock jumps there; a simulator with several
    servers looks at ``ModelledStep.finish`` instead and comes back then. Every sampled token is ``token``: lengths are
    the workload's business (``max_tokens`` with ``ignore_eos``). ``state_copy_s``: seconds of one copy of a state
    between steps. There are no scores and no log-probabilities.

    ``follow``: sampled tokens are the row's last token plus one instead, so that a conversation's content is a range of
    ids and a returning turn finds its prefix. ``latency``: seconds from a step's start to its result where that is
    longer than the time it occupies the device (a pipeline, whose first stage is free for the next step earlier).
    """

    def __init__(
        self,
        cost: Callable[[StepLoad], float],
        clock: Clock,
        *,
        rows: int,
        max_in_flight: int = 2,
        token: int = 0,
        state_copy_s: float = 0.0,
        follow: bool = False,
        latency: Callable[[StepLoad], float] | None = None,
    ) -> None:
        self.cost = cost
        self.clock = clock
        self.token = token
        self.state_copy_s = state_copy_s
        self.latency = latency
        self._last: npt.NDArray[np.int64] | None = np.zeros(rows, np.int64) if follow else None
        self._done_at = 0.0
        self.busy_s = 0.0
        """Seconds the device has worked."""
        self._max_in_flight = max_in_flight
        self._free_at = 0.0
        self._next = 0
        self._meter = LoadMeter(rows)
        self._tokens: tuple[int, ...] = ()
        self._queue: deque[ModelledStep] = deque()
        self._coming: Sequence[float] = ()

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def submit(self, plan: StepPlan) -> ModelledStep:
        if plan.version != PLAN_VERSION or len(plan.groups) != 1:
            raise BugError(f"plan version {plan.version} with {len(plan.groups)} groups")
        if plan.step != self._next and not plan.reset:
            raise BugError(f"step {plan.step} submitted, {self._next} expected")
        self._next = plan.step + 1
        group = plan.groups[0]
        load = self.load(group)
        seconds = self.cost(load)
        if self.state_copy_s:
            copies = sum(isinstance(op, CopyState) for op in (*group.before, *group.after))
            seconds += copies * self.state_copy_s
        rows = tuple([RowResult(row=w.row, tokens=(self._sampled(w),) if w.sample else ()) for w in group.work])
        result = StepResult(step=plan.step, groups=(GroupResult(tokens=self._tokens, rows=rows),), seconds=seconds)
        start = max(self.clock.now(), self._free_at)
        self._free_at = start + seconds
        self.busy_s += seconds
        through = seconds if self.latency is None else self.latency(load)
        self._done_at = max(self._done_at, start + through)
        step = ModelledStep(plan.step, start, self._done_at, load, result)
        self._queue.append(step)
        return step

    def load(self, group: GroupPlan) -> StepLoad:
        """What ``group`` computes; moves the rows' lengths and last tokens on."""
        meter = self._meter
        before = meter.decode
        load = meter.load(group)
        if group.decode is not before:
            self._tokens = (self.token,) * len(group.decode)
        if group.decode and self._last is not None:
            self._last[meter.index] += 1
            self._tokens = tuple(self._last[meter.index].tolist())
        return load

    def _sampled(self, work: RowWork) -> int:
        """The token sampled after ``work``."""
        if self._last is None:
            return self.token
        self._last[work.row] = (self._last[work.row] if work.ids is None else work.ids[-1]) + 1
        return int(self._last[work.row])

    # -- skipping ahead (a simulator's fast path) ---------------------------------------------------------------------

    def ahead(self, turns: int, cost: Callable[[int, int, int], Sequence[float]]) -> list[float]:
        """When the next ``turns`` steps would be done if each decodes the rows of the last one again.

        ``cost``: (rows, cached tokens of the first step, steps) -> seconds of each. Nothing changes before ``skip``.
        """
        rows = len(self._meter.decode)
        self._coming = cost(rows, int(self._meter.lengths[self._meter.index].sum()), turns)
        times, at = [], self._free_at
        for seconds in self._coming:
            at += seconds
            times.append(at)
        return times

    def skip(self, turns: int) -> list[ModelledStep]:
        """As if ``turns`` of the steps of ``ahead`` had been submitted, and as many of the oldest waited for; returns
        the steps in flight."""
        queue, rows, context = self._queue, len(self._meter.decode), int(self._meter.lengths[self._meter.index].sum())
        keep = len(queue)
        last = queue[-1].step
        for i, seconds in enumerate(self._coming[:turns]):
            start = self._free_at
            self._free_at += seconds
            self.busy_s += seconds
            if i >= turns - keep:
                load = StepLoad(decode_rows=rows, decode_context=context + i * rows, samples=rows)
                if self._last is not None:
                    self._tokens = tuple((self._last[self._meter.index] + (i + 1)).tolist())
                groups = (GroupResult(tokens=self._tokens, rows=()),)
                result = StepResult(step=last + 1 + i, groups=groups, seconds=seconds)
                queue.append(ModelledStep(last + 1 + i, start, self._free_at, load, result))
        while len(queue) > keep:
            queue.popleft()
        self._done_at = self._free_at
        self._meter.lengths[self._meter.index] += turns
        if self._last is not None:
            self._last[self._meter.index] += turns
        self._next += turns
        return list(queue)

    @property
    def stride(self) -> int:
        """How far a row's next token is from its last one."""
        return 0 if self._last is None else 1

    def masks(self, step: int, masks: Mapping[int, bytes]) -> None:
        """A modelled sampler needs none."""

    def ready(self, handle: ModelledStep) -> bool:
        return self.clock.now() >= handle.finish

    def wait(self, handle: ModelledStep) -> StepResult:
        if not self._queue or self._queue[0] is not handle:
            raise BugError(f"step {handle.step} is waited for out of order")
        self._queue.popleft()
        self.clock.sleep_until(handle.finish)
        return handle.result

    def close(self) -> None:
        if self._queue:
            raise BugError(f"closed with {len(self._queue)} plans in flight")
