"""What /openapi.json says of each endpoint: its body, made from the struct that decodes it, parameters, errors."""

from __future__ import annotations

from typing import Any

import msgspec

from k3stack.server.access import OPEN_PATHS
from k3stack.server.fields import ChatRequest, CompletionRequest
from k3stack.server.http_errors import ANTHROPIC_PATH
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


GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate"})
ERRORS = {
    400: "A field is wrong, unknown or not supported, or what is asked for does not fit",
    401: "No key, or a wrong one",
    404: "Another model is served",
    408: "The body stopped coming",
    413: "The body is too large",
    429: "Too many requests wait already; come back after Retry-After seconds",
    503: "No request is taken now; come back after Retry-After seconds",
}
OTHERS: dict[str, tuple[int, ...]] = {
    "/v1/models/{name:path}": (404,),
    "/dashboard/data": (400,),
    "/flush_cache": (400, 503),
    "/health": (503,),
    "/health_generate": (503,),
}
"""Errors of endpoints that take no body."""


def _error(**members: Any) -> dict[str, Any]:
    inner = {"type": {"type": "string"}, "message": {"type": "string", "minLength": 1}, **members}
    error = {"type": "object", "properties": inner, "required": [*inner], "additionalProperties": False}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def errors_of(path: str, keyed: bool) -> dict[str, Any]:
    """The ``responses`` by status with which a request to ``path`` may fail; ``keyed``: the server wants a key."""
    statuses = set(OTHERS.get(path, ()))
    if kind := BODIES.get(path):
        statuses |= {400, 408, 413} | ({404} if "model" in kind.__struct_fields__ else set())
    if path in GENERATING:
        statuses |= {429, 503}
    if keyed and path not in OPEN_PATHS:
        statuses.add(401)
    if path.startswith(ANTHROPIC_PATH):
        schema = _error()
    else:
        schema = _error(param={"type": ["string", "null"]}, code={"type": ["integer", "string"]})
    body: dict[str, Any] = {"content": {"application/json": {"schema": schema}}}
    if path.startswith("/health"):
        body = {}  # says how it is instead of what is wrong
    return {str(status): {"description": ERRORS[status], **body} for status in sorted(statuses)}


def openapi_of(path: str, keyed: bool) -> dict[str, Any]:
    """``openapi_extra`` of the endpoint at ``path``: its body, parameters and errors."""
    found: dict[str, Any] = {}
    if errors := errors_of(path, keyed):
        found["responses"] = errors
    if parameters := PARAMETERS.get(path):
        found["parameters"] = parameters
    if kind := BODIES.get(path):
        (schema,), components = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
        inlined = _inline(components[schema["$ref"].rpartition("/")[2]], components)
        inlined["properties"].update(BY_HAND.get(kind, {}))
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": inlined}}}
    return found


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    """References replaced by what they refer to, so that each endpoint's schema stands by itself."""
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(components[schema["$ref"].rpartition("/")[2]], components)
    return {key: _inline(value, components) for key, value in schema.items()}
