"""From request fields to the engine's terms: sampling parameters, the thinking switch, stop strings, limits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol

from k3stack.chat.settings import Thinking, parse_thinking
from k3stack.config.options import did_you_mean
from k3stack.config.sampling import SamplingParams
from k3stack.errors import UserError
from k3stack.server.fields import ChatRequest, CompletionRequest, Json
from k3stack.server.http_errors import NotFound

TEMPLATE_KEYS = ("thinking", "enable_thinking", "thinking_effort", "preserve_thinking", "force_nonempty_content")
"""What ``chat_template_kwargs`` may hold."""

LONGEST_STOP = 256
LONGEST_RID = 128
LONGEST_ID = 9
"""Digits of a token id, leading zeros included."""
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for at most."""

    context: int
    vocab: int
    max_choices: int
    max_stop_strings: int


def check_model(asked: str | None, served: tuple[str, ...]) -> None:
    """``model`` must be one of the served names; absent or 'default' means the served one."""
    if asked not in (None, "", "default", *served):
        raise NotFound(f"the model {asked!r} is not served here; {served[0]!r} is", param="model")


class ThinkingFields(Protocol):
    """The fields of a request that say whether and how hard to think."""

    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def reasoning(self) -> Json | None: ...
    @property
    def thinking(self) -> bool | Json | None: ...
    @property
    def chat_template_kwargs(self) -> Json | None: ...


class Sampled(Protocol):
    """The fields of a request that become sampling parameters."""

    @property
    def n(self) -> int: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> dict[str, float]: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def stop(self) -> str | list[str]: ...
    @property
    def stop_token_ids(self) -> list[int]: ...
    @property
    def ignore_eos(self) -> bool: ...


def sampling(
    request: Sampled,
    limits: Limits,
    *,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    logprobs: bool,
    top_logprobs: int,
) -> SamplingParams:
    """Sampling parameters with the server's defaults and limits. Raises UserError naming the field."""
    if request.n > limits.max_choices:
        raise UserError(f"n is {request.n}; this server gives at most {limits.max_choices} choices", param="n")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=temperature if request.temperature is None else request.temperature,
        top_p=top_p if request.top_p is None else request.top_p,
        top_k=min(request.top_k, limits.vocab),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=bias(request.logit_bias, limits.vocab),
        seed=None if request.seed is None else request.seed & (2**SEED_BITS - 1),
        stop=stop_strings(request.stop, limits.max_stop_strings),
        stop_token_ids=token_ids(request.stop_token_ids, limits.vocab, "stop_token_ids"),
        ignore_eos=request.ignore_eos,
        n=request.n,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    ).validate()


class TargetFields(Protocol):
    """The fields of a request with its own targets."""

    @property
    def target_ttft_s(self) -> float | None: ...
    @property
    def target_tpot_ms(self) -> float | None: ...


def seconds(milliseconds: float | None) -> float | None:
    """None stays None."""
    return None if milliseconds is None else milliseconds / 1000


def stop_strings(stop: str | list[str], most: int) -> tuple[str, ...]:
    """The ``stop`` field as a tuple without repeats."""
    found = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
    if len(found) > most:
        raise UserError(f"stop has {len(found)} strings; at most {most} are taken", param="stop")
    for text in found:
        if not text:
            raise UserError("stop has an empty string, which would stop at once", param="stop")
        if len(text) > LONGEST_STOP:
            raise UserError(f"a stop string has {len(text)} characters; at most {LONGEST_STOP}", param="stop")
    return found


def token_ids(ids: list[int], vocab: int, param: str) -> tuple[int, ...]:
    """Ids that the model has."""
    for one in ids:
        if not 0 <= one < vocab:
            raise UserError(f"{param} has {one}; the model's ids go from 0 to {vocab - 1}", param=param)
    return tuple(ids)


