"""Request bodies: every field is implemented, has only the value it has here anyway, or is refused by name.

Fields whose value is null are taken as absent, which is what clients mean by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from k3stack.config.options import did_you_mean
from k3stack.errors import UserError

Json = dict[str, Any]
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number that messages to the engine can hold."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What OpenAI's two endpoints share. Ranges are checked by SamplingParams."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Whole = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    min_tokens: Whole = 0
    ignore_eos: bool = False
    priority: Priority = 0
    target_ttft_s: Seconds | None = None
    """Targets of this request, in place of the server's; policy slo plans by them, /metrics counts who met them."""
    target_tpot_ms: Seconds | None = None
    rid: str | None = None
    user: str | None = None
    metadata: Json | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: a last frame with usage. ``continuous_usage_stats``: usage in every frame."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions. ``messages`` and ``tools`` are checked where they are rendered."""

    messages: list[Json]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool = True
    response_format: Json | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Whole = 0
    reasoning_effort: str | None = None
    reasoning: Json | None = None
    thinking: bool | Json | None = None
    chat_template_kwargs: Json | None = None
    continue_final_message: bool = False
    regex: str | None = None
    ebnf: str | None = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """A list holds texts, or the ids of one prompt, or lists of ids; not a mixture."""
    max_tokens: Whole = 16
    echo: bool = False
    logprobs: Whole | None = None
    skip_special_tokens: bool = True
    response_format: Json | None = None
    regex: str | None = None
    ebnf: str | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """A field that may only say what is so anyway."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Fields of a body that its struct does not have."""

    fixed: Mapping[str, Fixed]
    refused: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)


_SHARED_FIXED = {
    "store": Fixed((False,), "nothing is stored"),
    "service_tier": Fixed(("auto", "default"), "there is one tier"),
    "return_hidden_states": Fixed((False,), "hidden states are not returned"),
    "return_routed_experts": Fixed((False,), "the router's choices are not returned"),
    "return_token_ids": Fixed((False,), "token ids are returned by /generate"),
    "return_meta_info": Fixed((False,), "use /generate"),
    "return_cached_tokens_details": Fixed((False,), "usage counts cached tokens"),
    "no_stop_trim": Fixed((False,), "a matched stop string is not part of the text"),
    "spaces_between_special_tokens": Fixed((False, True), "control tokens are not part of the text"),
    "use_beam_search": Fixed((False,), "beam search is not served; `n` samples several choices"),
    "length_penalty": Fixed((1, 1.0), "beam search is not served"),
    "detokenize": Fixed((True,), "token ids are returned by /generate"),
    "truncate_prompt_tokens": Fixed((), "shorten the prompt before sending it"),
    "allowed_token_ids": Fixed((), "use logit_bias"),
    "bad_words": Fixed((), "use logit_bias"),
    "typical_p": Fixed((1, 1.0), "use top_p"),
    "data_parallel_rank": Fixed((0,), "this server has one rank"),
    "routed_dp_rank": Fixed((0,), "this server has one rank"),
    "lora_path": Fixed((), "adapters are not served"),
    "session_params": Fixed((), "send the whole conversation: its prefix is reused"),
    "custom_logit_processor": Fixed((), "code is not taken from requests; use logit_bias"),
    "custom_params": Fixed((), "code is not taken from requests"),
    "bootstrap_host": Fixed((), "this server does prefill and decoding itself"),
    "bootstrap_port": Fixed((), "this server does prefill and decoding itself"),
    "bootstrap_room": Fixed((), "this server does prefill and decoding itself"),
    "cache_salt": Fixed((), "every client shares one prefix cache"),
    "extra_key": Fixed((), "every client shares one prefix cache"),
}

