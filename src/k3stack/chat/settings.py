"""What a request asks of the model beside its messages: thinking, tools, the choice among them, the answer's form.

Each function takes the field as it came off the wire and either returns a checked value or raises UserError with the
field's name in ``param``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from k3stack.errors import UserError

Effort = Literal["low", "high", "max"]
DEFAULT_EFFORT: Effort = "max"

_EFFORTS: Mapping[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether the model thinks, and how much; ``effort`` counts only while ``on``."""

    on: bool = True
    effort: Effort = DEFAULT_EFFORT


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``name`` is the tool of a named choice. ``none`` says that a notice forbids calls."""

    mode: Literal["auto", "none", "required", "named"]
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form of the visible answer. ``strict`` false: the schema is only a notice to the model."""

    kind: Literal["text", "json_object", "json_schema"]
    schema: Any = None
    strict: bool = True


class OutputGrammar(msgspec.Struct, frozen=True):
    """What an output must match, as it travels to the engine; made by ``grammar.build_grammar``, used by ``masks``.

    ``lark``: the grammar of the output once it is out of think. ``thinking``: the output begins inside think.
    ``prefix``: ids of the response that the prompt already holds (a continued message).
    """

    lark: str
    thinking: bool
    prefix: tuple[int, ...] = ()


def parse_effort(value: object, param: str = "reasoning_effort") -> Effort | None:
    """K3 knows low, high and max; the other levels in use map to the nearest one up. "none" (no thinking) is None."""
    if value == "none":
        return None
    if isinstance(value, str) and value in _EFFORTS:
        return _EFFORTS[value]
    raise UserError(f"{param} is {value!r}; it must be one of none, {', '.join(_EFFORTS)}", param=param)


def parse_thinking(
    *,
    reasoning_effort: object = None,
    thinking: object = None,
    reasoning: object = None,
    chat_template_kwargs: object = None,
) -> Thinking:
    """Merge every way of asking for thinking into one answer.

    ``thinking``: a boolean, or ``{"type": "enabled" | "adaptive" | "disabled", "effort": ..., "budget_tokens": ...}``;
    a budget stands for the nearest level (below 4,096 low, below 16,384 high, else max) where no effort is given.
    ``reasoning``: ``{"enabled": bool, "effort": ...}``.
    ``chat_template_kwargs``: ``thinking``, ``enable_thinking``, ``thinking_effort``.
    An effort in ``chat_template_kwargs`` outranks one in ``thinking``, that one ``reasoning``, that one
    ``reasoning_effort``. Two switches that disagree are an error.
    """
    switches: dict[str, bool] = {}
    efforts: list[tuple[str, object]] = []
    budget: Effort | None = None
    kwargs = _mapping(chat_template_kwargs, "chat_template_kwargs")
    for key in ("thinking", "enable_thinking"):
        if kwargs.get(key) is not None:
            switches[f"chat_template_kwargs.{key}"] = _boolean(kwargs[key], f"chat_template_kwargs.{key}")
    efforts.append(("chat_template_kwargs.thinking_effort", kwargs.get("thinking_effort")))
    if isinstance(thinking, bool):
        switches["thinking"] = thinking
    else:
        asked = _mapping(thinking, "thinking")
        _only(asked, ("type", "effort", "budget_tokens"), "thinking")
        if asked.get("type") is not None:
            switches["thinking.type"] = _thinking_type(asked["type"])
        efforts.append(("thinking.effort", asked.get("effort")))
        budget = _budget_effort(asked.get("budget_tokens"))
    router = _mapping(reasoning, "reasoning")
    _only(router, ("enabled", "effort"), "reasoning")
    if router.get("enabled") is not None:
        switches["reasoning.enabled"] = _boolean(router["enabled"], "reasoning.enabled")
    efforts += [("reasoning.effort", router.get("effort")), ("reasoning_effort", reasoning_effort)]
    efforts.append(("thinking.budget_tokens", budget))
    return _settle(switches, [(param, parse_effort(value, param)) for param, value in efforts if value is not None])


