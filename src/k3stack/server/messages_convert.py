"""Anthropic's request form, and what it means as a chat request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from k3stack.errors import UserError
from k3stack.server.fields import ChatRequest, FieldRules, Fixed, Json, Whole

ERROR_PREFIX = "Error: "
"""Begins the text of a tool result with ``is_error``, since the chat format has no mark for it."""


class MessagesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/messages; /v1/messages/count_tokens takes the same."""

    messages: list[Json]
    model: str | None = None
    max_tokens: Whole | None = None
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole = 0
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    metadata: Json | None = None


MESSAGES_RULES = FieldRules(
    fixed={
        "service_tier": Fixed(("auto", "standard_only"), "there is one tier"),
        "inference_geo": Fixed((), "there is one server"),
        "container": Fixed((), "no code is run here"),
        "mcp_servers": Fixed(([],), "declare tools and call them yourself"),
        "context_management": Fixed((), "send the messages that should be seen"),
        "cache_control": Fixed(({"type": "ephemeral"},), "every prefix is cached while there is room"),
    },
    refused={"stop": "the field is called stop_sequences", "functions": "use tools"},
)

_BLOCK_MEMBERS = {"type", "cache_control", "citations"}


def to_chat(request: MessagesRequest) -> ChatRequest:
    """The chat request that means the same. Raises UserError with the path of what cannot be said so."""
    messages = [*_system(request.system), *_messages(request.messages)]
    choice, parallel = _choice(request.tool_choice)
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        stream=request.stream,
        thinking=_thinking(request.thinking, request.output_config),
        metadata=request.metadata,
    )


def _thinking(thinking: Json | None, output: Json | None) -> Json:
    """Without the field the model does not think: that is what the form means."""
    effort = None
    for key, value in (output or {}).items():
        if key != "effort":
            raise UserError(f"output_config.{key} is not supported; effort is", param=f"output_config.{key}")
        effort = value
    if thinking is None:
        return {"type": "disabled"}
    found = {key: value for key, value in thinking.items() if key != "display"}
    if thinking.get("display") not in (None, "summarized", "full"):
        raise UserError("thinking.display can only be full: nothing is left out", param="thinking.display")
    return {**found, **({"effort": effort} if effort is not None and thinking.get("type") != "disabled" else {})}


def _system(system: str | list[Json] | None) -> Iterator[Json]:
    if isinstance(system, str):
        yield {"role": "system", "content": system}
    elif system:
        texts = [_text(block, f"system[{i}]") for i, block in enumerate(system)]
        yield {"role": "system", "content": "\n\n".join(texts)}


def _text(block: Any, where: str) -> str:
    if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise UserError(f"{where} must be a block of type text", param=where)
    text: str = block["text"]
    return text


def _messages(messages: Sequence[Json]) -> Iterator[Json]:
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise UserError(f"{where}.role is {role!r}; it must be user or assistant", param=f"{where}.role")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif not isinstance(content, list):
            raise UserError(f"{where}.content must be a string or an array of blocks", param=f"{where}.content")
        elif role == "user":
            yield from _user(content, where)
        else:
            yield _assistant(content, where)


def _user(content: list[Any], where: str) -> Iterator[Json]:
    """Tool results become messages of their own; what text there is follows them."""
    texts: list[Json] = []
    for i, block in enumerate(content):
        path = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            yield _tool_result(block, path)
        elif kind == "text":
            texts.append({"type": "text", "text": _text(block, path)})
        else:
            raise UserError(f"{path}.type is {kind!r}; this server reads text and tool_result", param=f"{path}.type")
    if texts or not content:
        yield {"role": "user", "content": texts}


def _tool_result(block: Mapping[str, Any], path: str) -> Json:
    content = block.get("content", "")
    if not isinstance(content, str):
        if not isinstance(content, list):
            raise UserError(f"{path}.content must be a string or an array of blocks", param=f"{path}.content")
        content = "".join(_text(item, f"{path}.content[{i}]") for i, item in enumerate(content))
    if block.get("is_error") and not content.lower().startswith("error"):
        content = ERROR_PREFIX + content
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _assistant(content: list[Any], where: str) -> Json:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(content):
        path = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_text(block, path))
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise UserError(f"{path}.thinking must be a string", param=f"{path}.thinking")
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block, path))
        else:
            raise UserError(
                f"{path}.type is {kind!r}; an assistant's blocks are text, thinking and tool_use", param=f"{path}.type"
            )
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], path: str) -> Json:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), Mapping):
        raise UserError(f"{path} needs a name and an input that is an object", param=path)
    arguments = msgspec.json.encode(block.get("input", {})).decode()
    return {
        "id": block.get("id"),
        "type": "function",
        "function": {"name": block["name"], "arguments": arguments},
    }


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type", "custom") != "custom":
        raise UserError(
            f"{where}.type is {tool['type']!r}; only tools that you run yourself are supported", param=f"{where}.type"
        )
    if not isinstance(tool.get("name"), str):
        raise UserError(f"{where}.name must be a string", param=f"{where}.name")
    function: Json = {"name": tool["name"]}
    for theirs, ours in (("description", "description"), ("input_schema", "parameters"), ("strict", "strict")):
        if tool.get(theirs) is not None:
            function[ours] = tool[theirs]
    return {"type": "function", "function": function}


def _choice(choice: Json | None) -> tuple[str | Json | None, bool]:
    """``tool_choice`` in OpenAI's form, and whether calls may be parallel."""
    if choice is None:
        return None, True
    parallel = not choice.get("disable_parallel_tool_use", False)
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    names = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in names:
        raise UserError(f"tool_choice.type is {kind!r}; it must be auto, any, tool or none", param="tool_choice.type")
    return names[kind], parallel
