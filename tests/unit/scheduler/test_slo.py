"""Policy slo on the modelled executor: room for streams, deadlines, the guard, the bound on the gap, priorities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from k3stack.config.sampling import SamplingParams
from k3stack.errors import UserError
from k3stack.estimate.work import StepLoad
from k3stack.executor.modelled import ModelledExecutor
from k3stack.memory import Memory
from k3stack.scheduler import (
    CorrectedCost,
    FinishEvent,
    LearnedCost,
    PrefillFirst,
    Request,
    Scheduler,
    SchedulerOptions,
    Slo,
    SloOptions,
    StepLoop,
    Target,
    TokenEvent,
    VirtualClock,
)
from k3stack.scheduler.policies.deadlines import Prompt, in_order, in_time
from k3stack.scheduler.policy import Policy
from k3stack.scheduler.request import Entry
from tests.unit.scheduler.rig import pool

TARGET = Target(first_s=2.0, token_s=0.025)


class Device:
    """A chunk takes 20 ms and 50 µs a token, a decode step 8 ms and 0.3 ms a row; together they share the weights."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def seconds(self, load: StepLoad) -> float:
        chunk = 0.02 + 5e-5 * load.chunk_tokens if load.chunk_tokens else 0.0
        decode = 0.0003 * load.decode_rows + (0.008 if load.decode_rows and not load.chunk_tokens else 0.0)
        return self.factor * (chunk + decode)


