"""``EngineClient``: the HTTP process's handle on the engine process.

It starts the engine, sends requests, hands each request's outputs to whoever iterates over them, and gives every
open request a clear end when the engine dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq
import zmq.asyncio

from k3stack.config.options import EngineOptions
from k3stack.engine import messages as msg
from k3stack.engine.process import Channel, EngineProcess
from k3stack.engine.scripted import Script
from k3stack.errors import BugError, K3Error, Unavailable, UserError

log = logging.getLogger("k3stack.engine")

RESTART_WINDOW_S = 600.0
KILL_AFTER_S = 10.0

State = Literal["new", "starting", "up", "draining", "broken", "down", "closed"]


@dataclass(slots=True)
class _OpenRequest:
    """Where the outputs of one request wait for its reader."""

    choices_left: set[int]
    items: deque[msg.Output] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None

    def put(self, output: msg.Output) -> None:
        if output.finish_reason is not None:
            self.choices_left.discard(output.choice)
        self.items.append(output)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class EngineClient:
    """One engine process and the requests open on it. Every method belongs to one asyncio loop.

    ``script``: answer from it, without network and torch, for tests of what stands on the engine.
    ``watchdog_timeout``: seconds one turn of the engine may last; a longer one is logged with the engine's stacks
    and ends the process. ``max_restarts``: how often within ten minutes a dead engine is started anew.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        script: Script | None = None,
        watchdog_timeout: float = 300.0,
        max_restarts: int = 3,
        log_level: str = "info",
    ) -> None:
        self._options = options
        self._script = script
        self._watchdog_timeout = watchdog_timeout
        self._max_restarts = max_restarts
        self._log_level = log_level
        self._state: State = "new"
        self._why_down = "the engine has not been started"
        self._info: dict[str, Any] = {}
        self._open: dict[str, _OpenRequest] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next_number = 0
        self._drained: asyncio.Future[None] | None = None
        self._last_words: msg.Stopped | msg.Died | None = None
        self._deaths: list[float] = []
        self._was_up = False
        self._process: EngineProcess | None = None
        self._context: zmq.asyncio.Context | None = None
        self._incoming: zmq.asyncio.Socket | None = None
        self._outgoing: zmq.Socket[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[None] | None = None

    @property
    def healthy(self) -> bool:
        """True while the engine is up and answers; false while it starts, is stuck, drains, or is gone."""
        return self._state == "up"

    @property
    def state(self) -> str:
        """new, starting, up, draining, broken (it died and is started anew), down (for good) or closed."""
        return self._state

    @property
    def why_not_healthy(self) -> str | None:
        """One line for operators; None while healthy."""
        return None if self.healthy else self._why_down

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the running engine (``Ready.info``); empty before the first start."""
        return self._info

    @property
    def restarts(self) -> int:
        """How often the engine process has died and been started anew within the last ten minutes."""
        return len(self._deaths)

    async def start(self) -> None:
        """Start the engine process and wait until it is up.

        Raises UserError when settings or files are at fault, Unavailable when the process ends for another reason.
        """
        if self._state not in ("new", "broken", "down"):
            raise BugError(f"start() of an engine client that is {self._state}")
        self._state, self._why_down = "starting", "the engine is starting"
        self._last_words = None
        self._ready = asyncio.get_running_loop().create_future()
        try:
            self._spawn()
        except OSError as error:
            self._state = "broken" if self._was_up else "down"
            self._why_down = f"the engine process could not be started: {error}"
            raise Unavailable(self._why_down) from error
        await asyncio.shield(self._ready)

    def _spawn(self) -> None:
        """A new process, its sockets, and the tasks that attend to them."""
        loop = asyncio.get_running_loop()
        channel = Channel.create()
        self._context = zmq.asyncio.Context()
        self._incoming = self._context.socket(zmq.PULL)
        self._incoming.set_hwm(0)
        self._incoming.bind(channel.from_engine)
        # A plain socket for sending: its I/O thread does the work, so that a send never waits and needs no task.
        self._outgoing = zmq.Context(self._context).socket(zmq.PUSH)
        self._outgoing.set_hwm(0)
        self._outgoing.setsockopt(zmq.RECONNECT_IVL, 5)
        self._outgoing.connect(channel.to_engine)  # connecting, not binding: messages queue until the engine binds
        try:
            self._process = EngineProcess.spawn(
                self._options, self._script, channel, self._watchdog_timeout, self._log_level
            )
        except OSError:
            channel.remove()
            raise
        self._tasks += [
            loop.create_task(self._receive(), name="engine-receive"),
            loop.create_task(self._watch_process(self._process), name="engine-watch"),
        ]

    async def generate(self, submit: msg.Submit) -> AsyncGenerator[msg.Output, None]:
        """Run one request; yields its outputs, the last one of each choice with a ``finish_reason``.

        Closing the iterator, or cancelling the task that waits on it, aborts the request. Raises Unavailable while
        the engine is not up, UserError when ``rid`` is already open.
        """
        if not self.healthy:
            raise Unavailable(self._why_down, retry_after_s=5.0)
        if submit.rid in self._open:
            raise UserError(f"a request with the id {submit.rid!r} is already open", param="rid")
        entry = self._open[submit.rid] = _OpenRequest(set(range(submit.sampling.n)))
        try:
            self._send(submit)
            while True:
                while entry.items:
                    yield entry.items.popleft()
                if not entry.choices_left:
                    return
                entry.waiter = asyncio.get_running_loop().create_future()
                await entry.waiter
        finally:
            del self._open[submit.rid]
            if entry.choices_left:
                self._tell(msg.Abort(submit.rid))

    async def abort(self, rid: str) -> None:
        """End request ``rid`` (finish_reason 'abort'); unknown or ended ones are ignored."""
        self._tell(msg.Abort(rid))

    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(rid for rid, entry in self._open.items() if entry.choices_left)

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Gauges and counters of scheduler and memory. Raises Unavailable when the engine does not answer."""
        answer: msg.Stats = await self._ask(msg.StatsRequest, timeout_s)
        return answer.values

    async def flush(self, timeout_s: float = 60.0) -> bool:
        """Drop cached prefixes that nothing uses. False: requests are running or waiting, nothing was dropped."""
        answer: msg.Flushed = await self._ask(msg.Flush, timeout_s)
        return answer.done

    async def drain(self) -> None:
        """Take no new requests, and return when the open ones have ended."""
        if self._state not in ("up", "draining"):
            return
        if self._state == "up":
            self._state, self._why_down = "draining", "the server is draining: it finishes what runs, then stops"
            self._drained = asyncio.get_running_loop().create_future()
            self._send(msg.Drain())
        if self._drained is not None:
            await asyncio.shield(self._drained)

    async def close(self) -> None:
        """End the engine process; open requests end with 'abort'. May be called in any state."""
        was_running = self._state in ("up", "draining", "starting")
        self._state, self._why_down = "closed", "the engine has been closed"
        self._end_open("abort", "the engine was closed")  # first: the process may be deep in a long step
        process = self._process
        if process is not None and was_running:
            self._tell(msg.Shutdown())
            if not await process.joined(KILL_AFTER_S):
                log.warning("the engine process did not end within %.0f s; it is killed", KILL_AFTER_S)
                process.kill()
                await process.joined(KILL_AFTER_S)
        await self._tear_down()

    def _send(self, message: msg.ToEngine) -> None:
        if self._outgoing is None:
            raise Unavailable(self._why_down)
        self._outgoing.send(msg.encode(message), zmq.NOBLOCK)

    def _tell(self, message: msg.ToEngine) -> None:
        """Send what an engine that is gone need not hear."""
        if self._outgoing is not None:
            self._send(message)

    async def _ask(self, kind: type[msg.StatsRequest] | type[msg.Flush], timeout_s: float) -> Any:
        if self._state not in ("up", "draining"):
            raise Unavailable(self._why_down)
        self._next_number += 1
        number = self._next_number
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(kind(number))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            self._answers.pop(number, None)

    async def _receive(self) -> None:
        assert self._incoming is not None
        while True:
            self._handle(msg.decode_from_engine(await self._incoming.recv()))

    def _handle(self, message: msg.FromEngine) -> None:
        match message:
            case msg.Outputs(items):
                for output in items:
                    if (entry := self._open.get(output.rid)) is not None:
                        entry.put(output)
            case msg.Stats() | msg.Flushed():
                answer = self._answers.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case msg.Ready(info):
                self._info = info
                self._state, self._was_up = "up", True
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
            case msg.Drained():
                if self._drained is not None and not self._drained.done():
                    self._drained.set_result(None)
            case msg.Stuck(seconds):
                log.error("one step has lasted %.0f s; the engine process is killed", seconds)
                self._last_words = msg.Died(f"a step of the engine hung for more than {seconds:.0f} s")
                if self._process is not None:
                    self._process.kill()
            case msg.Stopped() | msg.Died():
                self._last_words = message

    async def _watch_process(self, process: EngineProcess) -> None:
        """Wait for the process's end; then end what is open, and start it anew where the policy allows."""
        await process.joined(None)
        while await self._pending_message():
            pass
        words = self._last_words
        if self._state == "closed":
            return
        if isinstance(words, msg.Stopped):
            self._stopped(words.reason)
            return
        text = (
            words.message
            if words is not None
            else f"it ended with exit status {process.exitcode}{_killed(process.exitcode)}"
        )
        hopeless = not self._was_up or (isinstance(words, msg.Died) and words.kind is not None)
        self._state, self._why_down = "down" if hopeless else "broken", f"the engine process died: {text}"
        log.error("%s", self._why_down)
        self._end_open("error", self._why_down)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(_boot_error(words, self._why_down))
        elif not hopeless:
            self._tasks.append(asyncio.get_running_loop().create_task(self._restart(), name="engine-restart"))

    async def _pending_message(self) -> bool:
        """Let the receiver take in what the process sent before it ended."""
        if self._incoming is None:
            return False
        waiting = bool(await self._incoming.poll(50))
        await asyncio.sleep(0)
        return waiting

    def _stopped(self, reason: str) -> None:
        self._state, self._why_down = "down", f"the engine has stopped: {reason}"
        self._end_open("abort", self._why_down)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(Unavailable(self._why_down))

    async def _restart(self) -> None:
        """Start the engine anew, and again should it die meanwhile, as often as the policy allows."""
        while self._state == "broken":
            now = time.monotonic()
            self._deaths = [t for t in self._deaths if now - t < RESTART_WINDOW_S]
            if len(self._deaths) >= self._max_restarts:
                self._state = "down"
                self._why_down += f"; not started again ({self._max_restarts} restarts within ten minutes)"
                log.error("%s", self._why_down)
                return
            self._deaths.append(now)
            await self._tear_down(keep=asyncio.current_task())
            if self.state != "broken":  # closed meanwhile
                return
            try:
                await self.start()
            except K3Error as error:
                log.error("the engine could not be started again: %s", error)

    def _end_open(self, reason: Literal["abort", "error"], message: str) -> None:
        for rid, entry in self._open.items():
            for choice in sorted(entry.choices_left):
                entry.put(msg.Output(rid=rid, choice=choice, finish_reason=reason, message=message))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Unavailable(message))
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def _tear_down(self, keep: asyncio.Task[None] | None = None) -> None:
        tasks = [t for t in self._tasks if t is not keep]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = [] if keep is None else [keep]
        for socket in (self._incoming, self._outgoing):
            if socket is not None:
                socket.close(linger=0)
        self._incoming = self._outgoing = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._process is not None:
            self._process.dispose()
            self._process = None


def _boot_error(words: msg.Stopped | msg.Died | None, text: str) -> K3Error:
    if isinstance(words, msg.Died) and words.kind is not None:
        return msg.USER_ERRORS[words.kind](words.message, param=words.param)
    return Unavailable(text)


def _killed(status: int | None) -> str:
    """What SIGKILL from outside means most often."""
    return " (SIGKILL: the system does that when memory runs out)" if status == -signal.SIGKILL else ""
