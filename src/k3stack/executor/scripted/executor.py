"""``ScriptedExecutor``: runs plans on the toy device, and delays, fails or calls back wherever a test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from k3stack.executor.scripted.device import DeviceFault, ToyDevice
from k3stack.scheduler.plan import PLAN_VERSION, GroupResult, StepPlan, StepResult

Boundary = Literal["submit", "ready", "wait"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in a step. Asked for at each boundary of it; see ``ScriptedExecutor``."""

    raises: Exception | None = None
    """Raised from the call itself: the executor is broken."""
    step_error: str | None = None
    """The step fails as a whole."""
    rows: Mapping[int, str] = field(default_factory=dict)
    """Rows that fail, with their messages."""
    delay: bool = False
    """At ``ready``: not yet."""


@dataclass(slots=True)
class _Handle:
    step: int
    plan: StepPlan
    free: tuple[tuple[int, ...], tuple[int, ...]]
    masks: dict[int, bytes] = field(default_factory=dict)


class ScriptedExecutor:
    """An ``Executor`` without network: strict about plans as a device is, and deterministic.

    ``faults(boundary, step)`` is asked at submit, ready and wait of every step, where a test may also abort
    requests. ``free()`` names pages and blocks that nobody owns now: they are poisoned once the plan being
    submitted has run, since no later plan may read what they hold. DeviceFault when a plan is wrong.
    """

    def __init__(
        self,
        device: ToyDevice,
        *,
        max_in_flight: int = 2,
        faults: Callable[[Boundary, int], Fault | None] | None = None,
        free: Callable[[], tuple[Iterable[int], Iterable[int]]] | None = None,
    ) -> None:
        self.device = device
        self._max_in_flight = max_in_flight
        self._faults = faults
        self._free = free
        self._queue: deque[_Handle] = deque()
        self._next = 0
        self._failed = False

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def submit(self, plan: StepPlan) -> _Handle:
        self._fault("submit", plan.step)
        if plan.version != PLAN_VERSION:
            raise DeviceFault(f"plan version {plan.version}; this executor knows {PLAN_VERSION}")
        if not plan.reset and plan.step != self._next:
            raise DeviceFault(f"step {plan.step} submitted, {self._next} expected")
        if len(self._queue) >= self._max_in_flight:
            raise DeviceFault(f"{len(self._queue)} plans are in flight already")
        if len(plan.groups) != 1:
            raise DeviceFault(f"{len(plan.groups)} groups; the toy device is one")
        pages, blocks = self._free() if self._free else ((), ())
        handle = _Handle(plan.step, plan, (tuple(pages), tuple(blocks)))
        self._next = plan.step + 1
        self._queue.append(handle)
        return handle

    def masks(self, step: int, masks: Mapping[int, bytes]) -> None:
        for handle in self._queue:
            if handle.step == step:
                handle.masks.update(masks)
                return
        raise DeviceFault(f"masks for step {step}, which is not in flight")

    def ready(self, handle: _Handle) -> bool:
        fault = self._fault("ready", handle.step)
        return fault is None or not fault.delay

    def wait(self, handle: _Handle) -> StepResult:
        if not self._queue or self._queue[0] is not handle:
            raise DeviceFault(f"step {handle.step} is waited for out of order")
        fault = self._fault("wait", handle.step)
        self._queue.popleft()
        plan = handle.plan
        if plan.reset:
            self._failed = False
            self.device.reset()
        if fault is not None and fault.step_error is not None:
            self._failed = True
            self.device.reset()
        if self._failed:
            message = fault.step_error if fault and fault.step_error else "an earlier step failed"
            return StepResult(step=plan.step, error=message)
        group: GroupResult = self.device.run(plan.groups[0], handle.masks, fault.rows if fault else None)
        self.device.poison(*handle.free)
        return StepResult(step=plan.step, groups=(group,))

    def restart(self) -> None:
        """As a new executor after one broke: nothing in flight, nothing in memory, waiting for a ``reset`` plan."""
        self._queue.clear()
        self.device.reset()
        self._failed = False

    def close(self) -> None:
        if self._queue:
            raise DeviceFault(f"closed with {len(self._queue)} plans in flight")

    def _fault(self, boundary: Boundary, step: int) -> Fault | None:
        fault = self._faults(boundary, step) if self._faults else None
        if fault is not None and fault.raises is not None:
            raise fault.raises
        return fault
