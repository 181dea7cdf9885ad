"""The sustained rate of a simulated deployment: the same search as for a real server, over seeds instead of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from k3stack.errors import UserError
from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import SimResult, simulate
from k3stack.simulator.scenario import Scenario
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.sustained import Point, find_sustained


def simulate_sustained(
    scenario: Scenario,
    spec: WorkloadSpec,
    settings: SimSettings,
    *,
    repeats: int = 4,
    resolution: float = 0.02,
    on_point: Callable[[Point], None] | None = None,
) -> tuple[SimResult, list[Point]]:
    """Search from ``spec.rate``; the result is a run at the rate found, its summary with ``sustained_rate``."""
    if spec.rate is None:
        raise UserError("--sustained searches the rate: give --rate as the rate to start from", param="rate")
    runs: dict[float, SimResult] = {}

    def measure(rate: float, repeat: int) -> tuple[int, int]:
        seed = spec.seed + 1000 * repeat
        workload = build_workload(msgspec.structs.replace(spec, rate=rate, seed=seed))
        run = simulate(scenario, workload, replace(settings, seed=seed))
        runs.setdefault(rate, run)
        n = run.summary["requests"]
        return round(run.summary["share_within_target"] * n), n

    found = find_sustained(
        measure,
        share=settings.target.share,
        start=spec.rate,
        resolution=resolution,
        max_repeats=repeats,
        min_repeats=min(2, repeats),
        on_point=on_point,
    )
    best = runs[found.rate if found.rate in runs else min(runs)]
    best.summary["sustained_rate"] = found.rate
    best.summary["sustained_above"] = found.above
    best.summary["runs"] = found.runs
    return best, found.points
