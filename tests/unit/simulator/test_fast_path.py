"""The fast path changes nothing: the same records and summaries, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from k3stack.simulator.build import SimSettings
from k3stack.simulator.run import simulate
from k3stack.simulator.scenario import load_scenario
from k3stack.workload import synthetic
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.sessions import Workload


def load(name: str, **kw: Any) -> Workload:
    return build_workload(WorkloadSpec(name=name, **kw))


CASES = {
    "poisson": ("b300x8-low-latency", load("fresh", rate=1.1, duration_s=60, seed=3)),
    "drafter": ("b300x8-balanced-drafter", load("fresh", rate=1.1, duration_s=60, seed=3)),
    "closed loop": ("b300x8-balanced", load("fresh", concurrency=24, requests=60, seed=4)),
    "sessions": ("b300x8-balanced", load("long", rate=0.4, duration_s=90, seed=5)),
    "interference": ("b300x8-low-latency", synthetic.interference(prompts=6, stream_tokens=2_500)),
    # Equal lengths on equal servers: steps of several servers end at the very same times.
    "in step": ("rack-a", load("fresh", concurrency=20, requests=50, input_len=8_192, output_len=300)),
    "handed on": ("rack-b", load("fresh", rate=4.0, duration_s=25, seed=6)),
    "wide domain": ("rack-c", load("fresh", rate=4.0, duration_s=25, seed=7)),
}


MIXED = ("poisson", "interference", "wide domain")
RUNS = [(case, engine, "prefill-first") for case in CASES for engine in ("k3", "sglang")]
RUNS += [(case, "k3", "slo") for case in CASES] + [(case, "k3", "slo, mixed") for case in MIXED]


@pytest.mark.parametrize(("case", "engine", "policy"), RUNS)
def test_the_fast_path_changes_nothing(case: str, engine: str, policy: str) -> None:
    name, workload = CASES[case]
    settings = SimSettings(engine=engine, policy=policy.partition(",")[0], mixed="mixed" in policy)  # type: ignore[arg-type]
    runs = [
        simulate(load_scenario(name), workload, replace(settings, fast_path=fast), token_times=True)
        for fast in (True, False)
    ]
    fast, slow = runs
    assert msgspec.json.encode(fast.records) == msgspec.json.encode(slow.records)
    assert json.dumps(fast.summary) == json.dumps(slow.summary)
