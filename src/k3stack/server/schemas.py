"""OpenAPI schemas of request bodies, made from the structs that decode them."""

from __future__ import annotations

from typing import Any

import msgspec

from k3stack.server.fields import ChatRequest, CompletionRequest
from k3stack.server.messages_convert import MessagesRequest
from k3stack.server.native_fields import AbortRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
    "/abort_request": AbortRequest,
}


TEXT_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "input_text"]}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "function"],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, TEXT_PARTS, {"type": "null"}]},
        "name": {"type": "string"},
        "reasoning_content": {"type": "string"},
        "tool_calls": {"type": "array", "items": CALL},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role"],
}
"""A message of a chat. Which members go with which role is checked where messages are rendered."""
ANTHROPIC_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"anyOf": [{"type": "string"}, TEXT_PARTS]}},
    "required": ["role", "content"],
}
BY_HAND: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatRequest: {"messages": {"type": "array", "items": MESSAGE, "minItems": 1}},
    MessagesRequest: {"messages": {"type": "array", "items": ANTHROPIC_MESSAGE, "minItems": 1}},
}
"""Members whose structs say less than they take."""
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "/v1/models/{name:path}": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    "/dashboard/data": [
        {"name": "since", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999_999_999}}
    ],
}


def openapi_of(path: str) -> dict[str, Any] | None:
    """``openapi_extra`` of the endpoint at ``path``: its body and parameters; None where it takes neither."""
    found: dict[str, Any] = {}
    if parameters := PARAMETERS.get(path):
        found["parameters"] = parameters
    if kind := BODIES.get(path):
        (schema,), components = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
        inlined = _inline(components[schema["$ref"].rpartition("/")[2]], components)
        inlined["properties"].update(BY_HAND.get(kind, {}))
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": inlined}}}
    return found or None


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    """References replaced by what they refer to, so that each endpoint's schema stands by itself."""
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(components[schema["$ref"].rpartition("/")[2]], components)
    return {key: _inline(value, components) for key, value in schema.items()}
