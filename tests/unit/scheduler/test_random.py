"""Random lives of memory and scheduler together, on the toy device that notices every misplaced byte.

Each episode builds a small arena and does what clients, operators and failing devices do, in random order: submit
(fresh prompts, shared prefixes, returning turns), abort between and during steps, flush, failing rows, steps and
executors, drain. After every operation the books must balance; at the end every request has ended exactly once with
the tokens of a lone run, or a beginning of them where it was cut short.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from k3stack.estimate.pools import PoolPlan
from k3stack.estimate.work import StepLoad
from k3stack.executor.scripted import Fault, ToyModel
from k3stack.scheduler import PrefillFirst, SchedulerOptions, Slo, SloOptions, Target
from k3stack.scheduler.policy import Policy
from tests.unit.scheduler.rig import Rig, StopFinder, pool

MODEL = ToyModel(vocab=40)


def mask_of(outputs: Sequence[int]) -> bytes:
    """Half of the tokens are allowed, which half depends on what was said."""
    odd = (len(outputs) + sum(outputs[-3:])) % 2
    return bytes([0xAA if odd else 0x55] * 5)


def random_pool(rng: random.Random) -> PoolPlan:
    """A tiny arena of either behaviour that holds at least one request of a few pages."""
    per_block, rows = rng.choice((1, 2, 3, 4, 8)), rng.choice((2, 3, 4, 8))
    if rng.random() < 0.5:
        blocks = rng.randint(3 + 8 // per_block, 6 + 40 // per_block)
        caps = {}
        if rng.random() < 0.2:
            caps = {"max_states": rng.randint(1, 4), "max_pages": rng.randint(6, (blocks - 1) * per_block)}
        return pool(blocks, per_block, rows, **caps)
    slots = rng.choice((1, 3, 4, 5))
    states = slots * rng.randint(1, 4)
    pages = rng.randint(8, 40)
    blocks = states + -(-pages // per_block)
    return pool(
        blocks, per_block, rows, engine="sglang", max_states=states, max_pages=pages, slots_per_request=slots,
        max_running=states // slots,
    )  # fmt: skip


def random_options(rng: random.Random, plan: PoolPlan) -> SchedulerOptions:
    fields = {
        "context": rng.choice((64, 200)),
        "max_running": rng.choice((1, 2, 4, 8)),
        "chunk_tokens": rng.choice((3, 8, 16, 64)),
        "max_queued": rng.choice((3, 50)),
        "aging_s": rng.choice((0.0, 0.05, 30.0)),
        "target": rng.choice((None, Target(0.2, 0.012), Target(0.05, 0.02))),
    }
    if plan.engine == "sglang":
        fields["max_running"] = min(fields["max_running"], plan.max_running)
        fields["chunk_tokens"] = max(fields["chunk_tokens"], plan.layout.page_tokens)
        return SchedulerOptions.for_sglang(**fields)
    return SchedulerOptions(**fields)


class FixedCost:
    """As the rig's clock goes: 10 ms a step."""

    def seconds(self, load: StepLoad) -> float:
        return 0.01


def random_policy(rng: random.Random) -> Policy:
    if rng.random() < 0.6:
        return PrefillFirst(mixed=rng.random() < 0.5)
    options = SloOptions(guard_s=rng.choice((0.1, 1.0)), mixed=rng.random() < 0.5, max_gap_s=rng.choice((None, 0.02)))
    return Slo(FixedCost(), options)


