"""One workload twice: sent to a real server on this machine, and simulated from that server's step log.

    python benchmarks/real_vs_simulated.py
    python benchmarks/real_vs_simulated.py --model nano --seconds 50 --policy prefill-first

Nothing is assumed of the machine's speed. Before and after each load the server is calibrated with requests of other
seeds: ones that find it idle, and several at a time. The steps of the two calibrations around a load give its step
times, the requests that found the server idle the time outside of steps (HTTP, chat format and tokens, hand-over
between processes), and the simulator replays the load: arrivals, prompts and answers as they were.

Near saturation a hundredth more or less of a step's time puts requests into other batches, and one simulated run jumps
by several points against the next: what is compared is the mean over ``SPEEDS`` of the fitted step times. Exit status 1
unless medians agree within 10 % and shares within 3 points. How long the load's own steps took against the fit is
printed beside: what is off there is the machine, which has changed its pace since the calibrations, and what is off
beyond it is the simulator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from cpu_server import (
    ENVIRONMENT,
    K3,
    OtherPrograms,
    bench,
    cost_of,
    scaled_target,
    server,
    where,
    write_lone,
    write_workload,
)

from k3stack.engine.step_log import FIELDS
from k3stack.estimate.measured import MeasuredCost
from k3stack.estimate.work import StepLoad
from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import simulate
from k3stack.simulator.scenario import Scenario, load_scenario
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.records import Record, read_records, write_records
from k3stack.workload.report import summarize
from k3stack.workload.target import Target

LOADS = {"low": (0.2, 1.0), "middle": (0.4, 1.0), "near saturation": (0.75, 2.0)}
"""Of the requests a second that the server completes with ``STREAMS`` always under way; and of ``--seconds``: more
where a request more or less counts."""
SPEEDS = (0.98, 0.985, 0.99, 0.995, 1.0, 1.005, 1.01, 1.015, 1.02)
"""Factors of the fitted step times that are simulated: calibrations do not tell them nearer."""
STREAMS = 16
ANY_TARGET = Target(60.0, 1.0)


@dataclass
class Session:
    """A server being measured: its address, files, and the seed of the next run (none is used twice)."""

    url: str
    folder: Path
    seed: int
    log: Path
    pools: Path
    lone: list[list[Record]] = field(default_factory=list)
    """The lone requests of each calibration."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When each calibration ran, on the machine's monotonic clock."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """When each load ran."""

    def run(self, workload: Path, *options: str) -> list[Record]:
        self.seed += 1
        records = self.folder / f"run-{self.seed}.jsonl"
        return bench(self.url, ANY_TARGET, records, "--workload", str(workload), "--seed", str(self.seed), *options)[1]

    def calibrate(self) -> None:
        """Lone requests, then several at a time."""
        begun = time.monotonic()
        workload = self.folder / "calibration.jsonl"
        write_lone(workload, requests=20, every_s=0.6)
        self.lone.append(self.run(workload))
        for streams, requests in ((1, 5), (2, 8), (4, 12), (8, 16), (STREAMS, 32)):
            write_workload(workload, 1.0, 0.0, self.seed + 1000, requests=requests)
            self.run(workload, "--concurrency", str(streams))
        self.spans.append((begun, time.monotonic()))


def fit(session: Session, calibrations: Iterable[int], name: str) -> Scenario:
    """A scenario from the steps and the lone requests of some calibrations."""
    spans = [session.spans[i] for i in calibrations]
    head, *lines = session.log.read_text().rpartition("\n")[0].splitlines()  # the server may be writing still
    kept = [line for line in lines if any(a <= json.loads(line)["at"] <= b for a, b in spans)]
    steps, lone, scenario = (
        session.folder / f"{name}-{kind}" for kind in ("steps.jsonl", "lone.jsonl", "machine.json")
    )
    steps.write_text("\n".join([head, *kept]) + "\n")
    write_records(lone, [r for i in calibrations for r in session.lone[i]], {})
    command = [*K3, "simulate", "--fit-steps", str(steps), "--pools", str(session.pools), "--calibrate", str(lone)]
    command += ["--write", str(scenario)]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)
    return load_scenario(str(scenario))


def measure(args: argparse.Namespace, folder: Path) -> tuple[Session, dict[str, tuple[float, Path]]]:
    """The real runs: calibrations, and between them the loads. Returns the rate and the records of each load."""
    log, pools, others = folder / "steps.jsonl", folder / "pools.json", OtherPrograms()
    options = ("--policy", args.policy, "--step-log", str(log), "--pool-plan-file", str(pools))
    loads = {}
    with server(args.model, folder, *options) as url:
        session = Session(url, folder, 1000 * args.seed, log, pools)
        write_workload(folder / "warm.jsonl", 1.0, 0.0, session.seed, requests=8)
        session.run(folder / "warm.jsonl", "--concurrency", "4")
        session.calibrate()
        most = most_per_s(session, args.policy)
        for name, (share, longer) in LOADS.items():
            workload = folder / "load.jsonl"
            write_workload(workload, share * most, longer * args.seconds, session.seed + 2000)
            begun = time.monotonic()
            session.run(workload)
            session.loads.append((begun, time.monotonic()))
            loads[name] = share * most, folder / f"run-{session.seed}.jsonl"
            session.calibrate()
    print(f"{where()}; {args.model}, policy {args.policy}, one engine thread; {others}")
    return session, loads


