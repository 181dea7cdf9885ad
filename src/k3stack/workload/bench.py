"""``k3 bench``: run a workload against a server, refuse to report what the client itself distorted, search rates."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from k3stack.errors import NotNow, UserError
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.client import ClientOptions, Lag, LoadClient, RunResult
from k3stack.workload.records import Record
from k3stack.workload.report import summarize
from k3stack.workload.sustained import Point, Sustained, find_sustained
from k3stack.workload.target import Target
from k3stack.workload.text import TextMaker

T = TypeVar("T")
MAX_LAG_S = 0.020
MAX_LATE_SEND_S = 0.050


class BenchRun(msgspec.Struct, kw_only=True):
    """All that one ``k3 bench`` measured."""

    records: list[Record]
    summary: dict[str, Any]
    window_s: tuple[float, float] | None = None
    points: list[Point] = msgspec.field(default_factory=list)


def run_bench(
    spec: WorkloadSpec,
    options: ClientOptions,
    target: Target,
    *,
    gpus: int = 1,
    tokens_per_word: float | None = None,
    progress: bool = True,
) -> BenchRun:
    """One run. Raises NotNow when the client was the bottleneck: its figures would describe the client."""
    workload = build_workload(spec)
    client = LoadClient(options, TextMaker(spec.seed, tokens_per_word))
    with _bar(workload.requests(), spec.name, progress) as advance:
        result = run_loop(client.run(workload, on_progress=lambda _: advance()))
    check_lag(result.lag, target)
    summary = summarize(
        result.records, target=target, gpus=gpus, duration_s=workload.duration_s, window_s=workload.window_s
    )
    summary["client"] = msgspec.to_builtins(result.lag)
    summary["errors"] = _errors(result)
    return BenchRun(records=result.records, summary=summary, window_s=workload.window_s)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on uvloop, where there is one: an event costs about half."""
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def run_sustained(
    spec: WorkloadSpec,
    options: ClientOptions,
    target: Target,
    *,
    gpus: int = 1,
    tokens_per_word: float | None = None,
    repeats: int = 3,
    progress: bool = True,
    on_point: Callable[[Point], None] | None = None,
) -> BenchRun:
    """Search for the sustained rate, then report the run nearest to it."""
    if spec.rate is None:
        raise UserError("--sustained searches the rate: give --rate as the rate to start from", param="rate")
    runs: dict[float, BenchRun] = {}

    def measure(rate: float, repeat: int) -> tuple[int, int]:
        again = msgspec.structs.replace(spec, rate=rate, seed=spec.seed + 1000 * repeat)
        run = run_bench(again, options, target, gpus=gpus, tokens_per_word=tokens_per_word, progress=progress)
        runs[rate] = run
        n = run.summary["requests"]
        return round(run.summary["share_within_target"] * n), n

    found: Sustained = find_sustained(
        measure, share=target.share, start=spec.rate, max_repeats=repeats, on_point=on_point
    )
    rate = found.rate if found.rate in runs else min(runs)
    best = runs[rate]
    best.summary["sustained_rate"] = found.rate
    best.summary["sustained_above"] = found.above
    best.summary["runs"] = found.runs
    best.points = found.points
    return best


def check_lag(lag: Lag, target: Target) -> None:
    """Refuse figures that the client's own lag would have coloured by more than a few percent of the target."""
    limit = max(MAX_LAG_S, 0.05 * target.ttft_s)
    if lag.p99_s > limit:
        raise NotNow(
            f"the load client was the bottleneck: its event loop was {1000 * lag.p99_s:.0f} ms late (p99, limit "
            f"{1000 * limit:.0f} ms) at {100 * lag.cpu_share:.0f} % of a core. Lower the rate or the concurrency, move "
            "the client off the server's machine, or run several clients with different seeds."
        )
    if lag.late_sends_p99_s > max(MAX_LATE_SEND_S, 0.05 * target.ttft_s):
        raise NotNow(
            f"the load client sent requests {1000 * lag.late_sends_p99_s:.0f} ms late (p99): the arrivals were not the "
            "ones asked for. Lower the rate, or run several clients with different seeds."
        )


def _errors(result: RunResult) -> dict[str, int]:
    counts: dict[str, int] = {}
    for r in result.records:
        if r.error:
            counts[r.error[:120]] = counts.get(r.error[:120], 0) + 1
    return dict(sorted(counts.items(), key=lambda e: -e[1])[:8])


class _bar:
    """A progress bar on stderr (stdout is the result's); silent where nobody looks."""

    def __init__(self, total: int, name: str, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            disable=not enabled or not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(name, total=total)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.advance(self._task)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
