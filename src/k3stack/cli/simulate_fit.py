"""`k3 simulate --fit` and `--fit-steps`: constants from measured rows, a scenario from a server's step log."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from k3stack.cli.arguments import print_json, say
from k3stack.config.files import writing
from k3stack.errors import UserError

if TYPE_CHECKING:
    from k3stack.simulator.fitting import Fit


def run_fit(path: str, efficiency: str | None, write: str | None, rounds: int, as_json: bool) -> int:
    """Fit and print; exit 1 when a row lies outside its tolerance afterwards."""
    from k3stack.estimate.seconds import load_efficiency, write_efficiency
    from k3stack.simulator.fitting import fit_rows, read_rows

    file = read_rows(path)
    start = load_efficiency(efficiency or file.efficiency)
    fit = fit_rows(file, start, rounds=rounds, on_round=lambda n, x: say(f"round {n}: sum of squares {x:.3f}"))
    if write:
        with writing(write, "--write"):
            write_efficiency(fit.after, write, f"fitted to {path}, starting from {efficiency or file.efficiency}")
        say(f"constants: {write}")
    if as_json:
        print_json(_document(fit))
    else:
        print_fit(fit)
    return 0 if all(r.inside(v) for r, v in zip(fit.rows, fit.new, strict=True)) else 1


def run_fit_steps(log: str, pools: str | None, calibrate: str | None, write: str | None, as_json: bool) -> int:
    """A scenario of one server from its step log, its saved pools, and records of requests that came one at a time."""
    import msgspec

    from k3stack.estimate.measured import fit_steps, read_step_log, with_host
    from k3stack.simulator.scenario import LayoutSpec, PoolSpec, Scenario, ServerSpec
    from k3stack.workload.records import read_records

    if pools is None:
        raise UserError("--pools is missing: the pool_plan.json that the server saved at its boot", param="pools")
    head, steps = read_step_log(log)
    cost = fit_steps(steps, f"{len(steps)} steps of {log}")
    chunk = int(head["chunk_tokens"])
    if calibrate is not None:
        records, _ = read_records(calibrate)
        firsts = [(r.prompt_tokens - r.cached_tokens, r.ttft_s) for r in records if r.ok and r.ttft_s is not None]
        cost = with_host(cost, firsts, chunk)
    server = ServerSpec(
        layout=LayoutSpec(),
        pools=PoolSpec(saved_plan=os.path.relpath(pools, Path(write).parent) if write else pools),
        chunk_tokens=chunk,
        cost=cost,
        context=int(head["context"]),
    )
    name = f"{head['model']}, measured"
    scenario = Scenario(name=name, about=cost.source, hardware="measured", model=str(head["model"]), servers=[server])
    if write:
        with writing(write, "--write"):
            Path(write).write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")
        say(f"scenario: {write}")
    if as_json:
        print_json(msgspec.to_builtins(scenario))
    else:
        for field, value in msgspec.to_builtins(cost).items():
            print(f"{field:<14}{_shown(value)}")
    return 0


def _shown(value: object) -> str:
    """A constant of a measured cost for people; knots as rows and milliseconds."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return "  ".join(f"{rows}: {1000 * seconds:.2f} ms" for rows, seconds in value)
    return str(value)


def _document(fit: Fit) -> dict[str, object]:
    return {
        "constants": {n: {"before": a, "after": b} for n, (a, b) in fit.changed.items()},
        "rows": [
            {
                "name": r.name,
                "fitted": r.fit,
                "published": r.value,
                "before": old,
                "after": new,
                "error": r.error(new),
                "kind": r.kind,
                "inside": r.inside(new),
            }
            for r, old, new in zip(fit.rows, fit.old, fit.new, strict=True)
        ],
    }


def print_fit(fit: Fit) -> None:
    """Two tables: constants before and after, and every row before and after with its error."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
    constants = Table(title="constants", title_justify="left")
    for name in ("constant", "before", "after", "change"):
        constants.add_column(name, justify="left" if name == "constant" else "right")
    for name, (a, b) in fit.changed.items():
        constants.add_row(name, f"{a:.4g}", f"{b:.4g}", f"{100 * (b / a - 1):+.1f} %" if a else "-")
    console.print(constants)
    rows = Table(title="rows (error: of the new prediction)", title_justify="left")
    for name in ("row", "published", "before", "after", "error", "allowed", ""):
        rows.add_column(name, justify="left" if name in ("row", "") else "right")
    for r, old, new in zip(fit.rows, fit.old, fit.new, strict=True):
        unit = "points" if r.kind == "points" else "%"
        mark = ("" if r.fit else "checked only; ") + ("" if r.inside(new) else "OUTSIDE")
        rows.add_row(
            r.name,
            f"{r.value:.4g}",
            f"{old:.4g}",
            f"{new:.4g}",
            f"{100 * r.error(new):+.1f} {unit}",
            f"{100 * r.tolerance:.0f} {unit}",
            mark.removesuffix("; "),
        )
    console.print(rows)