def bias(raw: dict[str, float], vocab: int) -> dict[int, float]:
    """``logit_bias`` with ids as numbers."""
    found: dict[int, float] = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdigit()) or len(key) > LONGEST_ID or int(key) >= vocab:
            raise UserError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids from 0 to {vocab - 1}", param="logit_bias"
            )
        if not -100.0 <= value <= 100.0:
            raise UserError(f"logit_bias of {key} is {value}; it must be from -100 to 100", param="logit_bias")
        found[int(key)] = value
    return found


def output_limit(request: ChatRequest | CompletionRequest) -> tuple[int | None, str]:
    """The asked-for number of output tokens and the name of its field."""
    if isinstance(request, CompletionRequest):
        return request.max_tokens, "max_tokens"
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise UserError(
            f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; they mean the same, give one of them",
            param="max_completion_tokens",
        )
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def room(prompt_tokens: int, asked: int | None, limits: Limits, param: str, prompt_param: str) -> int:
    """Output tokens the request gets: what it asked for, or what the context leaves. Raises UserError."""
    left = limits.context - prompt_tokens
    if prompt_tokens == 0:
        raise UserError("the prompt is empty", param=prompt_param)
    if left < 1:
        raise UserError(
            f"the prompt has {prompt_tokens} tokens; the context holds {limits.context} with at least one of output: "
            f"{1 - left} too many (--context-length)",
            param=prompt_param,
        )
    if asked is None:
        return left
    if asked > left:
        raise UserError(
            f"{param} is {asked} after a prompt of {prompt_tokens} tokens; the context of {limits.context} leaves "
            f"{left}: lower {param} by {asked - left} or leave it out",
            param=param,
        )
    return asked


def thinking(request: ThinkingFields) -> Thinking:
    """Whether the model thinks, and how hard, from every field that clients use for it."""
    template, switch = dict(request.chat_template_kwargs or {}), request.thinking
    for key, value in template.items():
        if key not in TEMPLATE_KEYS:
            param = f"chat_template_kwargs.{key}"
            raise UserError(f"there is no {param}{did_you_mean(key, TEMPLATE_KEYS)}", param=param)
        if key == "preserve_thinking" and value is not True:
            raise UserError(
                "chat_template_kwargs.preserve_thinking can only be true: leave reasoning_content out of the messages "
                "where it should not be seen",
                param="chat_template_kwargs.preserve_thinking",
            )
    if isinstance(switch, dict) and "keep" in switch:
        if switch["keep"] != "all":
            raise UserError("thinking.keep can only be 'all': earlier thinking is always seen", param="thinking.keep")
        switch = {key: value for key, value in switch.items() if key != "keep"}
    template.pop("force_nonempty_content", None)
    return parse_thinking(
        reasoning_effort=request.reasoning_effort,
        thinking=switch,
        reasoning=request.reasoning,
        chat_template_kwargs=template,
    )


def force_content(request: ChatRequest) -> bool:
    """Whether an answer that never leaves its thinking is given out as content."""
    wanted = (request.chat_template_kwargs or {}).get("force_nonempty_content", False)
    if not isinstance(wanted, bool):
        param = "chat_template_kwargs.force_nonempty_content"
        raise UserError(f"{param} is {wanted!r}; it must be true or false", param=param)
    return wanted


def request_id(rid: str | None, header: str | None, open_ids: tuple[str, ...], prefix: str) -> str:
    """The request's id: the body's ``rid`` (checked), else the header's X-Request-ID if it can be one, else fresh."""
    if rid is not None:
        if not _usable_id(rid):
            raise UserError(f"rid must have 1 to {LONGEST_RID} printable characters", param="rid")
        return rid
    if header is not None and _usable_id(header) and header not in open_ids:
        return header
    return fresh(prefix)


def fresh(prefix: str) -> str:
    """``prefix`` and 24 hexadecimal digits."""
    return prefix + secrets.token_hex(12)


def _usable_id(text: str) -> bool:
    return 0 < len(text) <= LONGEST_RID and text.isascii() and text.isprintable()
