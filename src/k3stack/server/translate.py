"""From request fields to the engine's terms: sampling parameters, the thinking switch, stop strings, limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from k3stack.config.sampling import SamplingParams
from k3stack.errors import UserError
from k3stack.server.fields import ChatRequest, CompletionRequest, SamplingFields
from k3stack.server.http_errors import NotFound

Effort = Literal["low", "high", "max"]

EFFORTS: dict[str, Effort | None] = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""Every level that clients send -> the three that Kimi-K3 knows; None: no thinking."""

LONGEST_STOP = 256
LONGEST_RID = 128
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


def sampling(
    request: SamplingFields,
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
    if not -(2**31) <= request.priority < 2**31:
        raise UserError(f"priority is {request.priority}; it must fit into 32 bits", param="priority")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=temperature if request.temperature is None else request.temperature,
        top_p=top_p if request.top_p is None else request.top_p,
        top_k=request.top_k,
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
        if not (key.isascii() and key.isdigit()) or int(key) >= vocab:
            raise UserError(
                f"logit_bias has the key {key!r}; keys are token ids from 0 to {vocab - 1}", param="logit_bias"
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


def thinking(request: ChatRequest) -> tuple[bool, Effort | None]:
    """Whether the model thinks, and how hard (None: the model's default). An 'off' anywhere wins."""
    template, switch, router = request.chat_template_kwargs, request.thinking, request.reasoning
    levels: list[tuple[str, str]] = []
    off = False
    if template is not None:
        off |= template.thinking is False or template.enable_thinking is False
        if not template.preserve_thinking:
            raise UserError(
                "chat_template_kwargs.preserve_thinking false is not supported: leave reasoning_content out of the "
                "messages where it should not be seen",
                param="chat_template_kwargs.preserve_thinking",
            )
        if template.thinking_effort is not None:
            levels.append(("chat_template_kwargs.thinking_effort", template.thinking_effort))
    if switch is not None:
        _one_of(switch.type, ("enabled", "disabled", "adaptive"), "thinking.type")
        if switch.keep is not None:
            _one_of(switch.keep, ("all",), "thinking.keep")
        off |= switch.type == "disabled"
        if switch.effort is not None:
            levels.append(("thinking.effort", switch.effort))
    if router is not None:
        if router.exclude:
            raise UserError("reasoning.exclude is not supported: ignore reasoning_content", param="reasoning.exclude")
        off |= router.enabled is False
        if router.effort is not None:
            levels.append(("reasoning.effort", router.effort))
    if request.reasoning_effort is not None:
        levels.append(("reasoning_effort", request.reasoning_effort))
    efforts = [effort_of(level, name) for name, level in levels]
    if off or None in efforts:
        return False, None
    return True, efforts[0] if efforts else None


def effort_of(level: str, param: str) -> Effort | None:
    """One of Kimi-K3's levels; None: no thinking."""
    if level not in EFFORTS:
        raise UserError(f"{param} is {level!r}; it must be one of {', '.join(EFFORTS)}", param=param)
    return EFFORTS[level]


def _one_of(value: str, allowed: tuple[str, ...], param: str) -> None:
    if value not in allowed:
        raise UserError(f"{param} is {value!r}; it must be one of {', '.join(allowed)}", param=param)


def request_id(rid: str | None, fresh: str) -> str:
    """The client's id for the request, checked, or a fresh one."""
    if rid is None:
        return fresh
    if not 0 < len(rid) <= LONGEST_RID or not rid.isprintable():
        raise UserError(f"rid must have 1 to {LONGEST_RID} printable characters", param="rid")
    return rid


def call_number(messages: list[Any]) -> int:
    """First number of this answer's tool-call ids (``name:N``): unique in the conversation, even in a trimmed one."""
    count, largest = 0, -1
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            count += 1
            number = str(call.get("id", "")).rpartition(":")[2] if isinstance(call, dict) else ""
            if number.isascii() and number.isdigit() and len(number) < 10:
                largest = max(largest, int(number))
    return max(count, largest + 1)
