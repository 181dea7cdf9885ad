"""What a GPU does, kernel after kernel, as CUPTI saw it (``benchmarks.rank --timeline``, ``benchmarks.gpu_idle``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device, microseconds since the first one."""

    name: str
    begin: float
    end: float


def spans_of(run: Callable[[], Any]) -> list[Span]:
    """Everything that the device does in ``run``, by time of start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    raw = [
        e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us() > 0
    ]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in raw)
    first = spans[0][0] if spans else 0.0
    return [Span(short(name), begin - first, end - first) for begin, end, name in spans]


def short(name: str) -> str:
    """A kernel's name without what its template arguments add."""
    name = re.sub(r"^void ", "", name)
    return name.split("<")[0].split("(")[0].rsplit("::", 1)[-1][:48]


def busy(spans: list[Span]) -> float:
    """Microseconds in which at least one of ``spans`` runs."""
    total = reach = 0.0
    for span in spans:
        total += max(span.end - max(span.begin, reach), 0.0)
        reach = max(reach, span.end)
    return total


def by_kernel(spans: list[Span]) -> list[dict[str, Any]]:
    """Per kernel: how often, its own time, and the time from the end of what ran before it to its start."""
    count: dict[str, int] = defaultdict(int)
    own: dict[str, float] = defaultdict(float)
    gap: dict[str, float] = defaultdict(float)
    reach = spans[0].begin if spans else 0.0
    for span in spans:
        count[span.name] += 1
        own[span.name] += span.end - span.begin
        gap[span.name] += span.begin - reach
        reach = max(reach, span.end)
    order = sorted(own, key=lambda name: -own[name])
    return [
        {
            "kernel": name,
            "count": count[name],
            "ms": round(own[name] / 1e3, 3),
            "each_us": round(own[name] / count[name], 2),
            "gap_each_us": round(gap[name] / count[name], 2),
        }
        for name in order
    ]
