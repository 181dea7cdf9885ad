"""The seams that scheduling runs against: ``Executor``, ``Clock`` and, of ``memory``, what it uses.

The torch executor runs the network, the modelled one asks the estimate how long the step would take, the scripted
one does what a test says. The scheduler cannot tell them apart, so what is simulated is what serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from k3stack.estimate.pools import PoolPlan
from k3stack.memory.ops import Op
from k3stack.scheduler.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A step in flight."""

    @property
    def step(self) -> int: ...


class Executor(Protocol):
    """Runs plans in order. At most ``max_in_flight`` submitted plans may be waiting for their result."""

    @property
    def max_in_flight(self) -> int: ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start (or queue) a step; returns at once. Steps run in the order submitted."""
        ...

    def masks(self, step: int, masks: Mapping[int, bytes]) -> None:
        """Allowed-token bit masks (little-endian bits, ceil(vocab / 8) bytes) by row, for the rows of ``step`` whose
        work is ``masked``. Must be called before ``wait`` for such a step. Empty: anything goes, since the request has
        ended and the token will be dropped."""
        ...

    def ready(self, handle: StepHandle) -> bool:
        """True when ``wait`` would return without blocking."""
        ...

    def wait(self, handle: StepHandle) -> StepResult:
        """Block until the step is done. Handles are waited for in the order submitted."""
        ...

    def close(self) -> None:
        """Free workers and memory; no plan may be in flight."""
        ...


class Clock(Protocol):
    """Time in seconds. Wall time is read only by engine, server, workload and the torch executor."""

    def now(self) -> float: ...

    def sleep_until(self, t: float) -> None: ...


class Found(Protocol):
    """How much of a prompt could be reused now."""

    @property
    def cached(self) -> int: ...


class Opened(Protocol):
    """A row may begin: its state block, the pages of the reused prefix of ``cached`` tokens, and the copies."""

    @property
    def state_block(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def cached(self) -> int: ...

    @property
    def ops(self) -> Sequence[Op]: ...


class Extended(Protocol):
    """Pages that join a row's table."""

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def ops(self) -> Sequence[Op]: ...


class RowMemory(Protocol):
    """What scheduling uses of ``memory.Memory``; ``seq`` is the row number. See there for the contracts."""

    @property
    def plan(self) -> PoolPlan: ...

    @property
    def available_tokens(self) -> int:
        """Tokens of pages that are free or evictable."""
        ...

    def lookup(self, ids: Sequence[int]) -> Found: ...

    def open(self, seq: int, ids: Sequence[int]) -> Opened | None: ...

    def extend(self, seq: int, length: int) -> Extended | None: ...

    def advance(self, seq: int, ids: Sequence[int], length: int) -> Sequence[Op]: ...

    def cut(self, seq: int, start: int, end: int) -> int: ...

    def snapshot(self, seq: int, ids: Sequence[int], length: int) -> Sequence[Op]: ...

    def wants_decode_snapshot(self, seq: int, length: int) -> bool: ...

    def close(
        self, seq: int, ids: Sequence[int], *, state_at: int | None, keep: bool = True, resume: bool = False
    ) -> object: ...

    def check(self) -> None: ...

    def rest(self) -> None: ...

    def flush(self) -> object: ...
