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


def request_body(path: str) -> dict[str, Any] | None:
    """``openapi_extra`` of the endpoint at ``path``; None where it takes no body."""
    kind = BODIES.get(path)
    if kind is None:
        return None
    (schema,), components = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
    name = schema["$ref"].rpartition("/")[2]
    inlined = _inline(components[name], components)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    """References replaced by what they refer to, so that each endpoint's schema stands by itself."""
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(components[schema["$ref"].rpartition("/")[2]], components)
    return {key: _inline(value, components) for key, value in schema.items()}
