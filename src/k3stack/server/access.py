"""Who may come in: keys, compared in constant time, before anything else of a request is looked at."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from k3stack.server.http_errors import Unauthorized, error_response

OPEN_PATHS = frozenset({"/health", "/"})
"""Answered without a key: probes have none, and the page at / asks for one before it gets any data."""


class KeyGate:
    """ASGI middleware: lets a request through if it carries one of ``keys`` (none set: all pass)."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["type"] == "http" and bool(self._keys) and scope["path"] not in OPEN_PATHS
        if closed and scope["method"] != "OPTIONS" and not self.admits(Headers(scope=scope)):
            refusal = error_response(Unauthorized("no valid API key: send `Authorization: Bearer KEY`"), scope["path"])
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def admits(self, headers: Headers) -> bool:
        """Compares with every key, so that the time taken tells nothing about which one came close."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = (given if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
        return sum(hmac.compare_digest(offered, key) for key in self._keys) > 0
