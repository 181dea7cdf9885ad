"""Options that `k3 bench` and `k3 simulate` share: the workload, the target, and what is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3stack.cli.arguments import Parser, say
from k3stack.errors import UserError

if TYPE_CHECKING:
    from k3stack.workload.choose import WorkloadSpec
    from k3stack.workload.records import Record
    from k3stack.workload.sustained import Point
    from k3stack.workload.target import Target


def add_load_options(parser: Parser) -> None:
    """Workload, load, lengths, target, output."""
    load = parser.add_argument_group("load")
    load.add_argument("--workload", default="fresh", help="fresh, long, interference, or a trace file (default: fresh)")
    load.add_argument("--rate", type=float, help="requests a second (open loop)")
    load.add_argument("--concurrency", type=int, help="requests at a time (closed loop); interference: the streams")
    load.add_argument("--requests", type=int, help="how many requests in all, instead of --duration")
    load.add_argument("--duration", type=float, default=240.0, help="seconds of arrivals (default: 240)")
    load.add_argument("--arrivals", choices=("poisson", "constant", "bursty"), default="poisson")
    load.add_argument("--input-len", type=int, help="prompt tokens of every request (long: of the history)")
    load.add_argument("--output-len", type=int, help="answer tokens of every request")
    load.add_argument("--answer-mean", type=float, help="mean answer length of fresh (default: 264)")
    load.add_argument("--turns", type=int, help="turns a session of long (default: 4)")
    load.add_argument("--time-scale", type=float, default=1.0, help="replay a trace so many times as fast")
    load.add_argument("--seed", type=int, default=0)
    goal = parser.add_argument_group("target")
    goal.add_argument("--ttft", type=float, default=2.0, help="seconds to the first token (default: 2)")
    goal.add_argument("--tpot", type=float, default=25.0, help="milliseconds a token after it (default: 25)")
    goal.add_argument("--share", type=float, default=0.95, help="share a sustained rate must keep (default: 0.95)")
    goal.add_argument("--sustained", action="store_true", help="search the highest rate that keeps the share")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--records", metavar="FILE", help="write one record a request (JSON lines), for replay and --compare"
    )
    out.add_argument("--png", metavar="DIR", help="write the figures as PNG files into this folder")
    out.add_argument("--html", metavar="FILE", help="write one HTML page with tables and figures")


def read_spec(args: argparse.Namespace) -> WorkloadSpec:
    """The workload the options ask for."""
    from k3stack.workload.choose import WorkloadSpec

    rate = args.rate
    if rate is None and args.concurrency is None and args.workload in ("fresh", "long"):
        raise UserError(
            f"workload {args.workload}: give --rate (open loop) or --concurrency (closed loop)", param="rate"
        )
    return WorkloadSpec(
        name=args.workload,
        rate=rate,
        concurrency=args.concurrency,
        duration_s=args.duration,
        seed=args.seed,
        input_len=args.input_len,
        output_len=args.output_len,
        answer_mean=args.answer_mean,
        requests=args.requests,
        turns=args.turns,
        arrivals=args.arrivals,
        time_scale=args.time_scale,
    )


def read_target(args: argparse.Namespace) -> Target:
    """The target the options ask for."""
    from k3stack.workload.target import Target

    return Target(args.ttft, args.tpot / 1000, args.share).validate()


def print_summary(summary: Mapping[str, Any], title: str) -> None:
    """The table for people, on stdout (it is the result when --json is not given)."""
    from rich.console import Console
    from rich.table import Table

    from k3stack.workload.tables import summary_rows

    table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    Console().print(table)


def check_outputs(args: argparse.Namespace) -> None:
    """Before a run of minutes: UserError where a file's folder is not there, or what is named is a folder."""
    for option in ("records", "html"):
        if path := getattr(args, option):
            if Path(path).is_dir():
                raise UserError(f"--{option} {path}: is a folder; name a file in it", param=option)
            if not Path(path).absolute().parent.is_dir():
                raise UserError(f"--{option} {path}: there is no folder {Path(path).parent}", param=option)
    if args.png and Path(args.png).exists() and not Path(args.png).is_dir():
        raise UserError(f"--png {args.png}: is a file; a folder is wanted", param="png")


@contextmanager
def writing(path: str, option: str) -> Iterator[None]:
    """A file that cannot be written is the user's error, and names the option."""
    try:
        yield
    except OSError as e:
        raise UserError(f"--{option} {path}: {e.strerror or e}", param=option) from None


def write_outputs(
    args: argparse.Namespace,
    title: str,
    records: list[Record],
    summary: Mapping[str, Any],
    target: Target,
    window_s: tuple[float, float] | None,
    points: list[Point],
) -> None:
    """Records, PNG files and the HTML page, as far as they were asked for."""
    from k3stack.workload import figures
    from k3stack.workload.records import write_records
    from k3stack.workload.tables import summary_rows

    if args.records:
        with writing(args.records, "records"):
            write_records(args.records, records, {"title": title, "summary": dict(summary)})
        say(f"records: {args.records}")
    if not (args.png or args.html):
        return
    drawn: list[tuple[str, Callable[[], Any]]] = [("Latency", lambda: figures.latency_figure(records, target))]
    drawn.append(("Distributions", lambda: figures.distribution_figure(records, target)))
    if window_s:
        drawn.append(("Streams", lambda: figures.streams_figure(records, window_s)))
    if points:
        drawn.append(("Sustained rate", lambda: figures.sustained_figure({title: points}, target)))
    if args.png:
        folder = Path(args.png)
        with writing(args.png, "png"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, draw in drawn:
                figures.save_png(draw(), folder / (name.lower().replace(" ", "-") + ".png"))
        say(f"figures: {folder}")
    if args.html:
        page = figures.html_report(title, summary_rows(summary), [(name, draw()) for name, draw in drawn])
        with writing(args.html, "html"):
            Path(args.html).write_text(page)
        say(f"report: {args.html}")


def compare_records(first: str, second: str, target: Target) -> list[tuple[str, str, str, str]]:
    """Two files of records side by side."""
    from k3stack.workload.records import read_records
    from k3stack.workload.report import summarize
    from k3stack.workload.tables import comparison_rows

    a, b = (summarize(read_records(path)[0], target=target) for path in (first, second))
    return comparison_rows(a, b)
