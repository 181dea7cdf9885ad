"""The system messages that carry a request's settings to the model. Their wording is part of the model's format.

The bodies below are literals that Kimi-K3 was trained on; tests hold them to published digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3stack.chat.jsontext import compact
from k3stack.chat.segments import Segment, message
from k3stack.chat.settings import Effort, ResponseFormat, ToolChoice
from k3stack.errors import UserError

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_CHOICE = "The system is invoked with `tool_choice={choice}`.\nYou {verb} in the next message."
_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{tools}\n```"
)


def tools_notice(tools: Sequence[Mapping[str, Any]], *, added: bool = False, param: str = "tools") -> list[Segment]:
    """Declares ``tools`` as the client sent them; ``added``: in the middle of a conversation."""
    return _notice("tool-declare", (_MORE_TOOLS if added else _TOOLS).replace("{tools}", _compact(list(tools), param)))


def effort_notice(effort: Effort) -> list[Segment]:
    return _notice("thinking-effort", _EFFORT.replace("{effort}", effort))


def choice_notice(choice: ToolChoice) -> list[Segment]:
    """Only ``required`` and ``none`` have one; a named choice is the grammar's business."""
    if choice.mode not in ("required", "none"):
        return []
    verb = "MUST call tools" if choice.mode == "required" else "MUST NOT call any tools"
    return _notice("tool-choice", _CHOICE.replace("{choice}", choice.mode).replace("{verb}", verb))


def format_notice(form: ResponseFormat) -> list[Segment]:
    if form.kind == "text":
        return []
    body = _FORMAT.replace("{kind}", form.kind)
    if form.kind == "json_schema":
        body += _SCHEMA.replace("{schema}", _compact(form.schema, "response_format.json_schema.schema"))
    return _notice("response-format", body)


def _notice(kind: str, body: str) -> list[Segment]:
    return message((("role", "system"), ("type", kind)), [Segment(body)])


def _compact(value: Any, param: str) -> str:
    try:
        return compact(value)
    except (ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{param} cannot be written as JSON: {e}", param=param) from None
