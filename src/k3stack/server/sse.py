"""Server-sent events without a layer in between: chunks of bytes go straight to the ASGI server.

Frames are written by hand from prefixes that are made once a stream; building and dumping an object for each token
would cost several times as much as everything else on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from k3stack.errors import K3Error
from k3stack.server.connections import GONE
from k3stack.server.http_errors import error_object, error_of
from k3stack.server.records import Record
from k3stack.server.service import Service

log = logging.getLogger("k3stack.server")

DONE = b"data: [DONE]\n\n"
Answer = TypeVar("Answer")


def event(data: Any) -> bytes:
    """One frame from builtins or msgspec structs."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def open_stream(
    service: Service,
    record: Record,
    rids: Iterable[str],
    frames: AsyncIterator[bytes],
    receive: Receive,
    error_frame: Callable[[dict[str, Any], int], bytes] | None = None,
) -> Response:
    """The response that streams ``frames``, once the first has come: what fails before is a status of its own.

    ``rids``: the engine's requests behind it, aborted when the client leaves. ``error_frame``: how a stream that
    breaks off says so, given an ``error_object`` and its status.
    """

    async def gone(why: str | None = None) -> None:
        record.ends.append("disconnect")
        record.message = record.message or why
        for rid in rids:
            await service.engine.abort(rid)

    first = await unless_gone(receive, anext(frames), gone)
    if first is None:
        return Response(status_code=499)
    return EventStream(_guarded(first, frames, error_frame or _error_frame), gone, {"x-request-id": record.rid})


def _error_frame(error: dict[str, Any], status: int) -> bytes:
    return event({"error": error})


async def _guarded(
    first: bytes, frames: AsyncIterator[bytes], error_frame: Callable[[dict[str, Any], int], bytes]
) -> AsyncIterator[bytes]:
    """``frames`` with an error event where they break off. No [DONE] follows it: a cut answer is no finished one."""
    yield first
    try:
        async for chunk in frames:
            yield chunk
    except K3Error as e:
        yield error_frame(error_of(e), e.http_status)
    except Exception:
        log.exception("a stream broke off")
        yield error_frame(error_object("the server failed", 500), 500)


class EventStream(Response):
    """Streams ``chunks`` (each one or more whole frames). ``gone`` is awaited when the client has left early, or with
    a reason when it was given up; it must make ``chunks`` end soon, which is awaited too, so that every request runs
    to its recorded end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        gone: Callable[[str | None], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._chunks = chunks
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(scope, receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, scope: Scope, receive: Receive) -> None:
        await _disconnected(receive)
        await self._gone(scope.get(GONE))


async def _disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def unless_gone(
    receive: Receive, work: Awaitable[Answer], gone: Callable[[], Awaitable[None]] | None = None
) -> Answer | None:
    """The result of ``work``; None when the client left first (``gone`` is awaited, ``work`` is cancelled then)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone is not None:
            await gone()
        return None
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await each
