"""One arena against a fixed split of memory, under load: sustained rate and share of prompt tokens found cached.

Simulated 8 B300 (b300x8-low-latency, fitted step times), policy slo. Two kinds of traffic:

- long: sessions of 16 turns on a history of 118,000 tokens, each turn returning 5 s after its answer;
- mixed: nine short calls (1,000 prompt tokens) for every turn of such a session.

A history's first pass takes 6 s and cannot meet a first token within 2 s: shares count the other requests. Memory:

- arena: one arena, one state a running request;
- split: the published split at ratio 1.1 (state : cache), five slots reserved a request, the same scheduler;
- sglang: that split under behaviour ``sglang`` (its admission, chunks and eviction by least recent use).

    python benchmarks/arena_split.py [--traffic long,mixed] [--duration 240] [--runs FILE] [--png docs/arena-split.png]

Searches are kept in ``--runs``, and one that is there already is not made again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from k3stack.config.hardware import GIB
from k3stack.config.models import model_geometry
from k3stack.estimate.pools import block_layout, plan_pools
from k3stack.estimate.saved_plan import SavedPlan, figures, save_plan
from k3stack.estimate.sglang import SglangSettings
from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import simulate
from k3stack.simulator.scenario import PoolSpec, Scenario, load_scenario
from k3stack.workload import figures as pictures
from k3stack.workload import synthetic
from k3stack.workload.sessions import Workload
from k3stack.workload.sustained import Point, find_sustained

SCENARIO = "b300x8-low-latency"
TURNS = 16
SHORT, SHORT_SHARE = 1_000, 0.9
SEED = 9_700


@dataclass
class Run:
    """What is kept of one run."""

    rate: float
    good: int
    counted: int
    hit_rate: float
    p99_first_s: float
    max_running: int


def long(rate: float, duration: float, seed: int) -> Workload:
    return synthetic.long(rate=rate, duration_s=duration, seed=seed, turns=TURNS)


def mixed(rate: float, duration: float, seed: int) -> Workload:
    calls = synthetic.fresh(rate=rate * SHORT_SHARE, duration_s=duration, seed=seed, input_len=SHORT)
    sessions = long(rate * (1 - SHORT_SHARE), duration, seed).sessions
    moved = [msgspec.structs.replace(s, sid=s.sid + 1_000_000) for s in sessions]
    both = sorted((*calls.sessions, *moved), key=lambda s: s.arrival_s)
    return Workload(name="mixed", sessions=tuple(both), duration_s=duration).validate()


TRAFFIC: dict[str, tuple[Callable[[float, float, int], Workload], float]] = {"long": (long, 0.6), "mixed": (mixed, 3.0)}
"""Traffic, and the rate that a search starts from."""
GRID = {"long": (0.4, 0.6, 0.7, 0.8, 1.0), "mixed": (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)}
"""Rates that every kind of memory is run at besides its search, so that the curves of a figure reach as far."""


def memories(folder: Path) -> dict[str, tuple[Scenario, SimSettings]]:
    scenario = load_scenario(SCENARIO)
    server = scenario.servers[0]
    layout = block_layout(model_geometry("kimi-k3"), tp=server.layout.tp)
    settings = SglangSettings(ratio=server.pools.ratio, strategy="extra_buffer", overlap=True)
    plan = plan_pools(layout, int(server.pools.budget_gib * GIB), engine="sglang", sglang=settings)
    saved = SavedPlan("kimi-k3", "B300", plan, figures(plan, 0), figures(plan, 0), "published split")
    save_plan(folder / "split.json", saved)
    pools = PoolSpec(saved_plan=str(folder / "split.json"))
    split = msgspec.structs.replace(scenario, servers=[msgspec.structs.replace(server, pools=pools)])
    slo = SimSettings(policy="slo", mixed=True)
    return {
        "arena": (scenario, slo),
        "split": (split, slo),
        "sglang": (scenario, replace(slo, engine="sglang", policy="prefill-first", mixed=False)),
    }


def one(scenario: Scenario, workload: Workload, settings: SimSettings, rate: float) -> Run:
    run = simulate(scenario, workload, settings)
    first = {s.sid for s in workload.sessions if len(s.turns) > 1}
    counted = [r for r in run.records if not (r.session in first and r.turn == 0)]
    firsts = sorted(r.ttft_s for r in counted if r.ttft_s is not None)
    return Run(
        rate,
        sum(settings.target.met(r) for r in counted),
        len(counted),
        run.summary["kv_hit_rate"],
        firsts[int(0.99 * (len(firsts) - 1))],
        run.summary["max_running"],
    )


@dataclass
class Search:
    """One kind of memory under one kind of traffic: the sustained rate and the runs that led to it."""

    rate: float
    points: list[Point]
    runs: list[Run]


Results = dict[str, dict[str, Search]]
"""By traffic and memory."""


def search(name: str, scenario: Scenario, settings: SimSettings, args: argparse.Namespace) -> Search:
    traffic, start = TRAFFIC[name]
    runs: list[Run] = []

    def measure(rate: float, repeat: int) -> tuple[int, int]:
        made = one(scenario, traffic(rate, args.duration, SEED + repeat), replace(settings, seed=repeat), rate)
        runs.append(made)
        return made.good, made.counted

    found = find_sustained(
        measure,
        start=start,
        resolution=args.resolution,
        min_repeats=args.repeats,
        max_repeats=args.repeats,
        max_rate=64.0,
    )
    points = {p.rate: p for p in found.points}
    for rate in GRID[name]:
        if rate not in points:
            seen = [measure(rate, repeat) for repeat in range(args.repeats)]
            good, counted = (sum(column) for column in zip(*seen, strict=True))
            points[rate] = Point(rate=rate, shares=[g / n for g, n in seen], good=good, total=counted)
    return Search(found.rate, [points[rate] for rate in sorted(points)], runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", default="long,mixed")
    parser.add_argument("--memories", default="arena,split,sglang")
    parser.add_argument("--duration", type=float, default=240.0)
    parser.add_argument("--repeats", type=int, default=3, help="runs a rate")
    parser.add_argument("--resolution", type=float, default=0.06)
    parser.add_argument("--runs", type=Path, help="searches are kept here, and those found here are not made")
    parser.add_argument("--png")
    args = parser.parse_args()
    kept = args.runs is not None and args.runs.exists()
    results = msgspec.json.decode(args.runs.read_bytes(), type=Results) if kept else {}
    print("| traffic | memory | sustained/s | cached | at 1.3 of that | first token p99, s | most running |")
    print("|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        chosen = memories(Path(folder))
        for traffic in args.traffic.split(","):
            for memory in args.memories.split(","):
                found = results.setdefault(traffic, {})
                if memory not in found:
                    found[memory] = search(traffic, *chosen[memory], args)
                    if args.runs:
                        args.runs.write_bytes(msgspec.json.encode(results))
                print_row(traffic, memory, found[memory])
    if args.png:
        pictures.save_png(draw(results), args.png)


def print_row(traffic: str, memory: str, result: Search) -> None:
    best = result.rate
    at = [r for r in result.runs if r.rate == best] or result.runs[:1]
    above = [r for r in result.runs if 1.1 * best < r.rate < 1.7 * best]
    more = f"{100 * sum(r.hit_rate for r in above) / len(above):.0f} %" if above else "-"
    print(
        f"| {traffic} | {memory} | {best:.2f} | {100 * sum(r.hit_rate for r in at) / len(at):.1f} % | {more} | "
        f"{max(r.p99_first_s for r in at):.2f} | {max(r.max_running for r in at)} |",
        flush=True,
    )


def draw(results: Results) -> Any:
    """Two panels a kind of traffic: share within the target, and share of prompt tokens found cached, by rate."""
    target = SimSettings().target
    shares = {f"{name}: within target": {m: r.points for m, r in found.items()} for name, found in results.items()}
    hits = {f"{name}: found cached": {m: cached(r.runs) for m, r in found.items()} for name, found in results.items()}
    panels = {title: curves for pair in zip(shares.items(), hits.items(), strict=True) for title, curves in pair}
    return pictures.share_panels(panels, target, label="%")


def cached(runs: list[Run]) -> list[Point]:
    """Hit rates by rate, as points of a curve."""
    rates = sorted({r.rate for r in runs})
    by = {rate: [r.hit_rate for r in runs if r.rate == rate] for rate in rates}
    return [Point(rate=k, shares=v, good=round(10_000 * sum(v) / len(v)), total=10_000) for k, v in by.items()]


if __name__ == "__main__":
    main()
