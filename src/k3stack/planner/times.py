"""Times of a plan from the step model of ``estimate.seconds``: a decode step, a prompt, and requests a second."""

from __future__ import annotations

from dataclasses import dataclass

from k3stack.estimate.seconds import Efficiency, StepModel
from k3stack.estimate.weights import weight_table
from k3stack.estimate.work import Precision, StepLoad
from k3stack.planner.plan import Plan

LOAD_RATES_GBPS = (0.5, 2.0, 10.0)
"""Disk or network rates a node (GB/s) that loading is shown at when none is given."""


class PlanTimes:
    """Step times of one plan; every figure carries the step model's error band."""

    def __init__(self, plan: Plan, efficiency: Efficiency | None = None) -> None:
        setup = plan.setup
        self.plan = plan
        self.efficiency = efficiency or Efficiency()
        self.model = StepModel(
            setup.geometry,
            setup.layout,
            setup.hardware,
            self.efficiency,
            engine=setup.engine,
            precision=Precision(row=max(1, round(setup.row_itemsize)), recurrent=setup.state_itemsize),
        )

    def decode_s(self, rows: int, context: int) -> float:
        """One token for each of ``rows`` requests of ``context`` tokens on every attention-DP worker.

        With a pipeline a token passes all stages, so the stages' times add up.
        """
        load = StepLoad(decode_rows=rows, decode_context=rows * context, samples=rows)
        stages = range(len(self.model.stages))
        hand = self.model.handon_s(rows) * (len(self.model.stages) - 1) if len(self.model.stages) > 1 else 0.0
        return sum(self.model.step(load, i).seconds for i in stages) + hand

    def prefill_s(self, tokens: int) -> float:
        """One prompt of ``tokens`` alone, in chunks; a pipeline works on several chunks at a time."""
        chunk = self.plan.setup.chunk if self.plan.setup.chunk > 0 else tokens
        done, slowest, first = 0, 0.0, 0.0
        while done < tokens:
            new = min(chunk, tokens - done)
            load = StepLoad(
                chunk_rows=1, chunk_tokens=new, chunk_prefix=done, chunk_pairs=new * (done + new / 2), samples=1
            )
            times = [self.model.step(load, i).seconds for i in range(len(self.model.stages))]
            first = max(first, sum(times))
            slowest += max(times)
            done += new
        return slowest if len(self.model.stages) == 1 else max(first, slowest + first - max(times))

    def requests_per_second(self, input_len: int, output_len: int, rows: int) -> float:
        """Requests a second of all workers with ``rows`` running on each: prompts and decode steps share the GPUs.

        One turn of ``rows`` requests takes their prompts one after the other and one decode step for each output
        token. A bound on what a schedule can reach, not a prediction of a served load.
        """
        if rows < 1:
            return 0.0
        turn = rows * self.prefill_s(input_len) + output_len * self.decode_s(rows, input_len + output_len // 2)
        return rows * self.plan.workers / turn


@dataclass(frozen=True, slots=True)
class Loading:
    """Reading the checkpoint on every node."""

    bytes_per_node: float
    rate_gbps: float

    @property
    def seconds(self) -> float:
        return self.bytes_per_node / (self.rate_gbps * 1e9)


def loading(plan: Plan, rate_gbps: float | None) -> tuple[Loading, ...]:
    """Loading at ``rate_gbps`` GB/s a node, or at a few typical rates.

    SGLang and vLLM read the whole checkpoint on each node; k3 reads the slices that the node's GPUs hold.
    """
    setup = plan.setup
    whole = sum(weight_table(setup.geometry).totals().values())
    if setup.engine == "k3":
        here = min(setup.hardware.gpus_per_node, setup.gpus_used)
        whole = min(whole, plan.weights.bytes_per_gpu * here)
    rates = LOAD_RATES_GBPS if rate_gbps is None else (rate_gbps,)
    return tuple(Loading(float(whole), rate) for rate in rates)
