"""One simulated server: the real scheduler, memory and step loop over an executor that knows how long steps take."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from k3stack.executor.modelled.executor import ModelledExecutor, ModelledStep
from k3stack.memory import Memory
from k3stack.scheduler.loop import StepLoop
from k3stack.scheduler.request import Event, Request
from k3stack.scheduler.scheduler import Scheduler
from k3stack.scheduler.seams import Executor
from k3stack.simulator.events import EventQueue


class SimServer:
    """Runs its step loop on the event queue: it wakes when its oldest step ends, and when work arrives."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        memory: Memory,
        executor: ModelledExecutor,
        events: EventQueue,
        deliver: Callable[[SimServer, list[Event]], None],
        *,
        check_every: int = 0,
    ) -> None:
        """``deliver`` takes what the scheduler reports; ``check_every``: steps between checks (0: never)."""
        self.name = name
        self.scheduler = scheduler
        self.memory = memory
        # The modelled executor takes only its own handles, as every executor does.
        self.loop = StepLoop(scheduler, cast(Executor, executor))
        self.executor = executor
        self._events = events
        self._deliver = deliver
        self._check_every = check_every
        self._waiting_for: ModelledStep | None = None
        self.outstanding = 0
        """Requests accepted and not ended: what a router sees."""
        self.steps = 0
        self.peak_running = 0

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self.outstanding += 1
        self.scheduler.submit(request)
        self._go()

    def abort(self, rid: str) -> None:
        self.scheduler.abort(rid)
        self._go()

    def _go(self) -> None:
        """Plan what may be in flight, hand out events, and wake at the end of the oldest step."""
        self.loop.launch()
        events = self.scheduler.take_events()
        if events:
            self._deliver(self, events)
        flights = self.loop.flights
        if flights and self._waiting_for is None:
            oldest = flights[0]
            assert isinstance(oldest, ModelledStep)
            self._waiting_for = oldest
            self._events.at(oldest.finish, self._land)

    def _land(self) -> None:
        self._waiting_for = None
        self.loop.land()
        self.steps += 1
        running = self.scheduler.running
        if running > self.peak_running:
            self.peak_running = running
        if self._check_every and self.steps % self._check_every == 0:
            self.scheduler.check()
        self._go()
