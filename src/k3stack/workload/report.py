"""One report for real and simulated runs: shares, percentiles with confidence intervals, rates, interference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from k3stack.workload.records import Record
from k3stack.workload.target import Target

PERCENTILES = (50, 90, 99)
Z95 = 1.959964


def wilson(good: int, n: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval)."""
    if n == 0:
        return (0.0, 1.0)
    p, z2 = good / n, Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return (max(0.0, centre - half), min(1.0, centre + half))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """p50, p90, p99 and mean, and a 95 % interval for each percentile from order statistics."""
    if not values:
        return {**{f"p{p}": None for p in PERCENTILES}, "mean": None, "n": 0}
    x = np.sort(np.asarray(values, dtype=float))
    n = len(x)
    out: dict[str, Any] = {}
    for p in PERCENTILES:
        q = p / 100
        out[f"p{p}"] = float(np.quantile(x, q))
        half = Z95 * math.sqrt(n * q * (1 - q))
        low, high = max(0, math.floor(n * q - half)), min(n - 1, math.ceil(n * q + half))
        out[f"p{p}_ci"] = [float(x[low]), float(x[high])]
    out["mean"] = float(x.mean())
    out["n"] = n
    return out


def stream_output_lost(records: Sequence[Record], window: tuple[float, float]) -> float | None:
    """Share of the watched streams' output that prompts in ``window`` cost, against the quiet time before it.

    The quiet rate is taken from the second half of the time before the window, when all streams decode.
    """
    times = [t for r in records if r.stream and r.token_s for t in r.token_s]
    if not times:
        return None
    x = np.asarray(times)
    start, end = window
    quiet = ((x >= start / 2) & (x < start)).sum() / (start / 2)
    busy = ((x >= start) & (x < end)).sum() / (end - start)
    return None if quiet == 0 else float(1 - busy / quiet)


def summarize(
    records: Sequence[Record],
    *,
    target: Target,
    gpus: int = 1,
    duration_s: float | None = None,
    window_s: tuple[float, float] | None = None,
    max_running: int | None = None,
    binding: str | None = None,
) -> dict[str, Any]:
    """The fields that ``k3 bench`` and ``k3 simulate`` print. Requests that failed or never ended count as misses."""
    measured = [r for r in records if not r.stream] or list(records)
    good = sum(target.met(r) for r in measured)
    done = [r for r in records if r.ok and r.finished_s is not None]
    end = max((r.finished_s for r in done if r.finished_s is not None), default=0.0)
    begin = min((r.arrival_s for r in records), default=0.0)
    elapsed = max(end - begin, 1e-9)
    output = sum(r.output_tokens for r in records)
    prompt = sum(r.prompt_tokens for r in records)
    cached = sum(min(r.cached_tokens, r.prompt_tokens) for r in records)
    low, high = wilson(good, len(measured))
    return {
        "requests": len(measured),
        "completed": sum(r.ok for r in measured),
        "failed": sum(r.end in ("error", "rejected", "abort") for r in measured),
        "share_within_target": good / len(measured) if measured else None,
        "share_within_target_ci": [low, high],
        "target": {"ttft_s": target.ttft_s, "tpot_ms": target.tpot_s * 1000},
        "goodput_requests_per_s": good / (duration_s or elapsed),
        "requests_per_s": len(done) / elapsed,
        "ttft_s": spread([r.ttft_s for r in measured if r.ttft_s is not None]),
        "tpot_ms": spread([1000 * r.tpot_s for r in measured if r.tpot_s is not None]),
        "longest_gap_s": max((r.longest_gap_s for r in records), default=0.0),
        "latest_start_s": max((r.started_s - r.arrival_s for r in records if r.started_s is not None), default=None),
        "output_tokens_per_s": output / elapsed,
        "total_tokens_per_s_per_gpu": (output + prompt) / elapsed / gpus,
        "stream_output_lost": stream_output_lost(records, window_s) if window_s else None,
        "kv_hit_rate": cached / prompt if prompt else 0.0,
        "max_running": max_running if max_running is not None else _peak_concurrency(records),
        "binding": binding,
        "elapsed_s": elapsed,
    }


def _peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests between their first token and their end at one time (a client's view of 'running')."""
    events = [(r.first_s, 1) for r in records if r.first_s is not None]
    events += [(r.finished_s, -1) for r in records if r.first_s is not None and r.finished_s is not None]
    peak = now = 0
    for _, step in sorted(events, key=lambda e: (e[0] or 0.0, e[1])):
        now += step
        peak = max(peak, now)
    return peak
