"""What every endpoint shares: the engine, the tokenizer, limits, the state of the server, and the way of a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from k3stack.chat.tokenizer import Tokenizer
from k3stack.config.geometry import ModelGeometry
from k3stack.config.options import EngineOptions, ServeOptions
from k3stack.engine.messages import Output, Submit
from k3stack.errors import BugError, K3Error, NotNow, Unavailable, UserError
from k3stack.scheduler import Target
from k3stack.server.history import History
from k3stack.server.metrics import HttpMetrics
from k3stack.server.records import Record, Recorder, write_to_stderr
from k3stack.server.tracing import Tracer
from k3stack.server.translate import Limits, TargetFields

log = logging.getLogger("k3stack.server")

CUT_S = 2.0
"""What the engine gets to end requests that are cut; one in the middle of a long step does not listen."""

Phase = Literal["starting", "ready", "draining", "cutting", "stopped"]


class Engine(Protocol):
    """What the server asks of ``engine.client.EngineClient`` (tests bring their own)."""

    @property
    def healthy(self) -> bool: ...
    @property
    def why_not_healthy(self) -> str | None: ...
    @property
    def state(self) -> str: ...
    @property
    def info(self) -> dict[str, Any]: ...
    def generate(self, submit: Submit) -> AsyncGenerator[Output, None]: ...
    def open_requests(self) -> tuple[str, ...]: ...
    async def start(self) -> None: ...
    async def abort(self, rid: str) -> None: ...
    async def stats(self) -> dict[str, Any]: ...
    async def flush(self) -> bool: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling where a request says nothing; from the checkpoint's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 0.95


@dataclass(slots=True)
class Service:
    """One server. ``phase`` moves only forward: starting, ready, draining, cutting, stopped (docs/serve.md)."""

    engine: Engine
    tokenizer: Tokenizer
    geometry: ModelGeometry
    engine_options: EngineOptions
    options: ServeOptions
    defaults: Defaults = field(default_factory=Defaults)
    phase: Phase = "starting"
    metrics: HttpMetrics = field(init=False)
    recorder: Recorder = field(init=False)
    tracer: Tracer | None = field(init=False)
    limits: Limits = field(init=False)
    history: History = field(init=False)
    _open: dict[int, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.engine_options
        self.metrics = HttpMetrics(self.model, Target(options.target_ttft_s, options.target_tpot_ms / 1000))
        self.history = History(self.stats)
        endpoint = self.options.otlp_traces_endpoint
        self.tracer = Tracer(endpoint, self.model) if endpoint else None
        write = None if self.options.disable_request_log else write_to_stderr
        self.recorder = Recorder(self.metrics, write, self.tracer)
        context = min(self.engine_options.context_length or self.geometry.context, self.geometry.context)
        self.limits = Limits(context, self.geometry.vocab, self.options.max_choices, self.options.max_stop_strings)

    @property
    def model(self) -> str:
        """The name that clients see."""
        return self.options.served_model_name or self.engine_options.model_path

    def target(self, request: TargetFields) -> Target:
        """The targets of a request: its own, or the server's (--target-ttft-s, --target-tpot-ms)."""
        options, token_ms = self.engine_options, request.target_tpot_ms
        return Target(
            options.target_ttft_s if request.target_ttft_s is None else request.target_ttft_s,
            (options.target_tpot_ms if token_ms is None else token_ms) / 1000,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names that ``model`` of a request may have."""
        return tuple(dict.fromkeys((self.model, self.engine_options.model_path)))

    async def start(self) -> None:
        """Start the engine; requests are answered 503 until it is up."""
        await self.engine.start()
        if (context := self.engine.info.get("context")) is not None:
            self.limits = Limits(
                int(context), self.geometry.vocab, self.options.max_choices, self.options.max_stop_strings
            )
        if self.phase == "starting":
            self.phase = "ready"

    def unavailable(self) -> str | None:
        """Why no request is taken now; None: one may come."""
        if self.phase == "starting":
            return "the server is starting: the model is being loaded"
        if self.phase != "ready":
            return "the server is draining: it finishes what runs, then stops"
        return None if self.engine.healthy else self.engine.why_not_healthy or "the engine is not up"

    def check_available(self) -> None:
        """Raises Unavailable while no request is taken."""
        if why := self.unavailable():
            raise Unavailable(why, retry_after_s=5.0)

    @property
    def open(self) -> int:
        """Requests of the API that have not ended."""
        return len(self._open)

    def records(self) -> list[Record]:
        """The records of those requests, the oldest first."""
        return list(self._open.values())

    @asynccontextmanager
    async def track(self, record: Record) -> AsyncIterator[None]:
        """Around a request: it is counted while open, and recorded once at its end, however it ends."""
        self._open[id(record)] = record
        self.metrics.in_flight.inc()
        status = 200
        try:
            yield
        except K3Error as e:
            status = e.http_status
            record.message = record.message or str(e)
            if not record.ends:
                record.ends.append("rejected" if status < 500 or status == 503 else "error")
            raise
        except (asyncio.CancelledError, GeneratorExit):
            record.ends.append("disconnect")
            status = 499
            raise
        except Exception:
            status = 500
            record.ends.append("error")
            raise
        finally:
            del self._open[id(record)]
            self.metrics.in_flight.dec()
            self.recorder.finish(record, status)

    async def run(self, submit: Submit, record: Record) -> AsyncGenerator[Output, None]:
        """The outputs of one request. A rejection or failure raises; an abort is an output like any other."""
        self.check_available()
        async with aclosing(self.engine.generate(submit)) as outputs:
            async for output in outputs:
                record.take(output)
                if output.finish_reason in ("rejected", "error"):
                    raise self.error_for(output)
                if output.finish_reason == "abort" and self.phase == "cutting":
                    raise Unavailable("the server stopped before the answer was complete", retry_after_s=5.0)
                yield output

    def error_for(self, output: Output) -> K3Error:
        """The exception that a rejected or failed output stands for."""
        message = output.message or "the engine gave no reason"
        if output.finish_reason == "rejected":
            if output.refusal in ("too_long", "invalid"):
                return UserError(message, param="messages")
            if output.refusal == "draining":
                return Unavailable(message, retry_after_s=5.0)
            return NotNow(message, retry_after_s=1.0)
        if not self.engine.healthy:
            return Unavailable(message, retry_after_s=5.0)
        return BugError(message)

    async def stats(self) -> Mapping[str, Any]:
        """The engine's numbers; none while it does not answer."""
        try:
            return await self.engine.stats()
        except NotNow:
            return {}

    async def drain(self) -> bool:
        """Take nothing new; let open requests finish within ``--drain-timeout``, then cut them. True: none was cut."""
        if self.phase not in ("starting", "ready"):
            return True
        was_ready = self.phase == "ready"
        self.phase = "draining"
        if was_ready:
            log.info("draining: %d open requests, at most %g s", self.open, self.options.drain_timeout)
        finished = await self._wait_until_idle(self.options.drain_timeout)
        if not finished:
            self.phase = "cutting"
            log.warning("drain timeout: cutting %d open requests", self.open)
            for rid in self.engine.open_requests():
                await self.engine.abort(rid)
            if not await self._wait_until_idle(CUT_S):
                await self.engine.close()
                await self._wait_until_idle(CUT_S)
        self.phase = "stopped"
        return finished

    async def _wait_until_idle(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._open and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return not self._open
