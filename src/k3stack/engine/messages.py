"""Messages between the HTTP process and the engine process: msgpack over zmq, one tagged struct a message.

Client to engine: ``Submit``, ``Abort``, ``StatsRequest``, ``Flush``, ``Drain``, ``Shutdown``.
Engine to client: ``Ready`` once, then ``Outputs`` (everything one turn produced, in one message), the answers
``Stats``, ``Flushed``, ``Drained``, and at its end ``Stopped`` (asked to) or ``Died`` (something broke).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from k3stack.chat.settings import OutputGrammar
from k3stack.config.sampling import SamplingParams
from k3stack.errors import CheckpointError, DoesNotFit, UserError
from k3stack.scheduler.plan import TokenLogprobs

USER_ERRORS: dict[str, type[UserError]] = {
    "UserError": UserError,
    "CheckpointError": CheckpointError,
    "DoesNotFit": DoesNotFit,
}
"""Errors of the user's making that a starting engine reports, by ``Died.kind``."""
FinishReason = Literal["stop", "length", "abort", "rejected", "error"]


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One request. ``sampling.n`` choices come back under the same ``rid``."""

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Higher runs earlier."""
    stop_scope: Literal["text", "content"] = "text"
    """Where stop strings are looked for: in the raw decoded text, or in the visible content alone."""
    thinking: bool = False
    """The prompt leaves the model inside its thinking (needed to tell content from reasoning)."""
    grammar: OutputGrammar | None = None
    """What the output must match; see ``chat.grammar``."""
    first_token_target_s: float | None = None
    token_target_s: float | None = None
    """What policy ``slo`` plans for, in place of its own target (None)."""
    whole: bool = False
    """The answer is of use only when it is complete: nobody waits for its first token."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End ``rid`` now, whatever it is doing; unknown or ended requests are ignored."""

    rid: str


class StatsRequest(msgspec.Struct, frozen=True, tag="stats"):
    """Ask for ``Stats`` with the same number."""

    number: int


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Drop every cached prefix that nothing uses; answered by ``Flushed`` with the same number."""

    number: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new requests, finish the running ones, then answer ``Drained``."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Abort what runs and exit."""


class Times(msgspec.Struct, frozen=True, array_like=True):
    """Moments of one request in seconds of the machine's monotonic clock; None: never reached."""

    queued: float
    started: float | None
    first_token: float | None
    finished: float


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one choice of a request produced since the last ``Output``; the last one has a ``finish_reason``."""

    rid: str
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token of ``token_ids``, where asked for."""
    scored: tuple[TokenLogprobs | None, ...] = ()
    """Log-probabilities of prompt tokens, from ``prompt_logprobs_from`` on, as they become known."""
    tail: str = ""
    """Text to show after ``token_ids``: the visible beginning of a token inside which a stop string begins."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    message: str | None = None
    """Why a request was rejected or failed."""
    refusal: str | None = None
    """The scheduler's kind of rejection (``FinishEvent.refusal``); it decides on the HTTP status."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose state and cache rows were reused. This and the next two come with ``finish_reason``."""
    output_tokens: int = 0
    """Tokens sampled, those of a matched stop string included."""
    times: Times | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything one turn of the engine produced."""

    items: tuple[Output, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is up. ``info``: model facts, limits, pools predicted and actual; json-able."""

    info: dict[str, Any]


class Stats(msgspec.Struct, frozen=True, tag="stats_reply"):
    """Gauges and counters of scheduler and memory; json-able."""

    number: int
    values: dict[str, Any]


class Flushed(msgspec.Struct, frozen=True, tag="flushed"):
    """Whether the cache could be dropped (False: requests are running on it)."""

    number: int
    done: bool


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Nothing runs or waits any more, and nothing new is taken."""


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """The watchdog's report: one turn of the engine has lasted ``seconds`` and has not ended."""

    seconds: float


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine ends because it was asked to (``Shutdown``, or SIGTERM after draining)."""

    reason: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine ends because something broke."""

    message: str
    kind: Literal["UserError", "CheckpointError", "DoesNotFit"] | None = None
    """Settings or files are at fault (the error's class): starting it again won't help."""
    param: str | None = None


ToEngine = Submit | Abort | StatsRequest | Flush | Drain | Shutdown
FromEngine = Outputs | Ready | Stats | Flushed | Drained | Stuck | Stopped | Died

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as msgpack."""
    return _ENCODER.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError when the bytes are not a message for the engine."""
    return _TO_ENGINE.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.DecodeError when the bytes are not a message of the engine."""
    return _FROM_ENGINE.decode(data)
