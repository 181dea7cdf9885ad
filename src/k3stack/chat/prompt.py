"""Messages to prompt: Kimi-K3's chat format, segment by segment.

    message      := <|open|>message attributes<|sep|> body <|close|>message<|sep|><|end_of_msg|>
    prompt       := tools, effort notice, messages, choice notice, format notice, then an assistant message left open
                    inside think (thinking on) or response (thinking off)

Nothing here reads a flat string back: ``render`` gives segments and ``encode`` their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3stack.chat.history import Call, Message, TurnResults, read_calls
from k3stack.chat.jsontext import Json, RawNumber, dumps
from k3stack.chat.notices import choice_notice, effort_notice, format_notice, tools_notice
from k3stack.chat.segments import Segment, close_tag, encode, flat, message, open_tag
from k3stack.chat.settings import (
    DEFAULT_EFFORT,
    parse_effort,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
    tool_name,
)
from k3stack.errors import UserError

__all__ = ["Segment", "declared_tools", "encode", "flat", "is_continued", "render", "starts_in_think"]

NO_EFFORT = "omit"
"""``reasoning_effort`` of a prompt that thinks without a notice of how much. Not for clients: K3 is served with one."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_REFUSED_MEMBERS = ("function_call", "audio", "images", "videos")


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    reasoning_effort: str | None = None,
    tool_choice: object = None,
    response_format: object = None,
    continue_final: bool = False,
) -> list[Segment]:
    """The prompt of a chat request.

    ``messages`` and ``tools`` are the request's own objects, with the members that the client sent and no others
    (a padding ``null`` would change the prompt). ``reasoning_effort`` None is the default, ``max``.
    ``continue_final`` (or ``"partial": true`` on the last message) leaves the last, assistant message open inside
    its response, so that the model goes on with its text; the output then starts in the response: see
    ``starts_in_think``. Raises UserError whose ``param`` is the path of the field at fault, e.g.
    ``messages[3].content[0].type``.
    """
    if not messages:
        raise UserError("messages is empty; at least one message is needed", param="messages")
    declared = declared_tools(messages, tools)
    choice = parse_tool_choice(tool_choice, declared)
    form = parse_response_format(response_format)
    if choice.forced and form.kind != "text":
        raise UserError(
            f"tool_choice forces a call while response_format asks for {form.kind}: one output cannot be both",
            param="tool_choice",
        )
    out: list[Segment] = []
    if tools:
        out += tools_notice(tools)
    if thinking and reasoning_effort != NO_EFFORT:
        effort = parse_effort(reasoning_effort or DEFAULT_EFFORT)
        if effort is None:
            raise UserError("reasoning_effort is 'none' while thinking is on", param="reasoning_effort")
        out += effort_notice(effort)
    partial = is_continued(messages, continue_final)
    whole = messages[:-1] if partial else messages
    for part in _messages(whole, thinking):
        out += part
    out += choice_notice(choice)
    out += format_notice(form)
    if partial:
        return out + _continued(messages[-1], f"messages[{len(messages) - 1}]", thinking)
    return out + open_tag("message", (("role", "assistant"),)) + open_tag("think" if thinking else "response")


def starts_in_think(segments: Sequence[Segment]) -> bool:
    """Whether the output that follows a rendered prompt begins inside think: what ``OutputParser`` must be told."""
    return len(segments) >= 3 and segments[-2] == Segment("think") and segments[-3] == open_tag("think")[0]