CHAT_RULES = FieldRules(
    fixed={
        **_SHARED_FIXED,
        "separate_reasoning": Fixed((True,), "reasoning has a field of its own always"),
        "stream_reasoning": Fixed((True,), "reasoning is streamed as it comes"),
        "skip_special_tokens": Fixed((True,), "control tokens are never part of a chat's answer; use /generate"),
        "add_generation_prompt": Fixed((True,), "use continue_final_message to go on with the last message"),
        "include_reasoning": Fixed((True,), "reasoning has a field of its own always"),
        "modalities": Fixed((["text"],), "only text is generated"),
        "verbosity": Fixed(("medium",), "say in the messages how long the answer should be"),
        "echo": Fixed((False,), "use /v1/completions"),
        "input_ids": Fixed((), "use /generate"),
        "suffix": Fixed((), "the model does not fill in the middle"),
    },
    refused={
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "only text is generated",
        "prediction": "predicted outputs are not used",
        "web_search_options": "declare a tool that searches",
        "mm_processor_kwargs": "images are not read",
        "documents": "put them into a message",
        "chat_template": "Kimi-K3's prompt format is built in",
        "prompt": "use /v1/completions",
    },
)

COMPLETION_RULES = FieldRules(
    fixed={
        **_SHARED_FIXED,
        "best_of": Fixed((1,), "use n"),
        "suffix": Fixed(("",), "the model does not fill in the middle"),
        "add_special_tokens": Fixed((True, False), "nothing is added to a prompt"),
    },
    refused={
        "messages": "use /v1/chat/completions",
        "tools": "use /v1/chat/completions",
        "max_completion_tokens": "use max_tokens",
    },
)

Body = TypeVar("Body", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")


def decode(body: bytes, kind: type[Body], rules: FieldRules) -> Body:
    """A JSON body as ``kind``. Raises UserError whose ``param`` is the field at fault."""
    return convert(decode_json(body), kind, rules)


def decode_json(body: bytes) -> Json:
    """A JSON object, or UserError."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UserError(f"the body is not valid JSON: {e}") from None
    if not isinstance(raw, dict):
        raise UserError(f"the body must be a JSON object, not {_json_name(raw)}")
    return raw


def convert(raw: Mapping[str, Any], kind: type[Body], rules: FieldRules) -> Body:
    """A decoded body as ``kind``, with the rules for fields that it does not have."""
    known = set(kind.__struct_fields__)
    kept: Json = {}
    for name, value in raw.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        else:
            _check_unknown(name, value, known, rules)
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as e:
        raise _named(e) from None


def _check_unknown(name: str, value: Any, known: set[str], rules: FieldRules) -> None:
    if (fixed := rules.fixed.get(name)) is not None:
        # `in` alone would take True for 1.
        if any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in fixed.values):
            return
        only = f"; it may only be {' or '.join(map(_show, fixed.values))}" if fixed.values else ""
        raise UserError(f"{name} is not supported here: {fixed.why}{only}", param=name)
    if name in rules.refused:
        raise UserError(f"{name} is not supported: {rules.refused[name]}", param=name)
    raise UserError(f"there is no field {name!r}{did_you_mean(name, [*known, *rules.fixed])}", param=name)


def _named(error: msgspec.ValidationError) -> UserError:
    text = str(error)
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    what = text[: found.start()] if found else text
    if unknown := _UNKNOWN.match(what):
        path = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        return UserError(f"there is no field {path!r}", param=path)
    if missing := re.match(r"Object missing required field `([^`]*)`", what):
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return UserError(f"{path} is missing", param=path)
    what = what[:1].lower() + what[1:]
    return UserError(f"{path or 'the body'}: {what}", param=path or None)


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _json_name(value: Any) -> str:
    names: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def rules_table(kind: type[msgspec.Struct], rules: FieldRules) -> str:
    """The fields of a body, as docs/serve.md shows them."""
    lines = ["| field | taken |", "|---|---|"]
    lines.append(f"| {', '.join(f'`{name}`' for name in kind.__struct_fields__)} | yes |")
    for name, fixed in rules.fixed.items():
        values = " or ".join(f"`{_show(v)}`" for v in fixed.values)
        lines.append(f"| `{name}` | {f'only {values}' if values else 'no'}: {fixed.why} |")
    lines += [f"| `{name}` | no: {why} |" for name, why in rules.refused.items()]
    return "\n".join(lines)
