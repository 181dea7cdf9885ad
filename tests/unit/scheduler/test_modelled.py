"""The modelled executor: durations from the cost function, loads as they are, one device that works in order."""

from __future__ import annotations

import pytest

from k3stack.config.sampling import SamplingParams
from k3stack.errors import BugError
from k3stack.estimate.work import StepLoad
from k3stack.executor.modelled import ModelledExecutor
from k3stack.memory import Memory
from k3stack.scheduler import FinishEvent, PrefillFirst, Request, Scheduler, SchedulerOptions, StepLoop, VirtualClock
from tests.unit.scheduler.rig import pool

OPTIONS = SchedulerOptions(context=1000, max_running=8, chunk_tokens=32)


class Loads:
    """A cost of 1 s a chunk token and 10 s a decode step, which remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[StepLoad] = []

    def __call__(self, load: StepLoad) -> float:
        self.seen.append(load)
        return load.chunk_tokens + (10.0 if load.decode_rows else 0.0)


def build(*, overlap: int = 1, mixed: bool = False) -> tuple[Scheduler, StepLoop, VirtualClock, Loads]:
    clock, loads = VirtualClock(), Loads()
    scheduler = Scheduler(Memory(pool(64)), PrefillFirst(mixed=mixed), OPTIONS, clock)
    executor = ModelledExecutor(loads, clock, rows=8, max_in_flight=overlap, token=5)
    return scheduler, StepLoop(scheduler, executor), clock, loads


def request(rid: str, prompt: int, outputs: int) -> Request:
    sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
    return Request(rid=rid, prompt_ids=(ord(rid), *range(prompt - 1)), sampling=sampling)


@pytest.mark.parametrize("overlap", [1, 2])
def test_times_are_the_sum_of_the_steps(overlap: int) -> None:
    scheduler, loop, clock, loads = build(overlap=overlap)
    scheduler.submit(request("a", 40, 4))
    loop.run()
    ends = [e for e in scheduler.take_events() if isinstance(e, FinishEvent)]
    assert [e.output_tokens for e in ends] == [4]
    assert ends[0].times.first_token == 40.0 and ends[0].times.finished == 70.0
    assert clock.now() == 70.0
    assert [load.chunk_tokens for load in loads.seen] == [32, 8, 0, 0, 0]
    assert [load.chunk_prefix for load in loads.seen[:2]] == [0, 32]
    assert loads.seen[1].chunk_pairs == 8 * 32 + 8 * 8 / 2
    assert [load.samples for load in loads.seen] == [0, 1, 1, 1, 1]
    assert [load.decode_context for load in loads.seen[2:]] == [40, 41, 42]


def test_mixed_steps_count_both_kinds() -> None:
    scheduler, loop, _, loads = build(mixed=True)
    scheduler.submit(request("a", 8, 6))
    loop.turn()
    scheduler.submit(request("b", 20, 2))
    loop.run()
    both = [load for load in loads.seen if load.decode_rows and load.chunk_tokens]
    assert [(load.decode_rows, load.chunk_tokens, load.decode_context, load.samples) for load in both] == [
        (1, 20, 8, 2)
    ]


def test_handles_tell_when_a_step_is_done() -> None:
    scheduler, loop, clock, _ = build(overlap=2)
    scheduler.submit(request("a", 40, 2))
    loop.launch()
    first, second = loop.flights
    assert (first.start, first.finish, second.start, second.finish) == (0.0, 32.0, 32.0, 40.0)  # type: ignore[attr-defined]
    assert not loop.executor.ready(first)
    clock.sleep_until(32.0)
    assert loop.executor.ready(first) and not loop.executor.ready(second)
    with pytest.raises(BugError, match="out of order"):
        loop.executor.wait(second)


def test_gaps_in_the_numbering_are_refused() -> None:
    scheduler, loop, _, _ = build()
    scheduler.submit(request("a", 4, 2))
    plan = scheduler.plan()
    assert plan is not None
    loop.executor.submit(plan)
    with pytest.raises(BugError, match="1 expected"):
        loop.executor.submit(plan)
