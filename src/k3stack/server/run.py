"""Starts a server and sees it through: boot, signals, drain, the engine's end, exit status."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from k3stack.chat.tokenizer import load_tokenizer
from k3stack.config.files import read_json
from k3stack.config.flags import ServeCommand
from k3stack.config.geometry import load_geometry
from k3stack.config.sampling import SamplingParams
from k3stack.engine.client import EngineClient
from k3stack.errors import CheckpointError, K3Error, Unavailable, UserError
from k3stack.server.app import build_app
from k3stack.server.connections import connections, notice_the_vanished
from k3stack.server.service import Defaults, Engine, Service

log = logging.getLogger("k3stack.server")

CUT_STATUS = Unavailable.exit_code
"""Exit status when draining ran out of time and requests were cut."""


def serve(command: ServeCommand, announce: Callable[[str], None]) -> int:
    """Serve until told to stop; returns the exit status. ``announce`` gets the address once requests are taken."""
    setup_logging(command.serve.log_level)
    for note in command.notes:
        log.info("%s", note)
    service = build_service(command, EngineClient(
        command.engine,
        watchdog_timeout=command.serve.watchdog_timeout,
        max_restarts=command.serve.max_restarts,
        log_level=command.serve.log_level,
    ))  # fmt: skip
    listener = listen(command.serve.host, command.serve.port)
    host, port = listener.getsockname()[:2]
    runner = Runner(service, announce=lambda: announce(f"http://{_shown(host)}:{port}"))
    return runner.run_until_stopped(listener)


def build_service(command: ServeCommand, engine: Engine) -> Service:
    """Everything but the engine's start: geometry, tokenizer, defaults. Raises UserError for what does not fit."""
    folder = Path(command.engine.model_path)
    geometry = load_geometry(folder)
    tokenizer = load_tokenizer(command.engine.tokenizer_path or folder, geometry)
    return Service(engine, tokenizer, geometry, command.engine, command.serve, read_defaults(folder))


def read_defaults(folder: Path) -> Defaults:
    """temperature and top_p of the checkpoint's generation_config.json, or Kimi-K3's."""
    file = folder / "generation_config.json"
    if not file.exists():
        return Defaults()
    try:
        raw = read_json(file, error=CheckpointError)
        found = Defaults(
            *(
                default if raw.get(name) is None else float(raw[name])
                for name, default in (("temperature", Defaults().temperature), ("top_p", Defaults().top_p))
            )
        )
    except (ValueError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file}: expected a JSON object with numbers: {e}") from None
    try:
        SamplingParams(temperature=found.temperature, top_p=found.top_p).validate()
    except UserError as e:
        raise CheckpointError(f"{file}: {e}") from None
    return found


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is known before minutes of loading."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as e:
        found.close()
        raise UserError(f"--host {host} --port {port}: {e.strerror or e}", param="--port") from None
    return found


def setup_logging(level: str) -> None:
    """One format for the whole process, on stderr."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Runner(uvicorn.Server):
    """uvicorn with our signals: the first SIGTERM or SIGINT drains, the second ends at once."""

    def __init__(self, service: Service, announce: Callable[[], None]) -> None:
        config = uvicorn.Config(
            build_app(service),
            http=connections(service.options.client_timeout),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=75,
        )
        super().__init__(config)
        self._service = service
        self._announce = announce
        self._status = 0
        self._error: K3Error | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def run_until_stopped(self, listener: socket.socket) -> int:
        """Serve on ``listener``; returns the exit status, or raises what kept the engine from starting."""
        notice_the_vanished(listener, self._service.options.client_timeout)
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self._everything(listener))
        if self._error is not None:
            raise self._error
        return self._status

    async def _everything(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        boot = asyncio.create_task(self._boot(), name="boot")
        watch = asyncio.create_task(self._watch_engine(), name="watch-engine")
        history = asyncio.create_task(self._service.history.follow(), name="history")
        try:
            await self.serve(sockets=[listener])
        finally:
            for task in (boot, watch, history, self._draining):
                if task is not None and not task.done():
                    task.cancel()
            await self._service.engine.close()
            if self._service.tracer is not None:
                await asyncio.to_thread(self._service.tracer.close)

    async def _boot(self) -> None:
        try:
            await self._service.start()
        except K3Error as e:
            self._error = e
            self.should_exit = True
            return
        self._announce()

    async def _watch_engine(self) -> None:
        """Exit when the engine is down for good: its client starts it anew as often as it may."""
        while self._service.phase in ("starting", "ready"):
            await asyncio.sleep(0.5)
            if self._service.phase == "ready" and self._service.engine.state == "down":
                self._error = Unavailable(self._service.engine.why_not_healthy or "the engine is down")
                self.should_exit = True
                return

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs as a signal handler, between two instructions of the loop: it only leaves word."""
        if self._signals or self._loop is None:
            log.warning("a second signal: ending at once")
            self._service.phase = "cutting"
            self._status = CUT_STATUS
            self.should_exit = self.force_exit = True
        else:
            self._signals += 1
            self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, name: str) -> None:
        log.info("%s: draining", name)
        self._draining = asyncio.create_task(self._drain_and_exit(), name="drain")

    async def _drain_and_exit(self) -> None:
        if not await self._service.drain():
            self._status = CUT_STATUS
        self.should_exit = True
