"""The engine process: start it, and its main loop between the message channel and the engine core."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import zmq

from k3stack.config.options import EngineOptions
from k3stack.engine import messages as msg
from k3stack.engine.scripted import Script
from k3stack.errors import UserError

log = logging.getLogger("k3stack.engine")

IDLE_WAIT_MS = 200
"""How long an idle engine sleeps between looks at its signals."""


SWITCH_INTERVAL_S = 0.0005
"""How long one thread may keep Python from the other: the executor's must not wait 5 ms (the default) for planning."""


class Core(Protocol):
    """What the process runs: ``EngineCore``, or a stand-in of a test."""

    @property
    def info(self) -> dict[str, Any]:
        """Facts for ``Ready``."""
        ...

    def submit(self, submit: msg.Submit) -> None: ...

    def abort(self, rid: str) -> None: ...

    def turn(self) -> bool:
        """One turn of planning and running; False when there is nothing to do."""
        ...

    def take_outputs(self) -> list[msg.Output]: ...

    def stats(self) -> dict[str, Any]: ...

    def flush(self) -> bool: ...

    def drain(self) -> None: ...

    @property
    def drained(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Channel:
    """The two one-way sockets between client and engine, in a folder that only this user can enter."""

    folder: str

    @classmethod
    def create(cls) -> Channel:
        return cls(tempfile.mkdtemp(prefix="k3-"))

    @property
    def to_engine(self) -> str:
        return f"ipc://{self.folder}/to"

    @property
    def from_engine(self) -> str:
        return f"ipc://{self.folder}/from"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineProcess:
    """A started engine process, seen from its parent."""

    def __init__(self, process: multiprocessing.process.BaseProcess, channel: Channel) -> None:
        self._process = process
        self._channel = channel
        # The process may need children of its own, so it is no daemon; this ends it should the parent forget to.
        atexit.register(self._abandon)

    @classmethod
    def spawn(
        cls,
        options: EngineOptions,
        script: Script | None,
        channel: Channel,
        watchdog_timeout: float,
        log_level: str = "info",
    ) -> EngineProcess:
        process = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=(options, script, channel, watchdog_timeout, log_level), name="k3-engine"
        )
        process.start()
        return cls(process, channel)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    async def joined(self, timeout_s: float | None) -> bool:
        """Wait for the end; False: it has not come within ``timeout_s``."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # A duplicate: several waiters may watch the same process, and a loop takes one reader a descriptor.
        descriptor = os.dup(self._process.sentinel)

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(descriptor, end)
        try:
            await asyncio.wait_for(ended, timeout_s)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._process.join()
        return True

    def kill(self) -> None:
        """SIGKILL, at once; harmless when it has ended."""
        with contextlib.suppress(ValueError):
            self._process.kill()

    def _abandon(self) -> None:
        self.kill()
        self._channel.remove()

    def dispose(self) -> None:
        """Forget an ended process and remove its sockets."""
        atexit.unregister(self._abandon)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._channel.remove()


def engine_main(
    options: EngineOptions, script: Script | None, channel: Channel, watchdog_timeout: float, log_level: str
) -> None:
    """Entry of the spawned process: build the core, say ``Ready``, run until told to stop."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _end_with_parent(channel)
    stop = _StopFlag()
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    context = zmq.Context()
    outgoing = context.socket(zmq.PUSH)
    outgoing.set_hwm(0)
    outgoing.connect(channel.from_engine)
    last: msg.Stopped | msg.Died
    try:
        from k3stack.engine.boot import build_core

        core = build_core(options, script)
        stop.booting = False
        watchdog = Watchdog(context, channel, watchdog_timeout)
        try:
            last = _Loop(core, context, channel, outgoing, watchdog, stop).run()
        finally:
            watchdog.stop()
            core.close()
    except SystemExit:
        last = msg.Stopped("SIGTERM while starting")
    except UserError as error:
        kind: Any = type(error).__name__
        last = msg.Died(str(error), kind if kind in msg.USER_ERRORS else "UserError", error.param)
    except Exception as error:  # noqa: BLE001  the process ends here: the parent gets the reason, the log the stack
        traceback.print_exc()
        last = msg.Died(f"{type(error).__name__}: {error}")
    outgoing.send(msg.encode(last))
    outgoing.close(linger=2000)
    context.term()
    sys.exit(0 if isinstance(last, msg.Stopped) else 1)