@dataclass
class Run:
    """One simulated server: requests by arrival, what became of them, and every step's load, start and end."""

    policy: Policy
    requests: Sequence[Request]
    device: Device = field(default_factory=Device)
    overlap: int = 2
    chunk: int = 16_384
    ends: dict[str, FinishEvent] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)
    loads: list[tuple[StepLoad, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = VirtualClock()
        options = SchedulerOptions(context=200_000, max_running=128, chunk_tokens=self.chunk, target=TARGET)
        scheduler = Scheduler(Memory(pool(8000, 4, 64), prefix_cache=False), self.policy, options, clock)
        executor = ModelledExecutor(self.device.seconds, clock, rows=128, max_in_flight=self.overlap)
        submit = executor.submit

        def recording(plan: Any) -> Any:
            step = submit(plan)
            self.loads.append((step.load, step.start, step.finish))
            return step

        executor.submit = recording  # type: ignore[method-assign]
        loop = StepLoop(scheduler, executor)
        waiting = sorted(self.requests, key=lambda r: r.arrival or 0.0)
        while True:
            while waiting and (waiting[0].arrival or 0.0) <= clock.now():
                scheduler.submit(waiting.pop(0))
            if not loop.turn():
                if not waiting:
                    break
                clock.sleep_until(waiting[0].arrival or 0.0)
            for event in scheduler.take_events():
                if isinstance(event, TokenEvent):
                    self.tokens.setdefault(event.rid, []).append(clock.now())
                else:
                    self.ends[event.rid] = event
        scheduler.check()

    def first(self, rid: str) -> float:
        return self.tokens[rid][0]

    def started(self, rid: str) -> float:
        started = self.ends[rid].times.started
        assert started is not None
        return started

    def late_tokens(self, rid: str) -> int:
        """Tokens behind the stream's schedule."""
        times = self.tokens[rid]
        return sum(t > times[0] + k * TARGET.token_s + 1e-9 for k, t in enumerate(times))

    def met(self, request: Request) -> bool:
        times = self.tokens[request.rid]
        arrival = request.arrival or 0.0
        if request.whole:
            return times[-1] - arrival <= TARGET.first_s + TARGET.token_s * len(times)
        pace = (times[-1] - times[0]) / max(1, len(times) - 1)
        return times[0] - arrival <= TARGET.first_s and pace <= TARGET.token_s + 1e-9


def request(rid: str, arrival: float, prompt: int, answer: int, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    return Request(rid=rid, prompt_ids=(7,) * prompt, sampling=sampling, arrival=arrival, **fields)


def slo(**options: Any) -> Slo:
    return Slo(Device(), SloOptions(**options))


def test_a_prompt_waits_until_every_stream_has_room_for_it() -> None:
    run = Run(slo(), [request("a", 0.0, 4_000, 300), request("b", 0.3, 8_000, 100)])
    assert run.late_tokens("a") == 0 and run.late_tokens("b") == 0
    # a's first token comes at 0.22; the 0.42 s that b takes it has won after 25 steps of 8.3 ms.
    assert 0.40 < run.started("b") < 0.44
    prefill_first = Run(PrefillFirst(), [request("a", 0.0, 4_000, 300), request("b", 0.3, 8_000, 100)])
    assert prefill_first.late_tokens("a") > 0


def test_without_streams_prompts_start_at_once_and_share_a_step() -> None:
    run = Run(slo(), [request("a", 0.0, 1_000, 5), request("b", 0.0, 1_000, 5)])
    assert run.first("a") == run.first("b") == pytest.approx(0.02 + 0.1)


def test_a_stream_whose_first_token_came_too_late_holds_nobody_up() -> None:
    run = Run(slo(), [request("late", 0.0, 60_000, 400), request("b", 3.2, 8_000, 50)])
    assert run.first("late") > 2.0
    assert run.started("b") < 3.3


def test_prompts_that_are_late_anyway_go_behind_those_that_are_not() -> None:
    streams = [request(f"s{i}", 0.0, 100, 900) for i in range(8)]
    crowd = [request(f"c{i}", 1.0, 15_000, 2) for i in range(6)]
    fresh = [request("fresh", 4.5, 5_000, 2)]
    run = Run(slo(), streams + crowd + fresh)
    assert run.met(fresh[0])
    behind = [c for c in crowd if run.started(c.rid) > run.started("fresh")]
    assert behind and all(not run.met(c) for c in behind)
    assert all(run.late_tokens(s.rid) == 0 for s in streams)


def test_streams_are_made_late_for_a_prompt_only_when_they_can_be_expected_to_catch_up() -> None:
    arrivals = [request("s", 0.0, 100, 400), request("a", 0.05, 30_000, 2)]
    bold = Run(slo(risk=0.9), arrivals, chunk=65_536)
    shy = Run(slo(risk=0.1), arrivals, chunk=65_536)
    assert shy.late_tokens("s") == 0 and not shy.met(arrivals[1])
    assert bold.late_tokens("s") > 0 and bold.met(arrivals[0]) and bold.met(arrivals[1])


@pytest.mark.parametrize("guard", [4.0, 8.0])
def test_nobody_waits_longer_than_the_guard_allows(guard: float) -> None:
    """A stream that always has less room than a big prompt needs, and small prompts that always go first."""
    streams = [request(f"s{i}", 0.25 * i, 50, 12) for i in range(100)]
    run = Run(slo(guard_s=guard), [*streams, request("big", 1.0, 100_000, 5)])
    assert run.started("big") - 1.0 <= guard
    assert sum(run.met(s) for s in streams) > 50


def test_the_guard_saves_up_its_share_of_the_time() -> None:
    """Six prompts of 0.62 s for which the streams never have room: a tenth of the time is one every 6.2 s."""
    streams = [request(f"s{i}", 0.25 * i, 50, 100) for i in range(180)]
    big = [request(f"b{i}", 1.0 + i / 100, 12_000, 5) for i in range(6)]

    def pauses(credit: float) -> list[float]:
        run = Run(slo(risk=0.0, guard_s=4.0, guard_credit_s=credit), [*streams, *big])
        starts = sorted(run.started(b.rid) for b in big)
        return [b - a for a, b in pairwise(starts)][1:]  # the first was not the guard's: nobody decoded yet

    assert min(pauses(0.0)) > 6.2
    assert max(pauses(60.0)) < 2.5  # three tenths of the time until the credit is spent
    few = pauses(10.0)
    assert few[0] < 2.5 and few[-1] > 6.2


@pytest.mark.parametrize("mixed", [True, False])
def test_the_bound_on_the_gap_holds(mixed: bool) -> None:
    streams = [request(f"s{i}", 0.0, 200, 800) for i in range(16)]
    prompts = [request(f"p{i}", 2.0 + i, 8_000, 1) for i in range(6)]
    run = Run(slo(max_gap_s=0.15, mixed=mixed), streams + prompts)
    gaps = [b - a for s in streams for a, b in zip(run.tokens[s.rid], run.tokens[s.rid][1:], strict=False)]
    assert max(gaps) <= 0.15
    free = Run(slo(mixed=mixed), streams + prompts)
    gaps = [b - a for s in streams for a, b in zip(free.tokens[s.rid], free.tokens[s.rid][1:], strict=False)]
    assert max(gaps) > 0.3
    assert max(run.first(p.rid) - (p.arrival or 0) for p in prompts) < 2.0


@pytest.mark.parametrize(("mixed", "least"), [(True, 23.5), (False, 31.8)])
def test_a_bound_that_the_smallest_chunk_outlasts_is_said(mixed: bool, least: float) -> None:
    """64 tokens take 23.2 ms and 0.3 ms for the stream beside them, or a decode step of 8.3 ms after them."""
    note = slo(max_gap_s=least / 1000, mixed=mixed).gap_note()
    assert note is not None
    assert f"the bound of {least:.0f} ms" in note and f"takes {least:.0f} ms beside one stream" in note
    assert f"one of {least / 0.95:.0f} ms or more" in note
    assert slo(max_gap_s=(least + 0.2) / 950, mixed=mixed).gap_note() is None
    assert slo(mixed=mixed).gap_note() is None
    # Not kept, but served: the prompt is computed as a whole.
    run = Run(slo(max_gap_s=0.015), [request("s", 0.0, 100, 200), request("p", 1.0, 8_000, 1)])
    assert any(load.chunk_tokens == 8_000 for load, _, _ in run.loads)


def test_higher_priorities_start_first() -> None:
    streams = [request(f"s{i}", 0.0, 100, 600) for i in range(4)]
    low = [request(f"low{i}", 1.0, 10_000, 2) for i in range(3)]
    high = request("high", 1.01, 10_000, 2, priority=1)
    run = Run(slo(), [*streams, *low, high])
    assert run.started("low0") < run.started("high") < run.started("low1") < run.started("low2")


def test_an_answer_that_is_of_use_as_a_whole_has_only_its_last_deadline() -> None:
    """Prompts and little room: the one whose first token nobody waits for gives way, and meets its target."""
    streams = [request(f"s{i}", 0.0, 100, 900) for i in range(8)]
    crowd = [request(f"c{i}", 1.0, 12_000, 2) for i in range(2)]
    tool = request("tool", 1.0, 12_000, 150, whole=True)
    run = Run(slo(), [*streams, *crowd, tool])
    assert run.started("tool") > max(run.started(c.rid) for c in crowd)
    assert all(run.met(c) for c in crowd)
    assert run.first("tool") > 1.0 + TARGET.first_s, "a first token this late would miss the target"
    assert run.met(tool)


def poisson(rate: float, seconds: float, seed: int) -> list[Request]:
    rng = random.Random(seed)
    requests, t = [], 0.0
    while (t := t + rng.expovariate(rate)) < seconds:
        prompt = int(min(40_000, max(500, rng.lognormvariate(8.9, 0.5))))
        answer = int(min(512, max(16, rng.expovariate(1 / 200))))
        requests.append(request(f"r{len(requests)}", t, prompt, answer, whole=rng.random() < 1 / 3))
    return requests


@pytest.mark.parametrize("rate", [0.9, 1.5])
def test_more_requests_meet_the_target_than_with_prefill_first(rate: float) -> None:
    shares = {}
    for name, policy in (("prefill-first", PrefillFirst()), ("slo", slo())):
        met = total = 0
        for seed in (11, 12):
            requests = poisson(rate, 120.0, seed)
            run = Run(policy, requests)
            met += sum(run.met(r) for r in requests)
            total += len(requests)
        shares[name] = met / total
    assert shares["slo"] > shares["prefill-first"] + 0.03, shares


def test_a_wrong_cost_function_is_corrected_by_measured_steps() -> None:
    policy = Slo(Device(factor=0.4))
    requests = poisson(0.8, 60.0, 5)
    Run(policy, requests)
    cost = policy.cost
    assert isinstance(cost, CorrectedCost)
    assert cost.factors == pytest.approx([2.5, 2.5], rel=0.02)


def test_a_cost_learned_from_nothing_predicts_both_kinds_of_steps() -> None:
    policy = Slo(LearnedCost())
    requests = poisson(0.8, 60.0, 5)
    run = Run(policy, requests)
    for load, begin, end in run.loads[-200:]:
        assert policy.cost.seconds(load) == pytest.approx(end - begin, rel=0.1)
    assert sum(run.met(r) for r in requests) / len(requests) > 0.85


def prompt(name: int, due: float, seconds: float, priority: int = 0) -> Prompt:
    entry = Entry(request(str(name), 0.0, 10, 1, priority=priority), 0.0, 0.0, name, 1)
    return Prompt(due, name, seconds, 10, entry)


def test_the_most_deadlines_are_kept() -> None:
    prompts = [prompt(0, 4, 4), prompt(1, 5, 2), prompt(2, 6, 2), prompt(3, 7, 2), prompt(4, 1, 3)]
    kept = in_time(sorted(prompts), 0.0, 1.0)
    assert [p.order for p in kept] == [1, 2, 3], "the longest is put off, what cannot be saved is left out"
    assert [p.order for p in in_time(sorted(prompts), 0.0, 2.0)] == [1, 2]


def test_order_by_priority_then_deadline_then_arrival() -> None:
    prompts = [prompt(0, 9, 2), prompt(1, 8, 2), prompt(2, 1, 2), prompt(3, 20, 2, priority=1), prompt(4, 1, 3)]
    order, on_time = in_order(prompts, 0.0, 1.0)
    assert [p.order for p in order] == [3, 1, 0, 2, 4]
    assert on_time == {3, 1, 0}


@pytest.mark.parametrize(
    "bad",
    [
        {"guard_s": 0},
        {"guard_share": 0},
        {"guard_share": 1.5},
        {"guard_credit_s": -1},
        {"max_gap_s": 0},
        {"outside_s": -1},
    ],
)
def test_options_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(UserError):
        SloOptions(**bad).validate()  # type: ignore[arg-type]
