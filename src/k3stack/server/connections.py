"""Connections that end: uvicorn's protocol with bounds on what a client may leave undone.

A client that sends half a request, or takes nothing of its answer, would hold its connection and what stands behind it
for as long as it likes; one that sends its next request early and then leaves would not be noticed at all.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import socket
import termios
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

log = logging.getLogger("k3stack.server")

MOST_HEAD_BYTES = 64 * 1024
"""Bytes of a request's line and headers."""
GONE = "k3stack.gone"
"""Member of a request's scope: why its client was given up."""


class Connection(HttpToolsProtocol):
    """One client's connection."""

    client_timeout: ClassVar[float]
    """Seconds that a client may take for a request's head, from its first byte or from connecting, and that it may
    leave its answer unread while more of it waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        """For the head that is awaited."""
        self._stalled: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._in_head = False
        self._head_bytes = 0
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            # A request that came early has taken the place of the one that runs, which alone would be told.
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        self._head_is_there()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_is_there()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.client_timeout, self._no_head)

    def _head_is_there(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_head(self) -> None:
        self._timer = None
        if self._running is None or self._running.response_complete:
            self._refuse("408 Request Timeout")
        else:  # it began its next request early; that can wait for the answer that is under way
            self._await_head()

    def _refuse(self, status: str) -> None:
        """Answer what is no request yet, and hang up."""
        if not self.transport.is_closing():
            self.transport.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self._not_taken()
        self._stalled = self.loop.call_later(self.client_timeout, self._still_stalled)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _still_stalled(self) -> None:
        """While writing is paused nothing is added: a client that reads, however slowly, makes the rest smaller."""
        unsent = self._not_taken()
        if unsent < self._unsent:
            self._unsent = unsent
            self._stalled = self.loop.call_later(self.client_timeout, self._still_stalled)
            return
        why = f"the client took nothing of its answer for {self.client_timeout:g} s (--client-timeout)"
        log.warning("%s; it is given up", why)
        if self._running is not None:
            cast(dict[str, Any], self._running.scope)[GONE] = why
        self._stalled = None
        self.transport.abort()

    def _not_taken(self) -> int:
        """Bytes that the client has not confirmed: here, and in the system, which moves on to more of them only when
        much of its own share is gone."""
        below = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, below)
        return self.transport.get_write_buffer_size() + below[0]


def connections(client_timeout: float) -> type[Connection]:
    """The protocol with that timeout: uvicorn makes one for each connection, of the class alone."""
    return type("Connection", (Connection,), {"client_timeout": client_timeout})


def notice_the_vanished(listener: socket.socket, client_timeout: float) -> None:
    """Let connections that ``listener`` accepts end when the client's machine is gone without a word: probes while
    nothing is under way, a bound on what stays unconfirmed otherwise (where the system knows these options)."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(1, round(client_timeout / 3))
    # Unread answers are Connection's to end. The system's bound comes well after that: it also ends clients that read
    # in portions too small for it.
    unconfirmed_ms = round(1000 * max(60.0, 2 * client_timeout))
    values = {"TCP_KEEPIDLE": third, "TCP_KEEPINTVL": third, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": unconfirmed_ms}
    for name, value in values.items():
        if (number := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, number, value)