class _StopFlag:
    """SIGTERM's trace: while booting the process ends at once, afterwards the loop drains, then ends."""

    def __init__(self) -> None:
        self.raised = False
        self.booting = True

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
        if self.booting:
            raise SystemExit


def _end_with_parent(channel: Channel) -> None:
    """A thread that ends this process when its parent is gone, however busy the main thread is."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        channel.remove()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


class Watchdog:
    """Reports a turn that lasts longer than ``timeout_s``, with the stacks of all threads in the log."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], channel: Channel, timeout_s: float) -> None:
        self._timeout = timeout_s
        self._since: float | None = None
        self._stop = threading.Event()
        self._context, self._channel = context, channel
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        self._since = None

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.connect(self._channel.from_engine)
        reported: float | None = None
        while not self._stop.wait(min(1.0, self._timeout / 4)):
            since = self._since
            if since is None or since == reported:
                continue
            seconds = time.monotonic() - since
            if seconds > self._timeout:
                reported = since
                print(f"k3-engine: a turn has lasted {seconds:.0f} s; stacks follow", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                socket.send(msg.encode(msg.Stuck(seconds)))
        socket.close(linger=0)


class _Loop:
    """Messages in, turns of the core, outputs out."""

    def __init__(
        self,
        core: Core,
        context: zmq.Context[zmq.Socket[bytes]],
        channel: Channel,
        outgoing: zmq.Socket[bytes],
        watchdog: Watchdog,
        stop: _StopFlag,
    ) -> None:
        self._core = core
        self._incoming = context.socket(zmq.PULL)
        self._incoming.set_hwm(0)
        self._incoming.bind(channel.to_engine)
        self._outgoing = outgoing
        self._watchdog = watchdog
        self._stop = stop
        self._shutdown = False
        self._drain_asked = False
        self._drain_said = False

    def run(self) -> msg.Stopped:
        self._send(msg.Ready(self._core.info))
        try:
            while True:
                self._take_messages()
                if self._shutdown:
                    return msg.Stopped("shut down")
                busy = self._turn()
                if self._ended():
                    return msg.Stopped("drained on SIGTERM")
                if not busy:
                    self._incoming.poll(IDLE_WAIT_MS)
        finally:
            self._incoming.close(linger=0)

    def _turn(self) -> bool:
        """One turn; its outputs leave even if it raises: open requests have got their ends by then."""
        self._watchdog.begin()
        try:
            return self._core.turn()
        finally:
            self._watchdog.end()
            if outputs := self._core.take_outputs():
                self._send(msg.Outputs(tuple(outputs)))

    def _send(self, message: msg.FromEngine) -> None:
        self._outgoing.send(msg.encode(message))

    def _ended(self) -> bool:
        """Drive draining; True when SIGTERM has been answered and nothing is left to do."""
        if self._stop.raised and not self._drain_asked:
            log.info("SIGTERM: finishing what runs, then ending")
            self._core.drain()
            self._drain_asked = True
        if self._drain_asked and not self._drain_said and self._core.drained:
            self._send(msg.Drained())
            self._drain_said = True
        return self._stop.raised and self._drain_said

    def _take_messages(self) -> None:
        while True:
            try:
                data = self._incoming.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(msg.decode_to_engine(data))

    def _handle(self, message: msg.ToEngine) -> None:
        match message:
            case msg.Submit():
                self._core.submit(message)
            case msg.Abort(rid):
                self._core.abort(rid)
            case msg.StatsRequest(number):
                self._send(msg.Stats(number, self._core.stats()))
            case msg.Flush(number):
                self._send(msg.Flushed(number, self._core.flush()))
            case msg.Drain():
                self._core.drain()
                self._drain_asked = True
            case msg.Shutdown():
                self._shutdown = True
