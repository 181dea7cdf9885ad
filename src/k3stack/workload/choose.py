"""Names and flags to a workload: the one place where `k3 bench` and `k3 simulate` turn a request into sessions."""

from __future__ import annotations

import msgspec

from k3stack.errors import UserError
from k3stack.workload import synthetic
from k3stack.workload.lengths import Arrivals
from k3stack.workload.sessions import Workload
from k3stack.workload.traces import Count, read_trace


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. ``name`` is ``fresh``, ``long``, ``interference`` or a trace file."""

    name: str
    rate: float | None = None
    concurrency: int | None = None
    duration_s: float = 240.0
    seed: int = 0
    input_len: int | None = None
    output_len: int | None = None
    answer_mean: float | None = None
    requests: int | None = None
    turns: int | None = None
    arrivals: Arrivals = "poisson"
    time_scale: float = 1.0


def build_workload(spec: WorkloadSpec, count: Count | None = None) -> Workload:
    """The sessions of ``spec``. Options that a workload does not have are refused by name."""
    if spec.name == "fresh":
        _refuse(spec, turns=spec.turns)
        return synthetic.fresh(
            rate=spec.rate,
            concurrency=spec.concurrency,
            duration_s=spec.duration_s,
            seed=spec.seed,
            input_len=spec.input_len,
            output_len=spec.output_len,
            answer_mean=spec.answer_mean or synthetic.ANSWER_MEAN,
            requests=spec.requests,
            arrivals=spec.arrivals,
        )
    if spec.name == "long":
        _refuse(spec, output_len=spec.output_len, answer_mean=spec.answer_mean)
        return synthetic.long(
            rate=spec.rate,
            concurrency=spec.concurrency,
            duration_s=spec.duration_s,
            seed=spec.seed,
            history=spec.input_len or synthetic.HISTORY_MEAN,
            turns=spec.turns or 4,
            requests=spec.requests,
            arrivals=spec.arrivals,
        )
    if spec.name == "interference":
        _refuse(spec, turns=spec.turns, answer_mean=spec.answer_mean, output_len=spec.output_len)
        return synthetic.interference(
            rate=spec.rate or 1.0,
            streams=spec.concurrency or synthetic.STREAMS,
            prompts=spec.requests or synthetic.PROMPTS,
            input_len=spec.input_len or synthetic.PROMPT_MEAN,
        )
    _refuse(spec, turns=spec.turns, answer_mean=spec.answer_mean, input_len=spec.input_len, output_len=spec.output_len)
    return _replay(spec, count)


def _replay(spec: WorkloadSpec, count: Count | None) -> Workload:
    trace = read_trace(spec.name, time_scale=spec.time_scale, limit=spec.requests, count=count)
    if spec.concurrency is not None:
        return msgspec.structs.replace(trace, concurrency=spec.concurrency).validate()
    if spec.rate is None:
        return trace
    # A trace without usable times (or another rate wanted): the same sessions, drawn arrivals.
    import numpy as np

    from k3stack.workload.lengths import arrival_times

    rng = np.random.default_rng([spec.seed, 3])
    times = arrival_times(rng, spec.rate, spec.duration_s, spec.arrivals)
    sessions = tuple(
        msgspec.structs.replace(s, sid=i, arrival_s=float(t))
        for i, (s, t) in enumerate(zip(trace.sessions, times, strict=False))
    )
    return Workload(name=trace.name, sessions=sessions, duration_s=spec.duration_s).validate()


def _refuse(spec: WorkloadSpec, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"workload {spec.name}: {flag} does not apply to it", param=name)
