"""Errors as OpenAI's clients expect them, with the status that each family of errors carries."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from k3stack.errors import K3Error, NotNow, UserError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class NotFound(UserError):
    """There is no such model, request or path."""

    http_status = 404


class TooLarge(UserError):
    """The body of the request is above the limit."""

    http_status = 413


class TooSlow(UserError):
    """The body of the request stopped coming."""

    http_status = 408


class Unauthorized(UserError):
    """No key, or a wrong one."""

    http_status = 401


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The value of ``error`` in a body or a stream event."""
    return {"message": message, "type": TYPES.get(status, "server_error"), "param": param, "code": code or status}


def error_of(error: K3Error) -> dict[str, Any]:
    """``error_object`` of one of our exceptions."""
    return error_object(str(error), error.http_status, getattr(error, "param", None))


ANTHROPIC_TYPES = {**TYPES, 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
ANTHROPIC_PATH = "/v1/messages"


def anthropic_error(message: str, status: int) -> dict[str, Any]:
    """The body of an error under /v1/messages."""
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(status, "api_error"), "message": message}}


def error_body(error: dict[str, Any], status: int, path: str) -> dict[str, Any]:
    """``error`` (an ``error_object``) as the clients of ``path`` expect it."""
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_error(error["message"], status)
    return {"error": error}


def error_response(error: K3Error, path: str = "") -> Response:
    """The response that ends a request to ``path`` in ``error``."""
    headers = {}
    if isinstance(error, NotNow):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    body = error_body(error_of(error), error.http_status, path)
    return json_response(body, status=error.http_status, headers=headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``body`` (builtins and msgspec structs) as JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
