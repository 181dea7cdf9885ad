"""How long one turn of the scheduler takes: commit of the last result, then the next finished plan.

Real scheduler and memory at Kimi-K3's sizes (TP8), no network: results are made up outside the clock. Steady decode
with requests waiting for a row, rows crossing page boundaries (every 64 tokens) and snapshot positions (256) as they
come, and a request ending and the next one starting about every 20 turns. Prompt lengths are spread over 256 tokens;
``--aligned`` makes them equal, so that all rows cross in the same turn: no traffic does, and only p50 means anything.
What memory puts off until the device is busy is left out, as the step loop does it after sending. Prints p50 and p99
over ``--turns`` turns. ``--cpu`` counts the thread's own time, for a machine that others use.

    python benchmarks/scheduler_turn.py [--turns 2000] [--policy slo] [--aligned] [--cpu] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date

import numpy as np

from k3stack import __version__
from k3stack.config.models import model_geometry
from k3stack.config.sampling import SamplingParams
from k3stack.estimate.pools import block_layout, plan_pools
from k3stack.memory import Memory
from k3stack.scheduler import LearnedCost, PrefillFirst, Request, Scheduler, SchedulerOptions, Slo, Target, VirtualClock
from k3stack.scheduler.plan import GroupResult, RowResult, StepPlan, StepResult

LIMITS_US = {64: (300, 150), 512: (2000, 1000)}
"""Running requests -> most microseconds of a turn, and of planning alone."""
STEP_S = 0.02
"""How far a step moves the scheduler's clock: policy slo looks at time."""
END_EVERY = 20
STOP = 5


@dataclass
class Row:
    running: int
    context: int
    turns: int
    turn_p50_us: float
    turn_p99_us: float
    plan_p50_us: float
    plan_p99_us: float
    limit_turn_us: int
    limit_plan_us: int


def answer(plan: StepPlan, rng: np.random.Generator, stop: bool = False) -> StepResult:
    """A made-up result: random tokens, none of them a stop id, but for one row where ``stop``."""
    group = plan.groups[0]
    ids = rng.integers(10, 160_000, len(group.decode)).tolist()
    if stop:
        ids[int(rng.integers(len(ids)))] = STOP
    ids = tuple(ids)
    rows = tuple(RowResult(row=w.row, tokens=(11,) if w.sample else ()) for w in group.work)
    return StepResult(step=plan.step, groups=(GroupResult(tokens=ids, rows=rows),))


def build(
    running: int, context: int, turns: int, aligned: bool, slo: bool, rng: np.random.Generator, now: VirtualClock
) -> tuple[Scheduler, list[Request]]:
    """``running`` long prompts; and short ones for the rows that ends leave, to be submitted once all of
    these run (policy ``slo`` would take them first, and long prompts would be computed under the clock)."""
    layout = block_layout(model_geometry("kimi-k3"), tp=8)
    pages = running * (-(-(context + 3 * turns + 320) // layout.page_tokens) + 1)
    blocks = 4 * running + pages // layout.pages_per_block + 64
    plan = plan_pools(layout, blocks * layout.block_bytes, max_running=running)
    options = SchedulerOptions(
        context=1_048_576, max_running=running, chunk_tokens=16_384, max_queued=100_000, target=Target()
    )
    scheduler = Scheduler(Memory(plan), Slo(LearnedCost()) if slo else PrefillFirst(), options, now)
    ends = turns // END_EVERY
    later = []
    for i in range(running + ends + 2):
        length = (context if i < running else 200) + (0 if aligned else int(rng.integers(256)))
        prompt = tuple(rng.integers(10, 160_000, length).tolist())
        sampling = SamplingParams(max_tokens=64_000, stop_token_ids=(STOP,))
        request = Request(rid=f"r{i}", prompt_ids=prompt, sampling=sampling, eos_ids=(1, 2, 3))
        if i < running:
            scheduler.submit(request)
        else:
            later.append(request)
    return scheduler, later


def measure(running: int, context: int, turns: int, aligned: bool, slo: bool, clock: Callable[[], float]) -> Row:
    rng = np.random.default_rng(7)
    now = VirtualClock()
    scheduler, later = build(running, context, turns, aligned, slo, rng, now)
    flights: deque[StepPlan] = deque()

    def plan() -> StepPlan:
        made = scheduler.plan()
        if made is None:
            raise SystemExit(f"nothing to plan: {scheduler.stats()}")
        flights.append(made)
        return made

    while len(plan().groups[0].decode) < running:  # prompts first
        if len(flights) == 2:
            now.advance(STEP_S)
            scheduler.commit(answer(flights.popleft(), rng))
    for request in later:
        scheduler.submit(request)
    gc.collect()
    gc.freeze()
    whole, planning = [], []
    for turn in range(turns):
        if len(flights) < 2:
            plan()
        result = answer(flights.popleft(), rng, stop=turn % END_EVERY == END_EVERY - 1)
        now.advance(STEP_S)
        t0 = clock()
        scheduler.commit(result)
        scheduler.take_events()
        t1 = clock()
        plan()
        t2 = clock()
        scheduler.rest()  # as the step loop does once the plan is sent
        whole.append((t2 - t0) * 1e6)
        planning.append((t2 - t1) * 1e6)
    scheduler.check()
    (t50, t99), (p50, p99) = (np.percentile(x, (50, 99)) for x in (whole, planning))
    return Row(running, context, turns, float(t50), float(t99), float(p50), float(p99), *LIMITS_US[running])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1_000, 8_000, 64_000])
    parser.add_argument("--running", type=int, nargs="+", default=[64, 512], choices=sorted(LIMITS_US))
    parser.add_argument("--aligned", action="store_true")
    parser.add_argument("--policy", choices=("prefill-first", "slo"), default="prefill-first")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # 512 prompts of 64,000 tokens would only test this script's memory.
    pairs = [(n, c) for n in args.running for c in args.contexts if n * c <= 8_500_000]
    clock = time.thread_time if args.cpu else time.perf_counter
    rows = [measure(n, c, args.turns, args.aligned, args.policy == "slo", clock) for n, c in pairs]
    head = {
        "date": date.today().isoformat(),
        "k3stack": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "clock": "cpu" if args.cpu else "wall",
        "policy": args.policy,
    }
    if args.json:
        print(json.dumps({**head, "rows": [asdict(r) for r in rows]}))
        return
    print(" ".join(f"{k} {v}" for k, v in head.items()))
    print("running  context   turn p50    p99 (limit)     planning p50    p99 (limit)   µs")
    for r in rows:
        print(
            f"{r.running:7} {r.context:8,} {r.turn_p50_us:10.0f} {r.turn_p99_us:6.0f} ({r.limit_turn_us:5}) "
            f"{r.plan_p50_us:16.0f} {r.plan_p99_us:6.0f} ({r.limit_plan_us:5})"
        )


if __name__ == "__main__":
    main()