@dataclass
class Episode:
    seed: int
    rng: random.Random = field(init=False)
    rig: Rig = field(init=False)
    armed: dict[str, Fault] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    histories: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        plan = random_pool(rng)
        self.rig = Rig(
            plan,
            random_options(rng, plan),
            policy=random_policy(rng),
            overlap=rng.choice((1, 2, 2, 3)),
            model=MODEL,
            mask_of=mask_of,
            stopper=StopFinder(),
            faults=self.fault,
            track_interval=rng.choice((2, 8, 64)),
            prefix_cache=rng.random() < 0.9,
            max_states_per_path=rng.choice((None, None, 1, 2)),
        )
        self.histories = [tuple(rng.randrange(40) for _ in range(rng.randint(1, 20))) for _ in range(3)]

    def fault(self, boundary: str, step: int) -> Fault | None:
        if boundary == "wait" and self.rng.random() < 0.02:
            self.abort()  # with the step in flight
        return self.armed.pop(boundary, None)

    def run(self, operations: int) -> None:
        actions = (
            (self.submit, 20), (self.turn, 60), (self.abort, 5), (self.flush, 1), (self.fail_row, 1),
            (self.fail_step, 1), (self.break_executor, 0.5), (self.launch, 4),
        )  # fmt: skip
        calls, weights = zip(*actions, strict=True)
        for _ in range(operations):
            self.rng.choices(calls, weights)[0]()
            self.rig.take()
            self.rig.scheduler.check()
        self.armed.clear()
        self.rig.scheduler.drain()
        self.operations["drain"] += 1
        self.submit()
        self.rig.run(limit=5_000)
        self.rig.check_tokens()
        assert self.rig.scheduler.drained
        self.operations["preempt"] += self.rig.scheduler.stats().preempted
        if self.rig.pool.engine == "k3":
            assert self.rig.scheduler.stats().rescued == 0
        self.operations["rescue"] += self.rig.scheduler.stats().rescued
        assert not [e for e in self.rig.ends.values() if e.message.startswith("no room")]
        memory = self.rig.memory.stats()
        self.operations["evict"] += memory.evicted_pages + memory.evicted_snapshots
        self.operations["hit"] += memory.hits

    def submit(self) -> None:
        rng, rig = self.rng, self.rig
        for _ in range(rng.choice((1, 1, 1, 4))):
            start = rng.choice(self.histories)
            prompt = start[: rng.randint(1, len(start))] if rng.random() < 0.4 else start
            prompt += tuple(rng.randrange(40) for _ in range(rng.choice((0, 0, 1, 3, 10, 30))))
            kw: dict[str, object] = {}
            if rng.random() < 0.2:
                kw = {"presence_penalty": 0.5, "repetition_penalty": rng.choice((1.0, 1.2))}
            if rng.random() < 0.2:
                kw["seed"] = rng.randrange(1000)
            if rng.random() < 0.2:
                kw["min_tokens"] = 3
            if rng.random() < 0.1:
                kw["prompt_logprobs_from"] = rng.randrange(len(prompt) + 1)
            if rng.random() < 0.1:
                kw["logprobs"] = True
            if rng.random() < 0.1:
                kw["stop"] = ("stop",)
            if rng.random() < 0.1:
                kw["masked"] = True
            rig.submit(
                f"r{len(rig.requests)}",
                prompt,
                max_tokens=rng.choice((None, 3, 5, 20, 20)),
                priority=rng.choice((0, 0, 0, 1, -1)),
                eos_ids=rng.choice(((), (7,), (7, 8, 9))),
                ignore_eos=rng.random() < 0.2,
                whole=rng.random() < 0.3,
                **kw,
            )
            self.operations["submit"] += 1

    def turn(self) -> None:
        rig = self.rig
        try:
            rig.turn(check=False)
        except RuntimeError as e:
            assert str(e) == "broken"
            rig.executor.restart()
            self.operations["broken executor"] += 1
        ended = [rid for rid, end in rig.ends.items() if end.reason in ("stop", "length")]
        if ended and self.rng.random() < 0.3:  # a session goes on with its answer
            rid = self.rng.choice(ended)
            history = rig.requests[rid].prompt_ids + tuple(rig.tokens[rid])
            if len(history) < 120:
                self.histories[self.rng.randrange(3)] = history

    def launch(self) -> None:
        try:
            self.rig.loop.launch()
        except RuntimeError as e:
            assert str(e) == "broken"
            self.rig.executor.restart()
            self.operations["broken executor"] += 1

    def abort(self) -> None:
        live = [rid for rid in self.rig.requests if rid not in self.rig.ends]
        if live:
            self.rig.scheduler.abort(self.rng.choice(live), "by test")
            self.rig.take()
            self.operations["abort"] += 1

    def flush(self) -> None:
        self.rig.memory.flush()
        self.operations["flush"] += 1

    def fail_row(self) -> None:
        self.armed["wait"] = Fault(rows={self.rng.randrange(8): "row failed"})
        self.operations["fail row"] += 1

    def fail_step(self) -> None:
        self.armed["wait"] = Fault(step_error="step failed")
        self.operations["fail step"] += 1

    def break_executor(self) -> None:
        self.armed[self.rng.choice(("wait", "submit"))] = Fault(raises=RuntimeError("broken"))


def episodes(seeds: range, operations: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        episode = Episode(seed)
        try:
            episode.run(operations)
        except BaseException as e:
            e.add_note(f"in episode {seed} (overlap {episode.rig.executor.max_in_flight}, {episode.rig.pool.engine})")
            raise
        total += episode.operations
    return total


def count(total: Counter[str]) -> int:
    """Operations, not counting what is only an effect of others."""
    return sum(total.values()) - total["hit"] - total["evict"] - total["rescue"]


def test_random_lives() -> None:
    total = episodes(range(250), 120)
    print(total)
    assert count(total) >= 15_000
    for kind in ("submit", "abort", "preempt", "evict", "fail row", "fail step", "broken executor", "drain", "hit"):
        assert total[kind] > 0, kind


@pytest.mark.slow
def test_many_random_lives() -> None:
    total = episodes(range(1_000, 1_800), 120)
    print(total)
    assert count(total) >= 50_000
