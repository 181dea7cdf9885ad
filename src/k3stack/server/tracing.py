"""OpenTelemetry traces, where asked for: one span a request, made at its end from its record.

The extra ``trace`` brings the SDK. A request's ``traceparent`` header makes the span part of the caller's trace.
"""

from __future__ import annotations

import re
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from k3stack.errors import UserError

if TYPE_CHECKING:
    from k3stack.server.records import Record

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The header of the request that is being answered."""

_HEADER = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceParent:
    """ASGI middleware that keeps the header where records find it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = [value for name, value in scope["headers"] if name == b"traceparent"]
            TRACEPARENT.set(found[0].decode("latin-1") if found else None)
        await self._app(scope, receive, send)


class Tracer:
    """Sends spans to an OTLP endpoint over HTTP, in the background. ``exporter``: another one, for tests."""

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as e:
            raise UserError(
                f"--otlp-traces-endpoint needs the extra 'trace' (pip install 'k3stack[trace]'): {e}",
                param="--otlp-traces-endpoint",
            ) from None
        self._trace = trace
        self._provider = TracerProvider(resource=Resource.create({"service.name": "k3stack"}))
        if exporter is None:
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        else:
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("k3stack")
        self._model = model

    def finish(self, record: Record, status: int, total_s: float) -> None:
        """The span of one finished request."""
        end = time.time_ns()
        start = end - int(total_s * 1e9)
        span = self._tracer.start_span(
            f"k3 {record.endpoint}",
            context=self._parent(record.traceparent),
            kind=self._trace.SpanKind.SERVER,
            start_time=start,
            attributes=self._attributes(record, status),
        )
        if record.first_token_s is not None:
            span.add_event("first token", timestamp=start + int(record.first_token_s * 1e9))
        if record.end == "error":
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, record.message or ""))
        span.end(end_time=end)

    def _attributes(self, record: Record, status: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.provider.name": "k3stack",
            "gen_ai.operation.name": "chat" if record.endpoint in ("chat", "messages") else "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": record.rid,
            "gen_ai.response.finish_reasons": tuple(record.ends),
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "http.response.status_code": status,
            "k3.cached_tokens": record.cached_tokens,
            "k3.reasoning_tokens": record.reasoning_tokens,
        }
        if record.queue_s is not None:
            found["k3.queue_s"] = record.queue_s
        if record.first_token_s is not None:
            found["k3.first_token_s"] = record.first_token_s
        return found

    def _parent(self, header: str | None) -> Any:
        """The caller's span as a context; none where the header is absent or malformed."""
        match = _HEADER.fullmatch(header or "")
        if match is None:
            return None
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        context = self._trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=self._trace.TraceFlags(flags))
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(context))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
