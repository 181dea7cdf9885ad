"""Which shape of a GB300 rack serves the most requests within the target? Sustained rates by shape.

Fresh workload, engine k3, one run a rate. The shipped shapes, other divisions between prefill and decode servers, one
and two wide decode domains, other chunks: each a change of a shipped scenario, made here. ``--png`` draws share against
rate, and the p99 of first tokens.

    python benchmarks/rack.py [--only rack-a,rack-b] [--duration 45] [--resolution 0.06] [--runs FILE] [--png FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import simulate
from k3stack.simulator.scenario import Scenario, load_scenario
from k3stack.workload import figures
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.sustained import Point, find_sustained

SEED = 9_500
WIDE_64_GIB = 173.0
"""Assumed: 0.92 of 265 GiB less 70 GiB of weights (attention cut 8 ways, experts 64 ways)."""


@dataclass(frozen=True)
class Case:
    """A shape, and the rate that its search starts from."""

    base: str
    policy: str = "prefill-first"
    start: float = 10.0
    prefill: int | None = None
    """Pipelines of 8 GPUs; the decode servers of rack-b are what is left of nine."""
    chunk: int | None = None
    domains: int = 1
    domain_gpus: int = 32

    def scenario(self) -> Scenario:
        scenario = load_scenario(self.base)
        if len(scenario.servers) == 1:
            return scenario
        prefill, decode = scenario.servers
        change: dict[str, Any] = {"chunk_tokens": self.chunk or prefill.chunk_tokens}
        if self.prefill is not None:
            change["servers"] = self.prefill
            if self.base == "rack-b":
                decode = msgspec.structs.replace(decode, servers=9 - self.prefill)
        prefill = msgspec.structs.replace(prefill, **change)
        if self.base == "rack-c":
            decode = msgspec.structs.replace(decode, servers=self.domains)
        if self.domain_gpus == 64:
            n = self.domain_gpus
            layout = msgspec.structs.replace(decode.layout, tp=n, ep=n, dp=n // 8)
            pools = msgspec.structs.replace(decode.pools, budget_gib=WIDE_64_GIB)
            decode = msgspec.structs.replace(decode, layout=layout, pools=pools)
        return msgspec.structs.replace(scenario, servers=[prefill, decode])


CASES = {
    "a: 9 unified, prefill-first": Case("rack-a", start=8.0),
    "a: 9 unified, slo": Case("rack-a", "slo", 8.0),
    "b: 5 pipelines, 4 servers": Case("rack-b", start=14.0),
    "c: 5 pipelines, domain of 32": Case("rack-c", start=12.0),
    "b: 3 pipelines, 6 servers": Case("rack-b", start=9.0, prefill=3),
    "b: 4 pipelines, 5 servers": Case("rack-b", start=12.0, prefill=4),
    "b: 6 pipelines, 3 servers": Case("rack-b", start=13.0, prefill=6),
    "c: 4 pipelines, domain of 32": Case("rack-c", start=12.0, prefill=4),
    "c: 1 pipeline, two domains of 32": Case("rack-c", start=3.0, prefill=1, domains=2),
    "c: 1 pipeline, domain of 64": Case("rack-c", start=3.0, prefill=1, domain_gpus=64),
    "b: 5 + 4, chunks of 2,048": Case("rack-b", start=14.0, chunk=2_048),
    "b: 4 + 5, chunks of 1,024": Case("rack-b", start=10.0, chunk=1_024, prefill=4),
    "b: 4 + 5, chunks of 2,048": Case("rack-b", start=11.0, chunk=2_048, prefill=4),
    "b: 4 + 5, chunks of 8,192": Case("rack-b", start=8.0, chunk=8_192, prefill=4),
    "b: 4 + 5, chunks of 16,384": Case("rack-b", start=2.0, chunk=16_384, prefill=4),
}
"""Prefill and decode servers apart have nothing to weigh against each other: policy slo changes the order only."""
KEPT = (
    "requests",
    "share_within_target",
    "ttft_s",
    "tpot_ms",
    "missed",
    "busy_share_by_role",
    "binding",
    "max_running",
)


def search(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    scenario = case.scenario()
    runs: dict[str, dict[str, Any]] = {}

    def measure(rate: float, repeat: int) -> tuple[int, int]:
        spec = WorkloadSpec(name="fresh", rate=rate, duration_s=args.duration, seed=SEED + repeat)
        settings = SimSettings(policy=case.policy, mixed=case.policy == "slo", seed=repeat)
        s = simulate(scenario, build_workload(spec), settings).summary
        runs[f"{rate:.3f}"] = {k: s[k] for k in KEPT}
        return round(s["share_within_target"] * s["requests"]), s["requests"]

    found = find_sustained(measure, start=case.start, resolution=args.resolution, min_repeats=1, max_repeats=1)
    return {"rate": found.rate, "points": msgspec.to_builtins(found.points), "runs": runs}


def print_row(name: str, result: dict[str, Any]) -> None:
    rates = sorted(result["runs"], key=float)
    best = next((r for r in rates if abs(float(r) - result["rate"]) < 1e-3), rates[0])
    above = next((r for r in rates if float(r) > float(best)), best)
    s, over = result["runs"][best], result["runs"][above]
    missed = ", ".join(f"{k.replace('_', ' ')} {100 * v:.1f} %" for k, v in over["missed"].items())
    busy = ", ".join(f"{k} {100 * v:.0f} %" for k, v in s["busy_share_by_role"].items())
    print(
        f"| {name} | {result['rate']:.2f} | {s['requests']} | {s['ttft_s']['p50']:.2f}, {s['ttft_s']['p99']:.2f} | "
        f"{s['tpot_ms']['p50']:.1f}, {s['tpot_ms']['p99']:.1f} | {busy} | at {float(above):.1f}: {missed} | "
        f"{over['binding']} |",
        flush=True,
    )


def draw(results: dict[str, dict[str, Any]], path: str) -> None:
    """Share and first tokens' p99 against the rate."""
    target = SimSettings().target
    shares = {name: [Point(**p) for p in r["points"]] for name, r in results.items()}
    firsts = {
        name: [(float(k), v["ttft_s"]["p99"]) for k, v in sorted(r["runs"].items(), key=lambda x: float(x[0]))]
        for name, r in results.items()
    }
    figures.save_png(figures.share_and_first(shares, firsts, target), path)


def chosen(only: str | None) -> Sequence[str]:
    return [n for n in CASES if only is None or any(n.startswith(o) for o in only.split(";"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="beginnings of cases' names, separated by semicolons")
    parser.add_argument("--duration", type=float, default=45.0)
    parser.add_argument("--resolution", type=float, default=0.06)
    parser.add_argument("--runs", default="rack.json", help="results are kept here, and cases found there are not run")
    parser.add_argument("--png")
    args = parser.parse_args()
    path = Path(args.runs)
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    print(
        "| shape | sustained | requests | first token p50, p99 s | per token p50, p99 ms | busy | late above | binds |"
    )
    print("|---" * 8 + "|")
    names = chosen(args.only)
    for name in names:
        if name not in results:
            results[name] = search(CASES[name], args)
            path.write_text(json.dumps(results))
        print_row(name, results[name])
    if args.png:
        draw({n: results[n] for n in names}, args.png)


if __name__ == "__main__":
    main()
