"""Who is asked: a model in this process, or a server. Both answer chat requests and score given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from k3stack.scheduler.plan import TokenLogprobs
from k3stack.verify.questions import Question

Progress = Callable[[int], None]
AT_ONCE = 64
"""Questions that are open at the same time."""
MAX_TOKENS = 400
"""Of an answer."""


@dataclass(frozen=True)
class Answer:
    """What came back. ``truncated``: it ran into the token limit; ``failure``: the request failed, and how."""

    content: str
    calls: tuple[tuple[str, str], ...]
    truncated: bool = False
    failure: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Scoring:
    """Score ``ids[start:]``. The prefix ``ids[:first]``, if any, is computed beforehand by a request of its own."""

    ids: tuple[int, ...]
    start: int
    first: int = 0


class CannotScoreError(Exception):
    """The target does not return log-probabilities of a prompt; the message says why."""


class Target(Protocol):
    """Answers and scores."""

    @property
    def name(self) -> str: ...

    def ask(self, questions: Sequence[Question], tell: Progress) -> list[Answer]:
        """Answers in the order of ``questions``, asked in that of ``order.Order``, up to ``AT_ONCE`` open at once;
        ``tell`` is called with the number of new answers."""
        ...

    def score(self, work: Sequence[Scoring], top: int) -> list[list[TokenLogprobs]]:
        """For each piece of work one entry a token of ``ids[start:]``. Raises CannotScoreError."""
        ...
