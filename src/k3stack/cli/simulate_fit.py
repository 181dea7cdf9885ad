"""`k3 simulate --fit FILE`: refit constants of the step model to measured rows, and show what moved."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from k3stack.cli.arguments import print_json, say

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
        write_efficiency(fit.after, write, f"fitted to {path}, starting from {efficiency or file.efficiency}")
        say(f"constants: {write}")
    if as_json:
        print_json(_document(fit))
    else:
        print_fit(fit)
    return 0 if all(r.inside(v) for r, v in zip(fit.rows, fit.new, strict=True)) else 1


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