def declared_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Names of all tools of a request: the declared ones and those that system messages add. Checks all of them."""
    names = [(tool_name(tool), f"tools[{i}]") for i, tool in enumerate(parse_tools(tools))]
    for i, item in enumerate(messages):
        if not isinstance(item, Mapping):
            raise UserError(f"messages[{i}] must be an object", param=f"messages[{i}]")
        where = f"messages[{i}].tools"
        if item.get("tools") is None:
            continue
        if item.get("role") not in ("system", "developer"):
            raise UserError(f"{where}: only a system message can add tools", param=where)
        names += [(tool_name(tool), f"{where}[{j}]") for j, tool in enumerate(parse_tools(item["tools"], where))]
    seen: dict[str, str] = {}
    for name, path in names:
        if name in seen:
            raise UserError(
                f"{path}.function.name {name!r} is declared twice, first at {seen[name]}", param=f"{path}.function.name"
            )
        seen[name] = path
    return list(seen)


def is_continued(messages: Sequence[Message], continue_final: bool) -> bool:
    """Whether the request goes on with its last message; checks that this can be done."""
    for i, item in enumerate(messages[:-1]):
        if item.get("partial"):
            raise UserError(f"messages[{i}].partial: only the last message can be", param=f"messages[{i}].partial")
    last = messages[-1]
    if not (continue_final or last.get("partial")):
        return False
    if last.get("role") != "assistant" or last.get("tool_calls"):
        param = "continue_final_message" if continue_final else f"messages[{len(messages) - 1}].partial"
        raise UserError(f"{param}: the last message must be an assistant message without tool calls", param=param)
    return True


def _messages(messages: Sequence[Message], thinking: bool) -> Iterator[list[Segment]]:
    results = TurnResults()
    i = 0
    while i < len(messages):
        item, where = messages[i], f"messages[{i}]"
        role = item.get("role")
        _refuse_members(item, where)
        i += 1
        if role == "tool":
            run = [(item, where)]
            while i < len(messages) and messages[i].get("role") == "tool":
                run.append((messages[i], f"messages[{i}]"))
                i += 1
            for result in results.read(run):
                attributes = (("role", "tool"), ("tool", result.tool), ("index", str(result.index)))
                yield message(attributes, _content(result.message, result.where))
        elif role == "assistant":
            calls = read_calls(item, where)
            results = TurnResults(calls)
            body = _think(item, where, thinking) + open_tag("response") + _content(item, where)
            yield message(_head("assistant", item, where), body + close_tag("response") + _tools_block(calls, where))
        elif role in ("system", "developer") and item.get("tools"):
            yield _added_tools(item, where)
        elif role in ("user", "system", "developer"):
            shown = "user" if role == "user" else "system"
            yield message(_head(shown, item, where), _content(item, where))
        else:
            raise UserError(
                f"{where}.role is {role!r}; it must be system, developer, user, assistant or tool",
                param=f"{where}.role",
            )


def _refuse_members(item: Message, where: str) -> None:
    for key in _REFUSED_MEMBERS:
        if item.get(key):
            raise UserError(f"{where}.{key} is not supported", param=f"{where}.{key}")


def _head(role: str, item: Message, where: str) -> tuple[tuple[str, str], ...]:
    name = item.get("name")
    if not name:
        return (("role", role),)
    if not isinstance(name, str):
        raise UserError(f"{where}.name must be a string", param=f"{where}.name")
    return (("role", role), ("name", name))


def _content(item: Message, where: str) -> list[Segment]:
    """Text of a message: a string, or parts in their order. Images are refused: only text is served."""
    content = item.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [Segment(content)]
    if not isinstance(content, Sequence):
        raise UserError(f"{where}.content must be a string or an array of parts", param=f"{where}.content")
    out = []
    for i, part in enumerate(content):
        path = f"{where}.content[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_PARTS:
            raise UserError(f"{path} is an image; this server runs the text model only", param=f"{path}.type")
        if kind not in _TEXT_PARTS:
            raise UserError(f"{path}.type is {kind!r}; it must be {' or '.join(_TEXT_PARTS)}", param=f"{path}.type")
        if not isinstance(part.get("text"), str):
            raise UserError(f"{path}.text must be a string", param=f"{path}.text")
        out.append(Segment(part["text"]))
    return out


def _think(item: Message, where: str, thinking: bool) -> list[Segment]:
    """The think block of an assistant turn: byte for byte what it was, empty if it is missing or blank."""
    key = "reasoning_content" if item.get("reasoning_content") is not None else "reasoning"
    text = item.get(key)
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}.{key} must be a string", param=f"{where}.{key}")
    if not thinking:
        return []
    body = [Segment(text)] if text and not text.isspace() else []
    return open_tag("think") + body + close_tag("think")


def _tools_block(calls: Sequence[Call], where: str) -> list[Segment]:
    if not calls:
        return []
    out = open_tag("tools")
    for number, call in enumerate(calls, start=1):
        out += open_tag("call", (("tool", call.name), ("index", str(number))))
        if call.raw is not None:
            out += [*open_tag("json", (("type", "object"),)), Segment(call.raw), *close_tag("json")]
        for key, value in call.arguments.items():
            text = (
                value if type(value) is str else _value(value, f"{where}.tool_calls[{number - 1}].function.arguments")
            )
            out += [*open_tag("argument", (("key", key), ("type", value_type(value)))), Segment(text)]
            out += close_tag("argument")
        out += close_tag("call")
    return out + close_tag("tools")


def _value(value: Json, path: str) -> str:
    try:
        return dumps(value)
    except (ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{path} cannot be written as JSON: {e}", param=path) from None


def value_type(value: Json) -> str:
    """The ``type`` attribute of an argument: the JSON type of its value (a boolean is no number)."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (RawNumber, int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _added_tools(item: Message, where: str) -> list[Segment]:
    if item.get("content"):
        raise UserError(
            f"{where} has both tools and content; the format has no place for the text: send it in its own message",
            param=f"{where}.content",
        )
    return tools_notice(item["tools"], added=True, param=f"{where}.tools")


def _continued(item: Message, where: str, thinking: bool) -> list[Segment]:
    _refuse_members(item, where)
    out = open_tag("message", _head("assistant", item, where)) + _think(item, where, thinking)
    return out + open_tag("response") + _content(item, where)