def most_per_s(session: Session, policy: str) -> float:
    """Requests a second that the server completes with ``STREAMS`` always under way, simulated."""
    scenario = fit(session, [0], "first")
    workload = session.folder / "most.jsonl"
    write_workload(workload, 1.0, 0.0, session.seed + 3000, requests=20 * STREAMS)
    load = build_workload(WorkloadSpec(name=str(workload), concurrency=STREAMS))
    return float(simulate(scenario, load, SimSettings(policy=policy)).summary["requests_per_s"])


def at_speed(scenario: Scenario, factor: float, path: Path, policy: str, target: Target) -> list[Record]:
    """The load simulated on a machine whose steps take ``factor`` times as long."""
    cost = cost_of(scenario)
    parts = ("decode", "row", "context", "chunk", "chunk_row", "token", "prefix", "pair")
    changed = {name: factor * getattr(cost, name) for name in parts}
    knots = tuple((rows, factor * seconds) for rows, seconds in cost.knots)
    server = msgspec.structs.replace(scenario.servers[0], cost=msgspec.structs.replace(cost, knots=knots, **changed))
    load = build_workload(WorkloadSpec(name=str(path)))
    settings = SimSettings(policy=policy, target=target)
    return simulate(msgspec.structs.replace(scenario, servers=[server]), load, settings).records


def pace(session: Session, span: tuple[float, float], cost: MeasuredCost) -> tuple[float, float]:
    """By how many percent the steps of a load, decode and with prompts, took longer than ``cost`` says."""
    lines = [json.loads(line) for line in session.log.read_text().splitlines()[1:]]
    real, fitted = [0.0, 0.0], [0.0, 0.0]
    for line in lines:
        if span[0] <= line["at"] <= span[1]:
            load = StepLoad(**{name: line[name] for name in FIELDS if name in line})
            kind = bool(load.chunk_tokens)
            real[kind] += line["seconds"]
            fitted[kind] += cost.seconds(load)
    decode, chunk = (100 * (a / b - 1) if b else 0.0 for a, b in zip(real, fitted, strict=True))
    return decode, chunk


def row(name: str, rate: float, real: dict[str, Any], simulated: dict[str, Any]) -> tuple[str, bool]:
    """A line of the table, and whether it is within the bounds."""
    first = simulated["ttft_s"]["p50"] / real["ttft_s"]["p50"] - 1
    token = simulated["tpot_ms"]["p50"] / real["tpot_ms"]["p50"] - 1
    share = simulated["share_within_target"] - real["share_within_target"]
    text = (
        f"{name:<16}{rate:7.2f}{real['requests']:5d}"
        f"{real['ttft_s']['p50']:9.3f}{simulated['ttft_s']['p50']:8.3f}{100 * first:+7.1f} %"
        f"{real['tpot_ms']['p50']:10.2f}{simulated['tpot_ms']['p50']:8.2f}{100 * token:+7.1f} %"
        f"{100 * real['share_within_target']:9.1f}{100 * simulated['share_within_target']:8.1f}{100 * share:+7.1f}"
    )
    return text, abs(first) <= 0.1 and abs(token) <= 0.1 and abs(share) <= 0.03


def report(args: argparse.Namespace, session: Session, loads: dict[str, tuple[float, Path]]) -> int:
    """Fit and simulate each load, and print it beside the real one."""
    whole = fit(session, range(len(session.spans)), "whole")
    target = scaled_target(cost_of(whole), whole.servers[0].chunk_tokens)
    print(f"target: {target.ttft_s:.3f} s, then {1000 * target.tpot_s:.1f} ms a token\n")
    print(f"{'':<28}{'first token p50, s':>26}{'per token p50, ms':>27}{'within target, %':>24}")
    print(
        f"{'load':<16}{'rate':>7}{'n':>5}{'real':>9}{'sim.':>8}{'':>9}{'real':>10}{'sim.':>8}{'':>9}{'real':>9}{'sim.':>8}"
    )
    good, notes = True, []
    for i, (name, (rate, path)) in enumerate(loads.items()):
        scenario = fit(session, (i, i + 1), name.partition(" ")[0])
        records, _ = read_records(path)
        real = summarize(records, target=target)
        runs = [at_speed(scenario, factor, path, args.policy, target) for factor in SPEEDS]
        text, within = row(name, rate, real, summarize([r for run in runs for r in run], target=target))
        good &= within
        print(text + ("" if within else "  OUTSIDE"))
        cost = cost_of(scenario)
        one, outside = 1000 * cost.decode_lines(1)[0][0], 1000 * cost.before_s(400)
        shares = [100 * sum(map(target.met, run)) / len(run) for run in runs]
        decode, chunk = pace(session, session.loads[i], cost)
        notes.append(
            f"{name}: steps good to {100 * cost.error:.0f} % (90th percentile); a step of one row {one:.1f} ms, "
            f"a prompt of 400 tokens {outside:.1f} ms outside of steps; single simulated runs {min(shares):.1f} to "
            f"{max(shares):.1f} % within target; the load's own steps took {decode:+.1f} % (decode) and {chunk:+.1f} % "
            "(prompts) against the fit"
        )
    print("", *notes, sep="\n")
    return 0 if good else 1


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--policy", choices=("prefill-first", "slo"), default="prefill-first")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs, records and scenarios (default: thrown away)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        return report(args, *measure(args, folder))


if __name__ == "__main__":
    sys.exit(main())
