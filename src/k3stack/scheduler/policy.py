"""The policy interface: what a policy sees (``View``) and what it says (``Decision``).

A policy says what it *wants*; whether there is memory for it is found out afterwards. Refused by memory, a waiting
request waits and a chunk or decode row sits a step out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from k3stack.scheduler.request import Entry


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
    def free_rows(self) -> int: ...

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
    """Plans one step at a time."""

    def decide(self, view: View) -> Decision: ...
