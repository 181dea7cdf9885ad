"""Share within the target at fixed rates, by policy and mean answer, all policies on the same requests.

Simulated 8 B300 (scenario b300x8-low-latency, engine k3), fresh workload, seeds from 9,000 on: none of them was used
to tune policy ``slo``. Every run is kept as one JSON line in ``--runs``, and a run that is there already is not made
again. Prints a table of shares, one of the price, and where ``slo`` is below another; ``--png`` draws the shares.
``--cross`` reads the runs that are kept and says at which rate the pooled share of each policy falls below 95 %, and
how many times the rate of ``prefill-first`` that is, with 95 % intervals over seeds (each seed's requests go to all).

    python benchmarks/slo_share.py [--efficiency roofline] [--means 120,230,400] [--rates 0.1,0.2] [--png FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import SimResult, simulate
from k3stack.simulator.scenario import load_scenario
from k3stack.workload import figures
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.sustained import Point

SCENARIO = "b300x8-low-latency"
SEED = 9_000
POLICIES = {
    "prefill-first": SimSettings(policy="prefill-first"),
    "mixed chunks": SimSettings(policy="prefill-first", mixed=True),
    "mixed 2,048": SimSettings(policy="prefill-first", mixed=True, chunk_tokens=2_048),
    "slo": SimSettings(policy="slo", mixed=True),
    "slo, told lengths": SimSettings(policy="slo", mixed=True, told_lengths=True),
}
"""Mixed: decode rows run in the same step as a chunk, of up to 16,384 tokens or of 2,048."""
RATES = ",".join(f"{r / 10:g}" for r in range(1, 16))
Key = tuple[str, float, float]
"""Policy, mean answer, rate."""


def one(name: str, mean: float, rate: float, seed: int, duration: float, efficiency: str | None) -> dict[str, Any]:
    settings = replace(POLICIES[name], efficiency=efficiency, seed=seed)
    spec = WorkloadSpec(name="fresh", rate=rate, answer_mean=mean, seed=SEED + seed, duration_s=duration)
    run = simulate(load_scenario(SCENARIO), build_workload(spec), settings)
    return figures_of(run, settings)


def figures_of(run: SimResult, settings: SimSettings) -> dict[str, Any]:
    measured = [r for r in run.records if not r.stream]
    missed = [r for r in measured if not settings.target.met(r)]
    s = run.summary
    return {
        "requests": len(measured),
        "good": len(measured) - len(missed),
        "missed_prompt": sum(r.prompt_tokens for r in missed),
        "prompt": sum(r.prompt_tokens for r in measured),
        "late_first": sum((r.ttft_s or math.inf) > settings.target.ttft_s for r in missed),
        "p99_first_s": s["ttft_s"]["p99"],
        "longest_gap_s": s["longest_gap_s"],
        "latest_start_s": s["latest_start_s"],
    }


def kept_runs(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {tuple(key): value for key, value in map(json.loads, lines)}


def runs(args: argparse.Namespace) -> Iterator[tuple[Key, dict[str, Any]]]:
    path = Path(args.runs)
    kept = kept_runs(path)
    cases = product(
        range(args.repeats),
        map(float, args.means.split(",")),
        map(float, args.rates.split(",")),
        args.policies.split(";"),
    )
    for seed, mean, rate, name in cases:
        key = (args.efficiency or "b300", name, mean, rate, seed, args.duration)
        if key not in kept:
            kept[key] = one(name, mean, rate, seed, args.duration, args.efficiency)
            with path.open("a") as out:
                out.write(json.dumps([key, kept[key]]) + "\n")
        yield (name, mean, rate), kept[key]


def pooled(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    n, good = sum(r["requests"] for r in found), sum(r["good"] for r in found)
    missed = sum(r["missed_prompt"] for r in found) / max(1, n - good)
    return {
        "requests": n,
        "share": good / n,
        "late_first": sum(r["late_first"] for r in found) / max(1, n - good),
        "p99_first_s": sum(r["p99_first_s"] for r in found) / len(found),
        "longest_gap_s": max(r["longest_gap_s"] for r in found),
        "latest_start_s": max(r["latest_start_s"] or 0.0 for r in found),
        "missed_over_mean": missed / (sum(r["prompt"] for r in found) / n),
    }


def difference(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Share of ``a`` less that of ``b`` over the same requests, and half of its 95 % interval over runs."""
    each = [x["good"] / x["requests"] - y["good"] / y["requests"] for x, y in zip(a, b, strict=True)]
    whole = (sum(x["good"] for x in a) - sum(y["good"] for y in b)) / sum(x["requests"] for x in a)
    if len(each) < 2:
        return whole, math.inf
    mean = sum(each) / len(each)
    spread = math.sqrt(sum((d - mean) ** 2 for d in each) / (len(each) - 1))
    return whole, 2.0 * spread / math.sqrt(len(each))


Counts = dict[float, dict[int, tuple[int, int]]]
"""By rate and seed: requests within the target, and all."""


