"""One simulated server: the real scheduler, memory and step loop over an executor that knows how long steps take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

from k3stack.executor.modelled.executor import ModelledExecutor, ModelledStep
from k3stack.memory import Memory
from k3stack.scheduler.loop import StepLoop
from k3stack.scheduler.request import Event, Request
from k3stack.scheduler.scheduler import Scheduler
from k3stack.scheduler.seams import Executor
from k3stack.simulator.events import EventQueue
from k3stack.simulator.pricing import StepPrice

LEAST_STRETCH = 2
"""Fewer turns are not worth skipping."""


class Receiver(Protocol):
    """Takes what a server reports."""

    def deliver(self, server: SimServer, events: list[Event]) -> None: ...

    def stream(self, server: SimServer, rids: Sequence[str], times: Sequence[float]) -> None:
        """Each of ``rids`` got one more token at each of ``times``."""
        ...


class SimServer:
    """Runs its step loop on the event queue: it wakes when its oldest step ends, and when work arrives.

    Fast path (``price`` given): where the next turns are sure to be nothing but decoding, it sleeps until the last of
    them, and catches up at once: then, or when a request arrives in between. What it does is the same to the byte.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        memory: Memory,
        executor: ModelledExecutor,
        events: EventQueue,
        receiver: Receiver,
        *,
        rank: int = 1,
        check_every: int = 0,
        price: StepPrice | None = None,
    ) -> None:
        """``rank``: number among the servers, from 1; ``check_every``: steps between checks (0: never)."""
        self.name = name
        self.rank = rank
        self.scheduler = scheduler
        self.memory = memory
        # The modelled executor takes only its own handles, as every executor does.
        self.loop = StepLoop(scheduler, cast(Executor, executor))
        self.executor = executor
        self._events = events
        self._receiver = receiver
        self._check_every = check_every
        self._price = None if check_every or executor.max_in_flight != 2 else price
        self._wake: int | None = None
        self._stretch: list[float] = []
        """Ends of the steps that the turns ahead commit, while a stretch is slept through."""
        self.outstanding = 0
        """Requests accepted and not ended: what a router sees."""
        self.steps = 0
        self.peak_running = 0

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self.outstanding += 1
        self.settle()
        self.scheduler.submit(request)
        self._go()

    def abort(self, rid: str) -> None:
        self.settle()
        self.scheduler.abort(rid)
        self._go()

    def settle(self) -> None:
        """Catch up with what the event queue has reached."""
        times = self._stretch
        if not times:
            return
        time, rank = self._events.reached
        turns = bisect_right(times, time) if self.rank < rank else bisect_left(times, time)
        self._stretch = []
        self._skip(times[:turns])
        if turns < len(times):
            assert self._price is not None and self._wake is not None
            self._price.rewind(turns)
            self._events.cancel(self._wake)
            self._wake = self._events.at(times[turns], self._land, self.rank)

    def _skip(self, times: list[float]) -> None:
        """Turns that landed at ``times``."""
        if not times:
            return
        oldest = self.loop.flights[0]
        assert isinstance(oldest, ModelledStep)
        self.scheduler.skip(len(times), oldest.result.groups[0].tokens, self.executor.stride)
        steps = self.executor.skip(len(times))
        self.loop.flights = deque(steps)
        self.scheduler.skipped([step.load for step in steps], times[-1])
        self.steps += len(times)
        self._receiver.stream(self, self.scheduler.decoding_rids, times)

    def _go(self) -> None:
        """Plan what may be in flight, hand out events, and wake at the end of the oldest step."""
        self.loop.launch()
        events = self.scheduler.take_events()
        if events:
            self._receiver.deliver(self, events)
        flights = self.loop.flights
        if flights and self._wake is None:
            oldest = flights[0]
            assert isinstance(oldest, ModelledStep)
            self._wake = self._events.at(self._sleep(oldest.finish), self._land, self.rank)

    def _sleep(self, finish: float) -> float:
        """When to wake: at the end of the oldest step, or of the stretch of turns that are certain."""
        if self._price is None or len(self.loop.flights) < 2:
            return finish
        turns = self.scheduler.turns_ahead()
        if turns < LEAST_STRETCH:
            return finish
        newest = self.loop.flights[1]
        assert isinstance(newest, ModelledStep)
        ends = [finish, newest.finish, *self.executor.ahead(turns, self._price.ahead)]
        self._stretch = ends[:turns]
        return ends[turns]

    def _land(self) -> None:
        self._wake = None
        if self._stretch:
            times, self._stretch = self._stretch, []
            self._skip(times)
        self.loop.land()
        self.steps += 1
        running = self.scheduler.running
        if running > self.peak_running:
            self.peak_running = running
        if self._check_every and self.steps % self._check_every == 0:
            self.scheduler.check()
        self._go()
