"""Policy ``slo`` against ``prefill-first``: the sustained rate by mean answer length, and what it costs.

Simulated 8 B300 (scenario b300x8-low-latency, engine k3), fresh workload, seeds from 9,000 on: none of them was used
to tune the policy. Writes a Markdown table; ``--share`` adds the share within the target at fixed rates.

    python benchmarks/slo_policy.py [--efficiency roofline] [--means 120,230,400] [--share]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import msgspec

from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import SimResult, simulate
from k3stack.simulator.scenario import load_scenario
from k3stack.simulator.sustain import simulate_sustained
from k3stack.workload.choose import WorkloadSpec, build_workload

SCENARIO = "b300x8-low-latency"
SEED = 9_000
POLICIES = {
    "prefill-first": SimSettings(policy="prefill-first"),
    "mixed chunks": SimSettings(policy="prefill-first", mixed=True),
    "slo": SimSettings(policy="slo", mixed=True),
    "slo, told lengths": SimSettings(policy="slo", mixed=True, told_lengths=True),
}
RATES = (0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one mean answer length, at its sustained rate."""

    rate: float
    p99_first_s: float
    longest_gap_s: float
    latest_start_s: float
    missed_prompt: float
    """Mean prompt of requests that missed, over the mean of all."""


def sustained(settings: SimSettings, mean: float, repeats: int) -> Cell:
    spec = WorkloadSpec(name="fresh", rate=0.7, answer_mean=mean, seed=SEED)
    result, _ = simulate_sustained(load_scenario(SCENARIO), spec, settings, repeats=repeats, resolution=0.03)
    return Cell(
        result.summary["sustained_rate"],
        result.summary["ttft_s"]["p99"],
        result.summary["longest_gap_s"],
        result.summary["latest_start_s"],
        missed_prompts(result, settings),
    )


def missed_prompts(result: SimResult, settings: SimSettings) -> float:
    missed = [r.prompt_tokens for r in result.records if not settings.target.met(r)]
    every = [r.prompt_tokens for r in result.records]
    return (sum(missed) / len(missed)) / (sum(every) / len(every)) if missed else 0.0


def share(settings: SimSettings, mean: float, rate: float, repeats: int) -> float:
    good = total = 0
    for i in range(repeats):
        spec = WorkloadSpec(name="fresh", rate=rate, answer_mean=mean, seed=SEED + i)
        run = simulate(load_scenario(SCENARIO), build_workload(spec), replace(settings, seed=i)).summary
        good += round(run["share_within_target"] * run["requests"])
        total += run["requests"]
    return good / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--efficiency", help="another set of step-time constants, such as roofline")
    parser.add_argument("--means", default="120,230,400")
    parser.add_argument("--policies", default=";".join(POLICIES), help="separated by semicolons")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    means = [float(m) for m in args.means.split(",")]
    cells: dict[str, list[Cell]] = {}
    for name in args.policies.split(";"):
        settings = replace(POLICIES[name], efficiency=args.efficiency)
        cells[name] = [sustained(settings, m, args.repeats) for m in means]
        if not args.json:
            print(f"| {name} | " + " | ".join(f"{c.rate:.2f}" for c in cells[name]), end=" | ")
            print(" / ".join(f"{c.p99_first_s:.1f}" for c in cells[name]), end=" | ")
            print(" / ".join(f"{c.longest_gap_s:.2f}" for c in cells[name]), end=" | ")
            print(" / ".join(f"{c.latest_start_s:.1f}" for c in cells[name]), end=" | ")
            print(" / ".join(f"{c.missed_prompt:.1f}" for c in cells[name]) + " |", flush=True)
    if args.json:
        print(msgspec.json.encode(cells).decode())
    if args.share:
        for name in args.policies.split(";"):
            settings = replace(POLICIES[name], efficiency=args.efficiency)
            for m in means:
                shares = [share(settings, m, r, args.repeats) for r in RATES]
                print(f"| {name}, {m:g} | " + " | ".join(f"{100 * x:.1f} %" for x in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
