"""One span a request, in the caller's trace."""

from __future__ import annotations

import httpx
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from k3stack.server.tracing import Tracer
from tests.unit.server.harness import Live, saying


def test_a_request_is_a_span_of_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with Live(saying("a[TC][RO]b[RC][MC]"), otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as live:
        assert live.service.tracer is not None
        live.service.tracer.close()
        live.service.recorder._tracer = Tracer("", "tiny", exporter)
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        for header in (f"00-{trace}-{parent}-01", "nonsense"):
            answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, headers={"traceparent": header})
            assert answer.status_code == 200
    first, second = exporter.get_finished_spans()
    assert first.context.trace_id == int(trace, 16)
    assert first.parent is not None and first.parent.span_id == int(parent, 16)
    assert second.parent is None
    assert first.name == "k3 chat" and [event.name for event in first.events] == ["first token"]
    assert first.attributes is not None and first.start_time is not None and first.end_time is not None
    assert first.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert first.attributes["gen_ai.usage.input_tokens"] == len(live.engine.submits[0].prompt_ids)
    assert first.start_time < first.events[0].timestamp <= first.end_time
