"""Options that `k3 bench` and `k3 simulate` share: the workload, the target, and what is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3stack.cli.arguments import Parser, above, flag_of, say, whole
from k3stack.config.files import check_writable, writing
from k3stack.errors import UserError

if TYPE_CHECKING:
    from k3stack.workload.choose import WorkloadSpec
    from k3stack.workload.records import Record
    from k3stack.workload.sustained import Point
    from k3stack.workload.target import Target

MAX_REQUESTS = 1_000_000
"""Requests of one run: each is kept until its end, for the summary."""
MAX_TOKENS = 4_194_304
"""Of a prompt or an answer: four times the longest context of the models served here."""


def add_load_options(parser: Parser) -> None:
    """Workload, load, lengths, target, output."""
    load = parser.add_argument_group("load")
    load.add_argument("--workload", default="fresh", help="fresh, long, interference, or a trace file (default: fresh)")
    load.add_argument("--rate", type=above(0, 1e6), help="requests a second (open loop)")
    load.add_argument(
        "--concurrency", type=whole(1, 100_000), help="requests at a time (closed loop); interference: the streams"
    )
    load.add_argument("--requests", type=whole(1, MAX_REQUESTS), help="how many requests in all, instead of --duration")
    load.add_argument("--duration", type=above(0, 1e9), help="seconds of arrivals (default: 240)")
    load.add_argument("--arrivals", choices=("poisson", "constant", "bursty"), help="default: poisson")
    load.add_argument(
        "--input-len", type=whole(1, MAX_TOKENS), help="prompt tokens of every request (long: of the history)"
    )
    load.add_argument("--output-len", type=whole(1, MAX_TOKENS), help="answer tokens of every request")
    load.add_argument("--answer-mean", type=above(0, MAX_TOKENS), help="mean answer length of fresh (default: 264)")
    load.add_argument("--turns", type=whole(1, 10_000), help="turns a session of long (default: 4)")
    load.add_argument("--time-scale", type=above(0, 1e9), help="replay a trace so many times as fast (default: 1)")
    load.add_argument("--seed", type=whole(0, 2**63 - 1), default=0)
    goal = parser.add_argument_group("target")
    goal.add_argument("--ttft", type=above(0, 1e9), default=2.0, help="seconds to the first token (default: 2)")
    goal.add_argument("--tpot", type=above(0, 1e12), default=25.0, help="milliseconds a token after it (default: 25)")
    goal.add_argument(
        "--share", type=above(0, 1, below=True), default=0.95, help="share a sustained rate must keep (default: 0.95)"
    )
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
    _refuse_unused(args)
    # What is not given is what the workload has by default.
    given = {"duration_s": args.duration, "arrivals": args.arrivals, "time_scale": args.time_scale}
    return WorkloadSpec(
        name=args.workload,
        rate=rate,
        concurrency=args.concurrency,
        seed=args.seed,
        input_len=args.input_len,
        output_len=args.output_len,
        answer_mean=args.answer_mean,
        requests=args.requests,
        turns=args.turns,
        **{name: value for name, value in given.items() if value is not None},
    )


def _refuse_unused(args: argparse.Namespace) -> None:
    """Options of the load that would change nothing beside the others are refused by name."""
    trace = args.workload not in ("fresh", "long", "interference")
    why: dict[str, str | None] = dict.fromkeys(("duration", "arrivals"), _no_arrivals(args, trace))
    if not trace:
        why["time_scale"] = "only a trace has times to scale"
    elif args.rate is not None or args.concurrency is not None:
        why["time_scale"] = "the trace's own times are not used with --rate or --concurrency"
    if args.requests is not None and not trace:
        why["duration"] = "--requests says how many"
    for name, reason in why.items():
        if reason is not None and getattr(args, name) is not None:
            flag = flag_of(name)
            raise UserError(f"{flag} would change nothing here: {reason}; leave it out", param=flag)


def _no_arrivals(args: argparse.Namespace, trace: bool) -> str | None:
    """Why there are no arrivals to draw, or None where there are."""
    if args.workload == "interference":
        return "workload interference has its own times"
    if args.concurrency is not None:
        return "with --concurrency a request starts when another has ended"
    return "a trace has its own times; --rate draws others" if trace and args.rate is None else None


def read_target(args: argparse.Namespace) -> Target:
    """The target the options ask for."""
    from k3stack.workload.target import Target

    return Target(args.ttft, args.tpot / 1000, args.share).validate()


def print_summary(summary: Mapping[str, Any], title: str) -> None:
    """The table for people, on stdout (it is the result when --json is not given)."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from k3stack.workload.tables import summary_rows

    table = Table(title=escape(title), show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, value in summary_rows(summary):
        table.add_row(escape(name), escape(value))
    Console().print(table)


def check_outputs(args: argparse.Namespace) -> None:
    """Before a run of minutes: UserError where its results cannot be written; makes the folder for figures."""
    for name in ("records", "png", "html"):
        path, flag = getattr(args, name), f"--{name}"
        if path is None:
            continue
        if not path:
            raise UserError(f"{flag} is empty; give a path or leave it out", param=flag)
        file = Path(path)
        if name != "png" and file.is_dir():
            raise UserError(f"{flag} {path}: is a folder; name a file in it", param=flag)
        if name != "png" and not file.absolute().parent.is_dir():
            raise UserError(f"{flag} {path}: there is no folder {file.parent}", param=flag)
        if name == "png" and file.exists() and not file.is_dir():
            raise UserError(f"--png {path}: is a file; a folder is wanted", param=flag)
        if name == "png":
            with writing(path, flag):
                file.mkdir(parents=True, exist_ok=True)
        else:
            check_writable(path, flag)


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
        with writing(args.records, "--records"):
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
        with writing(args.png, "--png"):
            for name, draw in drawn:
                figures.save_png(draw(), folder / (name.lower().replace(" ", "-") + ".png"))
        say(f"figures: {folder}")
    if args.html:
        page = figures.html_report(title, summary_rows(summary), [(name, draw()) for name, draw in drawn])
        with writing(args.html, "--html"):
            Path(args.html).write_text(page, encoding="utf-8")
        say(f"report: {args.html}")


def compare_records(first: str, second: str, target: Target) -> list[tuple[str, str, str, str]]:
    """Two files of records side by side."""
    from k3stack.workload.records import read_records
    from k3stack.workload.report import summarize
    from k3stack.workload.tables import comparison_rows

    a, b = (summarize(read_records(path)[0], target=target) for path in (first, second))
    return comparison_rows(a, b)
