"""Time that the engine adds to a decode step over the network's forward pass, on a CPU.

The network is replaced by one that returns ready-made logits, so that what is measured is everything else: planning,
row tables, the batch, sampling, results, events, outputs. Tokens of greedy rows are checked against the logits.
``p50_us`` and ``p99_us`` are wall time of a step without the network; ``cpu_us`` is the processor time of all threads
(the network's copy of its logits and the preparation included), for machines that do other things meanwhile.

    python benchmarks/engine_overhead.py [--vocab 4096] [--steps 400] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import msgspec
import torch

from k3stack.config.sampling import SamplingParams
from k3stack.engine import messages as msg
from k3stack.engine.core import EngineCore, EngineSetup
from k3stack.estimate.pools import BlockLayout, PoolPlan
from k3stack.executor.torch.executor import TorchExecutor
from k3stack.memory import Memory
from k3stack.memory.ops import ClearState
from k3stack.models.batch import ForwardBatch
from k3stack.scheduler import PrefillFirst, SchedulerOptions
from k3stack.scheduler.plan import GroupPlan, RowAdd, RowWork, StepPlan

LAYOUT = BlockLayout(1, 8, 1, 2048, 0, 4)
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=100_000, ignore_eos=True),
}


class ReadyMade:
    """Logits that were there before; ``seconds``: spent inside ``forward``."""

    def __init__(self, vocab: int, rows: int) -> None:
        # Four times the normal's spread: about as peaked as what a trained model says.
        self.logits = 4.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
        self.seconds = 0.0

    def forward(self, batch: ForwardBatch, views: Any) -> torch.Tensor:
        begun = time.perf_counter()
        logits = self.logits[: len(batch.logit_index)].clone()
        self.seconds += time.perf_counter() - begun
        return logits

    def take_seconds(self) -> float:
        """Time spent in ``forward`` since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def pool(rows: int) -> PoolPlan:
    blocks = rows * 12
    return PoolPlan("k3", LAYOUT, blocks * LAYOUT.block_bytes, blocks, max_running=rows)


def executor_of(rows: int, vocab: int, network: ReadyMade) -> TorchExecutor:
    return TorchExecutor(network, pool(rows), lambda buffer: None, vocab=vocab, device=torch.device("cpu"))


def executor_us(rows: int, vocab: int, steps: int, params: SamplingParams) -> list[float]:
    """Microseconds from ``submit`` to the result of ``wait``, one decode step of ``rows`` rows at a time."""
    network = ReadyMade(vocab, rows)
    executor = executor_of(rows, vocab, network)
    pages = 4
    added = tuple(
        RowAdd(row=r, state_block=r, pages=tuple(range((rows + r) * pages, (rows + r + 1) * pages)), length=0,
               sampling=params)
        for r in range(rows)
    )  # fmt: skip
    before = tuple(ClearState(r) for r in range(rows))
    work = tuple(RowWork(row=r, start=0, ids=(1, 2, 3), sample=True) for r in range(rows))
    executor.wait(executor.submit(StepPlan(step=0, groups=(GroupPlan(added=added, before=before, work=work),))))
    decode, times = tuple(range(rows)), []
    for step in range(1, min(steps, 64 * pages - 4)):
        plan = StepPlan(step=step, groups=(GroupPlan(decode=decode),))
        begun = time.perf_counter()
        result = executor.wait(executor.submit(plan))
        times.append((time.perf_counter() - begun - network.take_seconds()) * 1e6)
        assert result.error is None and len(result.groups[0].tokens) == rows
        if params.temperature == 0.0:
            assert result.groups[0].tokens == tuple(network.logits.argmax(-1).tolist())
    executor.close()
    return times


def engine_us(rows: int, vocab: int, steps: int, params: SamplingParams) -> list[float]:
    """Microseconds of one turn of the engine core with its outputs, ``rows`` streams decoding, overlap on."""
    plan = pool(rows)
    network = ReadyMade(vocab, rows)
    memory = Memory(plan)
    options = SchedulerOptions(context=1_000_000, max_running=rows, chunk_tokens=8192)
    core = EngineCore(
        memory, PrefillFirst(), options, executor_of(rows, vocab, network),
        EngineSetup(vocab=vocab, eos_ids=(), tokenizer=None),
    )  # fmt: skip
    sampling = msgspec.structs.replace(params, max_tokens=min(64 * LAYOUT.pages_per_block * 10, steps + 50))
    for r in range(rows):
        core.submit(msg.Submit(rid=str(r), prompt_ids=(1, 2, 3, r % vocab), sampling=sampling))
    for _ in range(10):
        core.turn()
        core.take_outputs()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        core.turn()
        outputs = core.take_outputs()
        times.append((time.perf_counter() - begun - network.take_seconds()) * 1e6)
        assert len(outputs) == rows
    core.close()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for kind, params in KINDS.items():
        for rows in (1, 16, 64):
            for what, measure in (("executor", executor_us), ("engine", engine_us)):
                used = time.process_time()
                times = sorted(measure(rows, args.vocab, args.steps, params))
                cpu = (time.process_time() - used) / len(times) * 1e6
                p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
                figures = {"p50_us": round(p50), "p99_us": round(p99), "cpu_us": round(cpu)}
                found.append({"what": what, "kind": kind, "rows": rows, **figures})
                print(f"{what:9} {kind:8} batch {rows:3}  " + "  ".join(f"{k} {v:8,}" for k, v in figures.items()),
                      file=sys.stderr)  # fmt: skip
    if args.json:
        print(json.dumps({"vocab": args.vocab, "torch": torch.__version__, "results": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
