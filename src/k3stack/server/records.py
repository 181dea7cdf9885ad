"""What is kept of each request: its end, its counts, its moments; a line in the log, and the counters of /metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from k3stack.engine.messages import Output
from k3stack.scheduler import Target
from k3stack.server.metrics import HttpMetrics
from k3stack.server.tracing import TRACEPARENT, Tracer


@dataclass(slots=True)
class Record:
    """One request of the API, however many choices it has. Moments are of the monotonic clock."""

    rid: str
    endpoint: str
    stream: bool
    began: float = field(default_factory=time.monotonic)
    labels: dict[str, Any] = field(default_factory=dict)
    """``user``, ``metadata`` and the like, as the client sent them."""
    prompt_tokens: int = 0
    """Over all prompts of the request; known from the start."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    ends: list[str] = field(default_factory=list)
    """How each choice ended."""
    message: str | None = None
    target: Target | None = None
    traceparent: str | None = field(default_factory=TRACEPARENT.get)
    _sent: dict[tuple[str, int], int] = field(default_factory=dict)
    _cached: dict[str, int] = field(default_factory=dict)

    def take(self, output: Output) -> None:
        """Count an output's tokens, and note at its end what the engine says of it."""
        count = len(output.token_ids)
        if count:
            if self.first_token_s is None:
                self.first_token_s = time.monotonic() - self.began
            self.output_tokens += count
            key = (output.rid, output.choice)
            self._sent[key] = self._sent.get(key, 0) + count
        if output.finish_reason is None:
            return
        self.ends.append(output.finish_reason)
        self._cached[output.rid] = max(self._cached.get(output.rid, 0), output.cached_tokens)
        # Tokens of a matched stop string are sampled but never sent.
        self.output_tokens += max(0, output.output_tokens - self._sent.get((output.rid, output.choice), 0))
        self.message = self.message or output.message
        if output.times is not None and output.times.started is not None and self.queue_s is None:
            self.queue_s = output.times.started - output.times.queued

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused, each prompt counted once."""
        return sum(self._cached.values())

    @property
    def tokens_of_longest_choice(self) -> int:
        """Tokens so far of the choice that has the most."""
        return max(self._sent.values(), default=0)

    def against_target(self, total_s: float) -> str | None:
        """``met``, ``late_first_token`` or ``slow``, of a request that ended by itself after ``total_s``; else None.

        An answer that comes in one piece has one moment: that of its last token.
        """
        target = self.target
        if target is None or self.first_token_s is None or self.end not in ("stop", "length"):
            return None
        later = self.tokens_of_longest_choice - 1
        if not self.stream:
            return "met" if total_s <= target.first_s + target.token_s * later else "slow"
        if self.first_token_s > target.first_s:
            return "late_first_token"
        return "met" if total_s - self.first_token_s <= target.token_s * later + 1e-6 else "slow"

    @property
    def end(self) -> str:
        """The one end of the request: the worst of its choices'."""
        for worst in ("error", "rejected", "disconnect", "abort"):
            if worst in self.ends:
                return worst
        return self.ends[0] if self.ends else "error"


class Recorder:
    """Takes finished records. ``write`` gets a line of JSON each, or nothing when the log is off; ``tracer`` a span."""

    def __init__(self, metrics: HttpMetrics, write: Callable[[str], None] | None, tracer: Tracer | None = None) -> None:
        self._metrics = metrics
        self._write = write
        self._tracer = tracer

    def finish(self, record: Record, status: int) -> None:
        """Called exactly once a request."""
        total = time.monotonic() - record.began
        self._metrics.observe(record, total)
        if self._tracer is not None:
            self._tracer.finish(record, status, total)
        if self._write is None:
            return
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "rid": record.rid,
            "endpoint": record.endpoint,
            "stream": record.stream,
            "status": status,
            "end": record.end,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "reasoning_tokens": record.reasoning_tokens,
            "total_s": round(total, 4),
        }
        if record.queue_s is not None:
            line["queue_s"] = round(record.queue_s, 4)
        if record.first_token_s is not None:
            line["first_token_s"] = round(record.first_token_s, 4)
        if record.message:
            line["message"] = record.message
        line |= record.labels
        self._write(msgspec.json.encode(line).decode())


def write_to_stderr(line: str) -> None:
    """The request log goes where all logs go; stdout is for results."""
    sys.stderr.write(line + "\n")
