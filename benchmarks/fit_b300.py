"""Kimi-K3 under SGLang on 8 B300: what is published against what the simulator says, one line a row.

Behaviour ``sglang``, policy ``prefill-first``, constants of the shipped set ``b300``. Rows and tolerances are in
``benchmarks/data/b300_rows.json``: one published study (shares within 5 points, the rest within 15 %) and one public
benchmark of the same recipes (median error at most 10 %, 90th percentile at most 25 %). Exit status 0: all hold.

    python benchmarks/fit_b300.py            check the shipped constants
    python benchmarks/fit_b300.py --fit      refit the constants that the file names, then check (hours of one core)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from k3stack.estimate.seconds import load_efficiency, write_efficiency
from k3stack.simulator.fitting import Fit, Row, fit_rows, read_rows

ROWS = Path(__file__).parent / "data" / "b300_rows.json"


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def print_table(rows: list[Row], simulated: list[float]) -> None:
    print(f"{'row':<62}{'published':>11}{'simulated':>11}{'error':>12}")
    for row, value in zip(rows, simulated, strict=True):
        unit = " points" if row.kind == "points" else " %"
        mark = "" if row.inside(value) else "  outside"
        print(f"{row.name:<62}{row.value:>11.4g}{value:>11.4g}{100 * row.error(value):>+7.1f}{unit}{mark}")


def verdict(rows: list[Row], simulated: list[float]) -> bool:
    """Study rows one by one; benchmark rows by the spread of their errors."""
    pairs = list(zip(rows, simulated, strict=True))
    study = [r.inside(v) for r, v in pairs if r.source.startswith("study")]
    errors = [abs(r.error(v)) for r, v in pairs if not r.source.startswith("study")]
    median, high = quantile(errors, 0.5), quantile(errors, 0.9)
    print(f"\nstudy: {sum(study)} of {len(study)} rows inside their tolerance")
    print(f"benchmark: {len(errors)} rows, median error {100 * median:.1f} %, 90th percentile {100 * high:.1f} %")
    return all(study) and median <= 0.10 and high <= 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--efficiency", default="b300")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--write", help="write the fitted set here")
    args = parser.parse_args()
    file, start = read_rows(ROWS), load_efficiency(args.efficiency)
    rounds = args.rounds if args.fit else 0
    fit: Fit = fit_rows(file, start, rounds=rounds, on_round=lambda n, x: print(f"round {n}: {x:.3f}", file=sys.stderr))
    if args.fit:
        for name, (old, new) in fit.changed.items():
            print(f"{name:<16}{old:>12.4g} -> {new:.4g}")
    if args.write:
        write_efficiency(fit.after, args.write, f"fitted to {ROWS.name}")
    constants = fit.after.constants()
    print("fitted: " + ", ".join(f"{n} {constants[n]:.4g}" for n in file.constants) + "\n")
    print_table(fit.rows, fit.new)
    good = verdict(fit.rows, fit.new)
    print("holds" if good else "does not hold")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
