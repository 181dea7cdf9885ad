"""/metrics: counters of the HTTP layer, and the engine's gauges, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric

from k3stack.scheduler import Target
from k3stack.server.engine_metrics import families

if TYPE_CHECKING:
    from k3stack.server.records import Record

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class HttpMetrics:
    """Counters of one server; the metric names are listed in docs/metrics.md."""

    def __init__(self, model: str, target: Target) -> None:
        self.registry = CollectorRegistry()
        self.target = target
        # Moments of creation tell nothing that the server's own start does not, and double the page.
        disable_created_metrics()  # type: ignore[no-untyped-call]

        def counter(name: str, words: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, words, labels, registry=self.registry)

        def gauge(name: str, words: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(name, words, labels, registry=self.registry)

        def histogram(name: str, words: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, words, registry=self.registry, buckets=buckets)

        self.requests = counter("k3_requests", "Requests by endpoint and end", ("endpoint", "end"))
        self.prompt_tokens = counter("k3_prompt_tokens", "Prompt tokens of finished requests")
        self.cached_tokens = counter("k3_cached_tokens", "Prompt tokens that were not computed again")
        self.output_tokens = counter("k3_output_tokens", "Tokens sampled for finished requests")
        self.reasoning_tokens = counter("k3_reasoning_tokens", "Output tokens that were thinking")
        self.in_flight = gauge("k3_requests_in_flight", "Requests that have not ended")
        self.first_token = histogram("k3_first_token_seconds", "From arrival to the first token", _LATENCY)
        self.queue = histogram("k3_queue_seconds", "From arrival to the first computed chunk", _LATENCY)
        self.per_token = histogram("k3_output_token_seconds", "Mean time of one token after the first", _PER_TOKEN)
        self.total = histogram("k3_request_seconds", "From arrival to the end", _LATENCY)
        self.against_target = counter("k3_target_requests", "Ended requests against their targets", ("result",))
        targets = gauge("k3_target_seconds", "The server's targets", ("of",))
        targets.labels("first_token").set(target.first_s)
        targets.labels("token").set(target.token_s)
        gauge("k3_model_info", "The served model", ("model",)).labels(model).set(1)
        self._engine = _EngineNumbers()
        self.registry.register(self._engine)

    def observe(self, record: Record, total_s: float) -> None:
        """Count one finished request that took ``total_s`` seconds."""
        self.requests.labels(record.endpoint, record.end).inc()
        self.prompt_tokens.inc(record.prompt_tokens)
        self.cached_tokens.inc(record.cached_tokens)
        self.output_tokens.inc(record.output_tokens)
        self.reasoning_tokens.inc(record.reasoning_tokens)
        self.total.observe(total_s)
        if (result := record.against_target(total_s)) is not None:
            self.against_target.labels(result).inc()
        if record.queue_s is not None:
            self.queue.observe(record.queue_s)
        if record.first_token_s is not None:
            self.first_token.observe(record.first_token_s)
            if record.output_tokens > len(record.ends):
                later = record.output_tokens - len(record.ends)
                self.per_token.observe((total_s - record.first_token_s) / later * max(1, len(record.ends)))

    def render(self, stats: Mapping[str, Any]) -> bytes:
        """The exposition, with the engine's ``stats``."""
        self._engine.values = stats
        return generate_latest(self.registry)


class _EngineNumbers:
    """The engine's numbers of the last scrape."""

    def __init__(self) -> None:
        self.values: Mapping[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        return families(self.values)
