"""The policy interface: what a policy sees (``View``) and what it says (``Decision``).

A policy says what it *wants*; whether there is memory for it is found out afterwards. Refused by memory, a waiting
request waits and a chunk or decode row sits a step out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from k3stack.estimate.work import StepLoad
from k3stack.scheduler.request import Entry
from k3stack.scheduler.rows import Schedules


class View(Protocol):
    """The scheduler's state before a step. Read-only; valid during ``decide`` alone."""

    @property
    def now(self) -> float: ...

    @property
    def waiting(self) -> Sequence[Entry]:
        """Not started or preempted, by rank."""
        ...

    @property
    def prefilling(self) -> Sequence[Entry]:
        """Started, prompt not yet planned to its end, by rank."""
        ...

    @property
    def decoding(self) -> int:
        """Rows past their prompt that still have tokens to plan."""
        ...

    @property
    def starting(self) -> Collection[Entry]:
        """Streams whose first token is in flight."""
        ...

    def schedules(self) -> Schedules:
        """Of the streams. ``starting`` ones have no deadline yet, and those have none any more whose first token came
        too late for their target."""
        ...

    @property
    def context(self) -> int:
        """Lengths of all streams together."""
        ...

    def uncached(self, entry: Entry) -> int:
        """Prompt tokens that ``entry`` would have to compute, or has still to. For a waiting one memory is asked
        once in a while only."""
        ...

    def answers(self) -> npt.NDArray[np.int64]:
        """Output tokens of the requests that ended by themselves lately, ascending."""
        ...

    @property
    def free_rows(self) -> int: ...

    @property
    def could_start(self) -> bool:
        """False: nobody waits, or all rows are taken and the first in the queue outranks none of them."""
        ...

    @property
    def chunk_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step should be."""

    chunks: Iterable[Entry] = ()
    """Requests to compute prompt tokens of, best first. Consumed lazily (so it must not read the view's lists, which
    change meanwhile), until ``tokens`` are taken or a waiting one is refused by memory: then only those already
    prefilling go on, so that nobody overtakes it."""
    tokens: int = 0
    """Most prompt tokens in this step."""
    mixed: bool = False
    """Decode rows run in the same step as chunks. False: decode runs only if no chunk does."""
    decode: bool = True
    """False: no decode in this step even if no chunk runs."""


class Policy(Protocol):
    """Plans one step at a time.

    One that with nobody waiting and no prompt under way decodes, and keeps no account of having been asked, says so
    with an attribute ``decodes_alone`` that is true: a simulator may then skip through such steps.
    """

    def decide(self, view: View) -> Decision: ...


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that is told what became of its decisions, in the order of the plans."""

    def planned(self, load: StepLoad, now: float) -> None:
        """A plan with ``load`` goes to the executor."""
        ...

    def observed(self, seconds: float | None, now: float) -> None:
        """The oldest plan in flight has come back after so many seconds on the device; None: it failed."""
        ...

    def skipped(self, loads: Sequence[StepLoad], since: float) -> None:
        """A simulator has left out steps while nothing but streams was there: now ``loads`` are in flight, and the
        oldest of them began at ``since``."""
        ...

    def forget(self) -> None:
        """Plans in flight will not come back."""
        ...
