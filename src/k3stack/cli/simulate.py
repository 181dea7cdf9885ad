"""`k3 simulate`: what would this deployment do under this load? The real scheduler and memory in virtual time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3stack.cli.arguments import Parser, above, flag_of, print_json, say, whole
from k3stack.cli.load_arguments import (
    MAX_TOKENS,
    add_load_options,
    check_outputs,
    print_summary,
    read_spec,
    read_target,
    write_outputs,
)
from k3stack.config.files import check_writable, writing
from k3stack.errors import UserError

if TYPE_CHECKING:
    from k3stack.simulator.build import SimSettings
    from k3stack.simulator.run import SimResult


def run(argv: list[str]) -> int:
    """Simulate; exit 0 whatever the share (a simulation answers, it does not judge)."""
    args = _parser().read(argv)
    from k3stack.simulator.scenario import load_scenario, scenario_names

    if args.list:
        for name in scenario_names():
            print(f"{name:<26} {load_scenario(name).about}")
        return 0
    _refuse_unused(args)
    check_outputs(args)
    if args.fit_steps:
        from k3stack.cli.simulate_fit import run_fit_steps

        return run_fit_steps(args.fit_steps, args.pools, args.calibrate, args.write, args.json)
    if args.fit:
        from k3stack.cli.simulate_fit import run_fit

        return run_fit(args.fit, args.efficiency, args.write, 4 if args.rounds is None else args.rounds, args.json)
    names = args.compare.split(",") if args.compare else [args.scenario] if args.scenario else []
    if not names:
        raise UserError(f"--scenario is missing; shipped: {', '.join(scenario_names())}", param="scenario")
    results = {name: _one(name, args) for name in names}
    if args.compare:
        return _print_comparison(results, args)
    name = names[0]
    result, points = results[name]
    title = f"{name}, {args.engine}, {_policy(args)}: {args.workload}"
    write_outputs(args, title, result.records, result.summary, read_target(args), result.window_s, points)
    if args.json:
        print_json(result.summary)
    else:
        print_summary(result.summary, title)
        error, constants = result.summary["step_time_error"], result.summary["efficiency"]
        say(f"step times are good to about {100 * error:.0f} % (constants {constants})")
    return 0


_NEEDS = {
    "write": ("fit", "fit_steps"),
    "rounds": ("fit",),
    "pools": ("fit_steps",),
    "calibrate": ("fit_steps",),
    "repeats": ("sustained",),
}
"""Option -> those that make use of it."""
_CONTRADICT = (("fit", "fit_steps"), ("fit", "scenario"), ("fit", "compare"), ("fit_steps", "scenario"),
               ("fit_steps", "compare"), ("compare", "scenario"))  # fmt: skip


def _refuse_unused(args: argparse.Namespace) -> None:
    """Options that nothing would read, and pairs of which one would be ignored, are refused by name."""
    for name, users in _NEEDS.items():
        if getattr(args, name) is not None and not any(getattr(args, u) for u in users):
            raise UserError(
                f"{flag_of(name)} is for {' or '.join(map(flag_of, users))}; leave it out", param=flag_of(name)
            )
    for one, other in _CONTRADICT:
        if getattr(args, one) and getattr(args, other):
            raise UserError(f"give {flag_of(one)} or {flag_of(other)}, not both", param=flag_of(other))
    if args.compare and args.records:
        raise UserError("--records is of one scenario: leave --compare out, and name it by --scenario", param="records")
    if args.compare and (args.png or args.html) and not args.sustained:
        raise UserError("a figure of a comparison needs --sustained", param="png")
    if args.write is not None:
        check_writable(args.write, "--write")


def _one(name: str, args: argparse.Namespace) -> tuple[SimResult, list[Any]]:
    from k3stack.simulator.run import simulate, start_notes
    from k3stack.simulator.scenario import load_scenario
    from k3stack.workload.choose import build_workload

    scenario, settings, spec = load_scenario(name), _settings(args), read_spec(args)
    for note in start_notes(scenario, settings):
        say(f"{name}: {note}")
    if args.sustained:
        from k3stack.simulator.sustain import simulate_sustained

        return simulate_sustained(
            scenario,
            spec,
            settings,
            repeats=args.repeats or 4,
            on_point=lambda p: say(f"{name}: {p.rate:.3f} requests/s: {100 * p.share:.1f} % ({len(p.shares)} runs)"),
        )
    return simulate(scenario, build_workload(spec), settings, token_times=bool(args.records)), []


def _policy(args: argparse.Namespace) -> str:
    """SGLang has no policy that knows a target: its behaviour goes with prefill-first unless another is asked for."""
    return str(args.policy or ("prefill-first" if args.engine == "sglang" else "slo"))


def _settings(args: argparse.Namespace) -> SimSettings:
    from k3stack.simulator.build import SimSettings

    return SimSettings(
        engine=args.engine,
        policy=_policy(args),
        target=read_target(args),
        mixed=_policy(args) == "slo" if args.mixed is None else args.mixed,
        max_gap_s=args.max_gap / 1000 if args.max_gap else None,
        efficiency=args.efficiency,
        chunk_tokens=args.chunked_prefill_size,
        seed=args.seed,
        check_every=args.check_every,
        fast_path=not args.no_fast_path,
    )


def _print_comparison(results: Mapping[str, tuple[SimResult, list[Any]]], args: argparse.Namespace) -> int:
    from k3stack.simulator.compare import compare, explain

    rows = compare({name: result.summary for name, (result, _) in results.items()})
    answer = explain(rows)
    if args.png or args.html:
        _draw(results, args)
    if args.json:
        print_json({"answer": answer, "scenarios": rows})
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{args.workload}, {args.engine}, {_policy(args)}", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row["scenario"], justify="right")
    for field in list(rows[0])[1:]:
        table.add_row(field.replace("_", " "), *(_cell(row[field]) for row in rows))
    Console(file=sys.stdout).print(table)
    print(answer)
    return 0


def _draw(results: Mapping[str, tuple[SimResult, list[Any]]], args: argparse.Namespace) -> None:
    from pathlib import Path

    from k3stack.workload import figures

    curves = {name: points for name, (_, points) in results.items() if points}
    target = read_target(args)
    if args.png:
        with writing(args.png, "--png"):
            figures.save_png(figures.sustained_figure(curves, target), Path(args.png) / "comparison.png")
    if args.html:
        page = figures.html_report("Comparison", [], [("Sustained rate", figures.sustained_figure(curves, target))])
        with writing(args.html, "--html"):
            Path(args.html).write_text(page, encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v:.2f}" for k, v in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _parser() -> Parser:
    parser = Parser("simulate", __doc__ or "", json_output=True)
    what = parser.add_argument_group("deployment")
    what.add_argument("--scenario", help="a shipped scenario (--list) or a JSON file")
    what.add_argument("--list", action="store_true", help="list the shipped scenarios")
    what.add_argument("--compare", metavar="A,B,...", help="several scenarios under the same load")
    what.add_argument("--engine", choices=("k3", "sglang"), default="k3", help="whose memory and admission rules")
    what.add_argument("--policy", choices=("prefill-first", "slo"), help="default: slo (engine sglang: prefill-first)")
    what.add_argument(
        "--mixed",
        action=argparse.BooleanOptionalAction,
        help="decode rows ride along with prefill chunks (default: with policy slo, as it serves)",
    )
    what.add_argument(
        "--max-gap", type=above(0, 1e12), metavar="MS", help="bound on the longest gap of a stream (policy slo)"
    )
    what.add_argument(
        "--chunked-prefill-size", type=whole(1, MAX_TOKENS), help="prompt tokens a step (default: the scenario's)"
    )
    what.add_argument("--efficiency", help="another set of step-time constants: roofline, or a file")
    what.add_argument("--repeats", type=whole(1, 10_000), help="runs a rate at most, with --sustained (default: 4)")
    what.add_argument(
        "--check-every", type=whole(0, MAX_TOKENS), default=0, metavar="N", help="check conservation every N steps"
    )
    what.add_argument("--no-fast-path", action="store_true", help="plan every step one by one (same results, slower)")
    fit = parser.add_argument_group("fit")
    fit.add_argument("--fit", metavar="FILE", help="refit named step-time constants to the measured rows of a file")
    fit.add_argument("--fit-steps", metavar="FILE", help="make a scenario of the step log of `k3 serve --step-log`")
    fit.add_argument("--pools", metavar="FILE", help="with --fit-steps: the pool_plan.json of that server's boot")
    fit.add_argument(
        "--calibrate", metavar="FILE", help="with --fit-steps: records of `k3 bench --concurrency 1` on that server"
    )
    fit.add_argument("--write", metavar="FILE", help="write the fitted set (for --efficiency) or the scenario here")
    fit.add_argument("--rounds", type=whole(0, 1_000), help="rounds of the fit at most; 0 only checks (default: 4)")
    add_load_options(parser)
    return parser
