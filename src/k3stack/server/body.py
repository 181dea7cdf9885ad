"""Reading a request's body, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from k3stack.config.options import ServeOptions
from k3stack.errors import UserError
from k3stack.server.http_errors import TooLarge, TooSlow

MIB = 2**20


async def read_body(request: Request, options: ServeOptions) -> bytes:
    """The whole body. Raises TooLarge as soon as it is known to be above ``max_body_mib``, TooSlow when nothing more
    of it has come for ``client_timeout`` seconds."""
    most = int(options.max_body_mib * MIB)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise _too_large(int(announced), most)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in _parts(request, options.client_timeout):
            size += len(part)
            if size > most:
                raise _too_large(size, most)
            parts.append(part)
    except ClientDisconnect:
        raise UserError("the client left before its request was complete") from None
    return b"".join(parts)


async def _parts(request: Request, timeout_s: float) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(stream, None), timeout_s)
        except TimeoutError:
            raise TooSlow(f"nothing more of the body has come for {timeout_s:g} s (--client-timeout)") from None
        if part is None:
            return
        yield part


def _too_large(size: int, most: int) -> TooLarge:
    return TooLarge(
        f"the body has {size:,} bytes or more; this server takes at most {most:,} (--max-body-mib)", param=None
    )