def crossing(counts: Counts, seeds: Sequence[int], share: float) -> float:
    """The highest rate at which the pooled share is still ``share``: falling shares through the points (neighbours that
    rise are averaged), a straight line in between. Beyond the rates that were run: the outermost of them."""
    blocks: list[list[float]] = []  # good, total, first and last rate
    for rate in sorted(counts):
        of = [counts[rate][s] for s in seeds]
        blocks.append([sum(g for g, _ in of), sum(n for _, n in of), rate, rate])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] < blocks[-1][0] * blocks[-2][1]:
            last = blocks.pop()
            blocks[-1] = [blocks[-1][0] + last[0], blocks[-1][1] + last[1], blocks[-1][2], last[3]]
    above = [b for b in blocks if b[0] >= share * b[1]]
    below = [b for b in blocks if b[0] < share * b[1]]
    if not above or not below:
        return blocks[0][2] if not above else blocks[-1][3]
    (g, n, _, low), (h, m, high, _) = above[-1], below[0]
    return low + (high - low) * (g / n - share) / (g / n - h / m)


def print_crossings(args: argparse.Namespace) -> None:
    share, rng = SimSettings().target.share, random.Random(0)
    counts: dict[tuple[float, str], Counts] = defaultdict(lambda: defaultdict(dict))
    for (efficiency, name, mean, rate, seed, duration), run in kept_runs(Path(args.runs)).items():
        if efficiency == (args.efficiency or "b300") and duration == args.duration and seed < args.repeats:
            counts[mean, name][rate][seed] = run["good"], run["requests"]
    for by_rate in counts.values():
        for rate in [rate for rate, by_seed in by_rate.items() if len(by_seed) < args.repeats]:
            del by_rate[rate]
    print("| mean answer | policy | crosses 95 % at | times prefill-first | requests a point |")
    print("|---" * 5 + "|")
    for mean, name in product(map(float, args.means.split(",")), args.policies.split(";")):
        own, base = counts[mean, name], counts[mean, "prefill-first"]
        if len(own) < 2 or len(base) < 2:
            continue
        seeds = range(args.repeats)
        draws = [rng.choices(seeds, k=len(seeds)) for _ in range(2_000)]
        rates = sorted(crossing(own, draw, share) for draw in draws)
        ratios = sorted(crossing(own, draw, share) / crossing(base, draw, share) for draw in draws)
        at = crossing(own, seeds, share)
        points = sum(n for by in own.values() for _, n in by.values()) / len(own)
        print(
            f"| {mean:g} | {name} | {at:.2f} ({rates[50]:.2f} to {rates[-51]:.2f}) | "
            f"{at / crossing(base, seeds, share):.2f} ({ratios[50]:.2f} to {ratios[-51]:.2f}) | {points:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--efficiency", help="another set of step-time constants, such as roofline")
    parser.add_argument("--means", default="120,230,400")
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--policies", default=";".join(POLICIES), help="separated by semicolons")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--duration", type=float, default=240.0)
    parser.add_argument("--runs", default="slo_share.jsonl")
    parser.add_argument("--cross", action="store_true", help="only what the kept runs say of the rate at 95 %%")
    parser.add_argument("--png")
    args = parser.parse_args()
    if args.cross:
        print_crossings(args)
        return
    found: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for key, value in runs(args):
        found[key].append(value)
    print_tables(found, args)
    if args.png:
        draw(found, args)


def print_tables(found: dict[Key, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    rates, names = [float(r) for r in args.rates.split(",")], args.policies.split(";")
    for mean in map(float, args.means.split(",")):
        print(f"\nmean answer {mean:g}\n| requests/s | " + " | ".join(names) + " |")
        print("|---" * (len(names) + 1) + "|")
        for rate in rates:
            cells = [pooled(found[name, mean, rate]) for name in names]
            print(f"| {rate:g} | " + " | ".join(f"{100 * c['share']:.1f}" for c in cells) + " |")
        print("| policy at a rate | requests | p99 first s | longest gap s | latest start s | late first | prompt |")
        for rate in rates:
            for name in names:
                c = pooled(found[name, mean, rate])
                print(
                    f"| {name}, {rate:g} | {c['requests']} | {c['p99_first_s']:.1f} | {c['longest_gap_s']:.2f} | "
                    f"{c['latest_start_s']:.1f} | {100 * c['late_first']:.0f} % | {c['missed_over_mean']:.1f} |"
                )
        for other in names:
            if other == "slo" or "slo" not in names:
                continue
            for rate in rates:
                d, half = difference(found["slo", mean, rate], found[other, mean, rate])
                if d < 0:
                    print(f"slo is below {other} at {rate:g}: {100 * d:+.2f} points (± {100 * half:.2f})")


def draw(found: dict[Key, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    """One panel a mean answer, share against rate, one curve a policy."""
    panels = {}
    for mean in map(float, args.means.split(",")):
        curves = {}
        for name in args.policies.split(";"):
            points = []
            for rate in map(float, args.rates.split(",")):
                cell = found[name, mean, rate]
                shares = [c["good"] / c["requests"] for c in cell]
                good, total = sum(c["good"] for c in cell), sum(c["requests"] for c in cell)
                points.append(Point(rate=rate, shares=shares, good=good, total=total))
            curves[name] = points
        panels[f"mean answer {mean:g}"] = curves
    figures.save_png(figures.share_panels(panels, SimSettings().target), args.png)


if __name__ == "__main__":
    main()
