"""Fits constants of the step model to measured rows, and says what that changed: constants and predictions.

A row is one figure of a measured run: the scenario and workload that it came from, the figure's name, its value, and
how near a simulation should come. Rows marked ``fit: false`` take no part in the fit and are checked beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from k3stack.config.files import read_json
from k3stack.errors import UserError
from k3stack.estimate.seconds import Efficiency
from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import SimResult, simulate
from k3stack.simulator.scenario import Scenario, load_scenario
from k3stack.workload.choose import WorkloadSpec, build_workload

Vector = npt.NDArray[np.float64]
STEP = 0.06
"""Relative change of a constant when its influence is measured."""
BOUNDS = {"verify_spread": (0.01, 1.0), "expert_reach": (0.02, 1.0)} | dict.fromkeys(
    ("dense_read", "expert_read", "product", "expert_product", "attention"), (0.01, 1.0)
)


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured figure."""

    name: str
    scenario: str
    workload: WorkloadSpec
    metric: str
    """A path into the summary, such as ``ttft_s.p50``, or one of ``first_pass_tokens_per_s``, ``returning_ttft_s``,
    ``returning_tpot_ms`` (sessions: the first turns together, and the median of the later ones)."""
    value: float
    kind: Literal["relative", "points"] = "relative"
    tolerance: float = 0.15
    accept_length: float | None = None
    """The drafter's mean accept length in that run, where it differs from the scenario's."""
    seeds: int = 1
    fit: bool = True
    source: str = ""

    def error(self, simulated: float) -> float:
        """Relative, or in shares of 1 for ``points``."""
        return simulated - self.value if self.kind == "points" else simulated / self.value - 1

    def inside(self, simulated: float) -> bool:
        return abs(self.error(simulated)) <= self.tolerance + 1e-9


class RowFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``--fit`` reads: rows, the constants to fit and the set they start from, and how the runs were made."""

    about: str = ""
    efficiency: str
    constants: list[str]
    engine: Literal["k3", "sglang"] = "sglang"
    policy: str = "prefill-first"
    rows: list[Row]


def read_rows(path: str | Path) -> RowFile:
    """Read and check a file of rows; UserError says what is wrong with it."""
    try:
        file = msgspec.convert(read_json(path, param="fit"), RowFile)
    except msgspec.ValidationError as e:
        raise UserError(f"{path}: not a file of measured rows ({e})", param="fit") from None
    known = {f.name for f in fields(Efficiency)} - {"provenance", "error"}
    unknown = set(file.constants) - known
    if unknown or not file.constants:
        raise UserError(f"{path}: constants {sorted(unknown) or 'missing'}; known: {', '.join(sorted(known))}")
    if sum(r.fit for r in file.rows) < len(file.constants):
        raise UserError(
            f"{path}: {sum(r.fit for r in file.rows)} rows cannot fix {len(file.constants)} constants; "
            "give more rows or fewer constants",
            param="fit",
        )
    return file


@dataclass(frozen=True, slots=True)
class Fit:
    """Old and new constants, and what every row was predicted at before and after."""

    rows: list[Row]
    before: Efficiency
    after: Efficiency
    old: list[float]
    new: list[float]
    changed: dict[str, tuple[float, float]]


def fit_rows(
    file: RowFile,
    start: Efficiency,
    *,
    rounds: int = 4,
    on_round: Callable[[int, float], None] | None = None,
) -> Fit:
    """Least squares over the rows' errors in units of their tolerances; ``rounds`` 0 only compares.

    A round costs one simulation of the fitted rows for each constant, and a few to find the step's length.
    """
    old = predict(file.rows, start, file)
    if rounds < 1:
        same = {n: (getattr(start, n), getattr(start, n)) for n in file.constants}
        return Fit(file.rows, start, start, old, old, same)
    rows, names = [r for r in file.rows if r.fit], file.constants

    def residuals(x: Vector) -> Vector:
        got = predict(rows, with_constants(start, names, np.exp(x)), file)
        return np.array([_residual(r, v) for r, v in zip(rows, got, strict=True)])

    first = np.log(np.array([max(getattr(start, n), 1e-9) for n in names]))
    best = _least_squares(residuals, first, names, rounds, on_round)
    after = with_constants(start, names, np.exp(best))
    source = dict.fromkeys(names, f"fitted to {len(rows)} measured rows")
    after = replace(after, provenance={**start.provenance, **source})
    changed = {n: (getattr(start, n), getattr(after, n)) for n in names}
    return Fit(file.rows, start, after, old, predict(file.rows, after, file), changed)


def _least_squares(
    residuals: Callable[[Vector], Vector],
    x: Vector,
    names: Sequence[str],
    rounds: int,
    on_round: Callable[[int, float], None] | None,
) -> Vector:
    """Levenberg–Marquardt on logarithms, derivatives by differences; ends when a round gains under a thousandth."""
    now, damping = residuals(x), 0.1
    for turn in range(rounds):
        if on_round is not None:
            on_round(turn, float(now @ now))
        slope = np.array([(residuals(_moved(x, i)) - now) / STEP for i in range(len(names))]).T
        gained = 0.0
        for _ in range(4):
            square = slope.T @ slope
            move = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -slope.T @ now)
            trial = _bounded(x + np.clip(move, -0.5, 0.5), names)
            there = residuals(trial)
            if there @ there < now @ now:
                gained = 1 - float(there @ there) / float(now @ now)
                x, now, damping = trial, there, damping / 3
                break
            damping *= 4
        if gained < 1e-3:
            break
    return x


def with_constants(start: Efficiency, names: Sequence[str], values: Vector) -> Efficiency:
    """``start`` with the named constants replaced, rounded to three digits (what is written is what was run)."""
    changes: dict[str, Any] = {n: float(f"{v:.3g}") for n, v in zip(names, values, strict=True)}
    return replace(start, **changes)


def predict(rows: Sequence[Row], efficiency: Efficiency, file: RowFile) -> list[float]:
    """The simulated figure of every row; rows of the same run share it."""
    done: dict[bytes, list[SimResult]] = {}
    out = []
    for row in rows:
        key = msgspec.json.encode((row.scenario, row.accept_length, row.workload, row.seeds))
        if key not in done:
            done[key] = _runs(row, efficiency, file)
        out.append(_figure(row.metric, done[key]))
    return out


def _runs(row: Row, efficiency: Efficiency, file: RowFile) -> list[SimResult]:
    scenario = _scenario(row)
    settings = SimSettings(engine=file.engine, policy=file.policy, constants=efficiency)
    runs = []
    for i in range(row.seeds):
        seed = row.workload.seed + i
        workload = build_workload(msgspec.structs.replace(row.workload, seed=seed))
        runs.append(simulate(scenario, workload, replace(settings, seed=seed)))
    return runs


def _scenario(row: Row) -> Scenario:
    scenario = load_scenario(row.scenario)
    if row.accept_length is None:
        return scenario
    servers = []
    for server in scenario.servers:
        if server.drafter is None:
            raise UserError(f"row {row.name!r}: scenario {row.scenario} has no drafter to accept {row.accept_length:g}")
        drafter = msgspec.structs.replace(server.drafter, accept_length=row.accept_length)
        servers.append(msgspec.structs.replace(server, drafter=drafter))
    return msgspec.structs.replace(scenario, servers=servers)


def _figure(metric: str, runs: Sequence[SimResult]) -> float:
    """One figure over all runs: shares pooled by requests, others the mean over runs."""
    if metric == "share_within_target":
        total = sum(r.summary["requests"] for r in runs)
        return float(sum(r.summary[metric] * r.summary["requests"] for r in runs) / total)
    return statistics.fmean(_one(metric, run) for run in runs)


def _one(metric: str, run: SimResult) -> float:
    first = [r for r in run.records if r.turn == 0]
    later = [r for r in run.records if r.turn > 0]
    if metric == "first_pass_tokens_per_s":
        begin = min(r.arrival_s for r in first)
        return sum(r.prompt_tokens for r in first) / (max(r.first_s or math.inf for r in first) - begin)
    if metric == "returning_ttft_s":
        return statistics.median(r.ttft_s for r in later if r.ttft_s is not None)
    if metric == "returning_tpot_ms":
        return 1000 * statistics.median(r.tpot_s for r in later if r.tpot_s is not None)
    value: Any = run.summary
    for part in metric.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UserError(f"a row asks for {metric!r}, which a summary does not have", param="fit")
        value = value[part]
    if not isinstance(value, (int, float)):
        raise UserError(f"a row asks for {metric!r}, which is not a number in this run", param="fit")
    return float(value)


def _residual(row: Row, simulated: float) -> float:
    error = row.error(simulated) if row.kind == "points" else math.log(max(simulated, 1e-9) / row.value)
    return error / row.tolerance


def _moved(x: Vector, i: int) -> Vector:
    y = x.copy()
    y[i] += STEP
    return y


def _bounded(x: Vector, names: Sequence[str]) -> Vector:
    low = [math.log(BOUNDS[n][0]) if n in BOUNDS else -30.0 for n in names]
    high = [math.log(BOUNDS[n][1]) if n in BOUNDS else 5.0 for n in names]
    return np.clip(x, low, high)
