"""What the scheduler is asked to run (``Request``), what it tells (events), and its record of one (``Entry``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

import msgspec

from k3stack.config.sampling import SamplingParams
from k3stack.scheduler.plan import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "rejected", "error"]
Refusal = Literal["queue_full", "too_long", "invalid", "draining"]


class Target(msgspec.Struct, frozen=True):
    """What a request's latency should be: first token within ``first_s`` of arrival, then on average at most
    ``token_s`` a token over the request. Seconds."""

    first_s: float = 2.0
    token_s: float = 0.025


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate (a request with n > 1 is n of these)."""

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Higher goes first; see ``SchedulerOptions.aging_s``."""
    arrival: float | None = None
    """When it came, on the scheduler's clock (None: when it is submitted)."""
    eos_ids: tuple[int, ...] = ()
    """The model's end tokens; ``sampling.stop_token_ids`` come on top, ``sampling.ignore_eos`` leaves these out."""
    delivered: bool = False
    """Cache and state of every prompt token but the last come from elsewhere (a prefill server): starting it takes
    room for all of them and computes the last one only. A preempted one is computed here like any other."""
    masked: bool = False
    """Each token needs a grammar mask computed from the tokens before it."""
    target: Target | None = None
    """None: ``SchedulerOptions.target``. Policies that know no targets do without."""
    whole: bool = False
    """The answer is of use only as a whole (a tool call): it has no deadline for its first token, and n tokens are
    due ``first_s + n * token_s`` after arrival."""


class Times(msgspec.Struct, frozen=True, gc=False):
    """On the scheduler's clock, in seconds; None where it did not come to that."""

    queued: float
    started: float | None
    """First admitted: its first chunk was planned."""
    first_token: float | None
    finished: float


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """New output tokens of a request (a stop id is among them), and scores of its prompt where asked for."""

    rid: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``tokens`` where the request asks for them, else empty."""
    scored: tuple[TokenLogprobs | None, ...] = ()
    """Prompt tokens in order from ``prompt_logprobs_from`` on, in one event or several; None for position 0."""


class FinishEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The one end of a request."""

    rid: str
    reason: FinishReason
    matched_stop: int | str | None = None
    """The stop id or stop string that ended it."""
    message: str = ""
    """Why, for rejected, error and abort."""
    refusal: Refusal | None = None
    """What kind of rejection: ``too_long`` and ``invalid`` will never be accepted, the others may be retried."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were reused when it first started."""
    output_tokens: int
    times: Times


Event = TokenEvent | FinishEvent


class StopHit(NamedTuple):
    """A stop string was completed: the first ``keep`` of the new tokens are emitted, the rest are not."""

    keep: int
    matched: str


class Stopper(Protocol):
    """Told every new token of a request that has stop strings, in order; says when one is complete."""

    def __call__(self, request: Request, new_tokens: Sequence[int]) -> StopHit | None: ...


class Phase(IntEnum):
    """Where an entry is. ``WAITING`` covers those never started and those preempted."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    LAST = 3
    """On a row, every token it may have is planned; only results are awaited."""
    ENDED = 4


class Entry:
    """One live request. ``key`` orders entries: the lowest goes first, the highest is preempted first.

    ``ids`` are the prompt and every output token known so far; it only grows.
    """

    __slots__ = (
        "blocked_at",
        "cached",
        "first_at",
        "first_due",
        "ids",
        "key",
        "limit",
        "mark",
        "order",
        "pace",
        "phase",
        "preempted",
        "prompt_len",
        "queued_at",
        "request",
        "resume_after",
        "rid",
        "row",
        "score_from",
        "special",
        "started_at",
        "stop_ids",
        "stops",
    )

    def __init__(
        self, request: Request, now: float, key: float, order: int, limit: int, target: Target | None = None
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.rid = request.rid
        self.ids: list[int] = list(request.prompt_ids)
        self.prompt_len = len(self.ids)
        self.key = key
        self.order = order
        self.limit = limit
        """Most output tokens it may have."""
        self.phase = Phase.WAITING
        self.row = -1
        self.mark = 0
        """When ``ids`` is at least this long, commit has more to do than to append."""
        self.stop_ids = frozenset((*(() if sampling.ignore_eos else request.eos_ids), *sampling.stop_token_ids))
        self.stops = bool(sampling.stop)
        self.special = request.masked or sampling.logprobs
        """Its decode steps are ``RowWork``, not entries of ``GroupPlan.decode``."""
        self.score_from = sampling.prompt_logprobs_from
        """First prompt position whose score is still to come; None: no scores (any more)."""
        self.queued_at = now if request.arrival is None else request.arrival
        self.started_at: float | None = None
        self.first_at: float | None = None
        target = request.target or target
        self.first_due = self.queued_at + target.first_s if target else math.inf
        """When its first token is due; for one that is of use as a whole, when token 0 would be."""
        self.pace = target.token_s if target else math.inf
        """Seconds a token may take on average."""
        self.cached = 0
        self.preempted = 0
        self.resume_after = -1
        """Plans up to this step may still bring tokens of it; it is not started again before they are back."""
        self.blocked_at = -1
        """``Scheduler`` room count when memory last refused it."""

    @property
    def outputs(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def due0(self) -> float:
        """The next token of a stream whose planned length is n is due at ``due0 + pace * n``; inf: nothing is, for
        want of a target or because the first token came too late for it. Needs ``first_at``."""
        if self.request.whole:
            return self.first_due - (self.prompt_len - 2) * self.pace if self.pace < math.inf else math.inf
        if self.first_at is None or self.first_at > self.first_due or self.pace == math.inf:
            return math.inf
        return self.first_at - (self.prompt_len - 1) * self.pace

    @property
    def final(self) -> int:
        """Length at which its last token has been sampled: the last token itself is never computed."""
        return self.prompt_len + self.limit - 1

    def __lt__(self, other: Entry) -> bool:
        return (self.key, self.order) < (other.key, other.order)

    def __repr__(self) -> str:
        return f"Entry({self.rid!r}, {self.phase.name}, row={self.row}, ids={len(self.ids)})"