def _settle(switches: dict[str, bool], efforts: list[tuple[str, Effort | None]]) -> Thinking:
    if len(set(switches.values())) > 1:
        raise UserError(f"{' and '.join(switches)} disagree on whether to think", param=next(iter(switches)))
    param, effort = efforts[0] if efforts else ("", DEFAULT_EFFORT)
    on = next(iter(switches.values())) if switches else effort is not None
    if on and effort is None:
        raise UserError(f"{param} is 'none' but {next(iter(switches))} asks for thinking", param=param)
    return Thinking(on, effort or DEFAULT_EFFORT)


def _budget_effort(budget: object) -> Effort | None:
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise UserError(
            f"thinking.budget_tokens is {budget!r}; it must be a positive integer", param="thinking.budget_tokens"
        )
    return "low" if budget < 4096 else "high" if budget < 16384 else "max"


def _thinking_type(value: object) -> bool:
    if value not in ("enabled", "adaptive", "disabled"):
        raise UserError(f"thinking.type is {value!r}; it must be enabled, adaptive or disabled", param="thinking.type")
    return value != "disabled"


def _mapping(value: object, param: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{param} must be an object, not {type(value).__name__}", param=param)
    return value


def _boolean(value: object, param: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{param} is {value!r}; it must be true or false", param=param)
    return value


def _only(given: Mapping[str, Any], known: tuple[str, ...], param: str) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            raise UserError(f"{param}.{key} is not supported; known here: {', '.join(known)}", param=f"{param}.{key}")


def parse_tools(tools: object, param: str = "tools") -> list[Mapping[str, Any]]:
    """Check a tools array: objects of type function with a name. Empty and missing are no tools."""
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise UserError(f"{param} must be an array of tools", param=param)
    for i, tool in enumerate(tools):
        where = f"{param}[{i}]"
        if not isinstance(tool, Mapping):
            raise UserError(f"{where} must be an object", param=where)
        if tool.get("type", "function") != "function":
            raise UserError(
                f"{where}.type is {tool['type']!r}; only function tools are supported", param=f"{where}.type"
            )
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise UserError(f"{where}.function must be an object", param=f"{where}.function")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
        if not isinstance(function.get("parameters", {}) or {}, (Mapping, bool)):
            raise UserError(f"{where}.function.parameters must be a JSON schema", param=f"{where}.function.parameters")
    return list(tools)


def tool_name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def parse_tool_choice(value: object, declared: Sequence[str]) -> ToolChoice:
    """``declared``: names of all tools of the request, those of system messages included."""
    param = "tool_choice"
    if value is None or value == "auto":
        return ToolChoice("auto")
    if value == "none":
        return ToolChoice("none")
    if value == "required":
        choice = ToolChoice("required")
    elif isinstance(value, Mapping):
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if value.get("type", "function") != "function" or not isinstance(name, str):
            raise UserError('tool_choice must be {"type": "function", "function": {"name": ...}}', param=param)
        choice = ToolChoice("named", name)
    else:
        raise UserError(f"tool_choice is {value!r}; it must be auto, none, required or a named function", param=param)
    if not declared:
        raise UserError("tool_choice asks for a call, but the request declares no tools", param=param)
    if choice.name is not None and choice.name not in declared:
        raise UserError(
            f"tool_choice names {choice.name!r}, which is not among the tools: {', '.join(declared)}", param=param
        )
    return choice


def parse_response_format(value: object) -> ResponseFormat:
    """``text``, ``json_object`` or ``json_schema`` with its schema; anything else is refused by name."""
    param = "response_format"
    if value is None:
        return ResponseFormat("text")
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind == "text":
        return ResponseFormat("text")
    if kind == "json_object":
        return ResponseFormat("json_object", {"type": "object"})
    if kind != "json_schema" or not isinstance(value, Mapping):
        raise UserError(f"response_format.type is {kind!r}; it must be text, json_object or json_schema", param=param)
    body = value.get("json_schema")
    if not isinstance(body, Mapping) or not isinstance(body.get("schema"), (Mapping, bool)):
        raise UserError("response_format.json_schema.schema must be a JSON schema", param=f"{param}.json_schema.schema")
    strict = body.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise UserError("response_format.json_schema.strict must be true or false", param=f"{param}.json_schema.strict")
    return ResponseFormat("json_schema", body["schema"], strict is not False)
