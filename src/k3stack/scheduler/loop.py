"""``StepLoop``: the one loop between a scheduler and an executor, used by engine, offline API, tests and simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from k3stack.errors import BugError
from k3stack.scheduler.scheduler import MaskedRow, Scheduler
from k3stack.scheduler.seams import Executor, StepHandle


class MaskSource(Protocol):
    """Computes the allowed-token masks of rows (see ``Executor.masks``) from the tokens each has so far."""

    def __call__(self, rows: Sequence[MaskedRow]) -> Mapping[int, bytes]: ...


class StepLoop:
    """Keeps up to ``executor.max_in_flight`` plans in flight: the next step is planned while the last one runs.

    An exception of the executor ends every request with an error (``Scheduler.fail_all``) and is raised again.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, masks: MaskSource | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.masks = masks
        self.flights: deque[StepHandle] = deque()

    def turn(self) -> bool:
        """Plan and submit as much as may be in flight, then wait for the oldest step and commit it.

        Take requests and aborts in between turns. False: there was nothing to do.
        """
        self.launch()
        if not self.flights:
            return False
        self.scheduler.rest()
        self.land()
        return True

    def launch(self) -> None:
        """Plan and submit while the executor has room and there is something to run."""
        while len(self.flights) < self.executor.max_in_flight:
            plan = self.scheduler.plan()
            if plan is None:
                return
            try:
                handle = self.executor.submit(plan)
            except BaseException as e:
                self._broken(e)
                raise
            self.flights.append(handle)
            if len(self.flights) == 1:
                self._give_masks()

    def land(self) -> None:
        """Wait for the oldest step in flight and commit its result."""
        handle = self.flights.popleft()
        try:
            result = self.executor.wait(handle)
        except BaseException as e:
            self._broken(e)
            raise
        self.scheduler.commit(result)
        if self.flights:
            self._give_masks()

    def run(self) -> None:
        """Turn until nothing is left to do."""
        while self.turn():
            pass

    def _give_masks(self) -> None:
        """The masks of the oldest step in flight: those before it are committed, so each row's last token is known. Its
        forward pass has been running meanwhile; only its sampler waits."""
        wanted, ended = self.scheduler.masked_rows()
        if not wanted and not ended:
            return
        try:
            if wanted and self.masks is None:
                raise BugError(f"request {wanted[0].rid!r} needs grammar masks and the loop has no source of them")
            masks = dict(self.masks(wanted)) if wanted and self.masks is not None else {}
            masks.update((row, b"") for row in ended)
            self.executor.masks(self.flights[0].step, masks)
        except BaseException as e:
            self._broken(e)
            raise

    def _broken(self, error: BaseException) -> None:
        self.flights.clear()
        self.scheduler.fail_all(f"the executor failed: {error}")
