"""Reading a request's body, up to a limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from k3stack.errors import UserError
from k3stack.server.http_errors import TooLarge

MIB = 2**20


async def read_body(request: Request, most_mib: float) -> bytes:
    """The whole body. Raises TooLarge as soon as it is known to be above ``most_mib``."""
    most = int(most_mib * MIB)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise _too_large(int(announced), most)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise _too_large(size, most)
            parts.append(part)
    except ClientDisconnect:
        raise UserError("the client left before its request was complete") from None
    return b"".join(parts)


def _too_large(size: int, most: int) -> TooLarge:
    return TooLarge(
        f"the body has {size:,} bytes or more; this server takes at most {most:,} (--max-body-mib)", param=None
    )
