"""Which shape of a GB300 rack serves the most requests within the target? Sustained rates of rack-a, rack-b, rack-c.

Fresh workload, engine k3. Prints one line a shape and policy and, with ``--png``, draws share against rate.

    python benchmarks/rack.py [--duration 120] [--repeats 1] [--resolution 0.06] [--png docs/rack.png]
"""

from __future__ import annotations

import argparse

from k3stack.simulator.build import SimSettings
from k3stack.simulator.scenario import load_scenario
from k3stack.simulator.sustain import simulate_sustained
from k3stack.workload import figures
from k3stack.workload.choose import WorkloadSpec
from k3stack.workload.sustained import Point

CASES = (
    ("rack-a", "prefill-first"),
    ("rack-a", "slo"),
    ("rack-b", "prefill-first"),
    ("rack-c", "prefill-first"),
)
"""Prefill and decode servers apart have nothing to weigh against each other: policy slo changes the order only."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=120.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--resolution", type=float, default=0.06)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--png")
    args = parser.parse_args()
    curves: dict[str, list[Point]] = {}
    for name, policy in CASES:
        settings = SimSettings(policy=policy, mixed=policy == "slo")
        spec = WorkloadSpec(name="fresh", rate=args.rate, duration_s=args.duration, seed=9_500)
        run, points = simulate_sustained(
            load_scenario(name), spec, settings, repeats=args.repeats, resolution=args.resolution
        )
        s = run.summary
        curves[f"{name}, {policy}"] = points
        print(
            f"{name:<8}{policy:<15}sustained {s['sustained_rate']:6.2f}/s   first token p50 {s['ttft_s']['p50']:.2f} "
            f"p99 {s['ttft_s']['p99']:.2f} s   per token p50 {s['tpot_ms']['p50']:.1f} p99 {s['tpot_ms']['p99']:.1f} ms"
            f"   device busy {100 * s['device_busy_share']:.0f} %   binds: {s['binding']}",
            flush=True,
        )
    if args.png:
        figures.save_png(figures.sustained_figure(curves, SimSettings().target), args.png)


if __name__ == "__main__":
    main()
