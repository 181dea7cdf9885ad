"""What steps cost: an executor that passes everything through and keeps count of durations by kind of step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from k3stack.engine.step_log import StepLog
from k3stack.scheduler.plan import StepPlan, StepResult
from k3stack.scheduler.seams import Executor, StepHandle

Kind = Literal["prefill", "decode", "mixed", "idle"]
RECENT = 256
"""Steps of each kind that percentiles are taken over."""


@dataclass(slots=True)
class _Tally:
    steps: int
    seconds: float
    rows: int
    """Rows computed, over all steps."""
    recent: deque[float]


class ObservedExecutor:
    """An ``Executor`` around another one. ``stats`` is json-able: seconds as the executor reports them.

    ``log``: every step goes there as well (``StepLog``).
    """

    def __init__(self, inner: Executor, log: StepLog | None = None) -> None:
        self.inner = inner
        self._log = log
        self._kinds: dict[int, tuple[Kind, int]] = {}
        self._tallies: dict[Kind, _Tally] = {}
        self._failed = 0

    @property
    def max_in_flight(self) -> int:
        return self.inner.max_in_flight

    def submit(self, plan: StepPlan) -> StepHandle:
        handle = self.inner.submit(plan)
        self._kinds[plan.step] = _kind(plan)
        if self._log is not None:
            self._log.submitted(plan)
        return handle

    def masks(self, step: int, masks: Mapping[int, bytes]) -> None:
        self.inner.masks(step, masks)

    def ready(self, handle: StepHandle) -> bool:
        return self.inner.ready(handle)

    def wait(self, handle: StepHandle) -> StepResult:
        result = self.inner.wait(handle)
        kind, rows = self._kinds.pop(result.step)
        if self._log is not None:
            self._log.finished(result)
        if result.error is not None:
            self._failed += 1
            return result
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._tallies[kind] = _Tally(0, 0.0, 0, deque(maxlen=RECENT))
        tally.steps += 1
        tally.rows += rows
        tally.seconds += result.seconds
        tally.recent.append(result.seconds)
        return result

    def close(self) -> None:
        self.inner.close()
        if self._log is not None:
            self._log.close()

    def stats(self) -> dict[str, Any]:
        """By kind of step: how many, their seconds in all, rows in all, and percentiles of the latest."""
        found: dict[str, Any] = {"failed": self._failed}
        for kind, tally in self._tallies.items():
            recent = sorted(tally.recent)
            found[kind] = {
                "steps": tally.steps,
                "seconds": tally.seconds,
                "rows": tally.rows,
                "p50_s": recent[len(recent) // 2],
                "p99_s": recent[int(len(recent) * 0.99)],
                "last_s": tally.recent[-1],
            }
        return found


def _kind(plan: StepPlan) -> tuple[Kind, int]:
    chunks = decodes = 0
    for group in plan.groups:
        decodes += len(group.decode)
        for work in group.work:
            if work.ids is None:
                decodes += 1
            else:
                chunks += 1
    kind: Kind = "mixed" if chunks and decodes else "prefill" if chunks else "decode" if decodes else "idle"
    return kind, chunks + decodes
