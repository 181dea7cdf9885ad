"""The engine core on a network that notices every wrong byte, with memory overwritten as soon as nobody owns it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from k3stack.config.sampling import SamplingParams
from k3stack.engine import messages as msg
from k3stack.engine.core import EngineCore, EngineSetup
from k3stack.executor.torch.executor import DeviceLost, TorchExecutor
from k3stack.executor.torch.sampler import Sampler
from k3stack.memory import Memory
from k3stack.scheduler import PrefillFirst, SchedulerOptions
from k3stack.scheduler.plan import RowAdd
from tests.cpu.fake_network import VOCAB, FakeNetwork, extend, logits_of, lone_greedy, pool_plan, views_of

CPU = torch.device("cpu")


def free_memory(memory: Memory) -> tuple[Iterable[int], Iterable[int]]:
    """Pages and blocks that nobody owns now."""
    arena = memory._arena
    used, states, per_block = set(arena.pages_in_use()), set(arena.states_in_use()), arena.pages_per_block
    blocks = [b for b in range(arena.reserved, arena.blocks) if b not in states]
    in_slabs = [b for b in blocks if any(p in used for p in range(b * per_block, (b + 1) * per_block))]
    pages = [p for b in in_slabs for p in range(b * per_block, (b + 1) * per_block) if p not in used]
    return pages, [b for b in blocks if b not in set(in_slabs)]


class Rig:
    """A core on the fake network, and everything that came out of it by (rid, choice)."""

    def __init__(
        self,
        *,
        blocks: int = 24,
        max_running: int = 8,
        chunk: int = 64,
        mixed: bool = False,
        overlap: bool = True,
        network: FakeNetwork | None = None,
        **memory: Any,
    ) -> None:
        plan = pool_plan(blocks, max_running)
        self.memory = Memory(plan, track_interval=64, **memory)
        self.network = network or FakeNetwork()
        self.executor = TorchExecutor(
            self.network,
            plan,
            views_of,
            vocab=VOCAB,
            device=CPU,
            max_in_flight=2 if overlap else 1,
            poison=True,
            free=lambda: free_memory(self.memory),
        )
        options = SchedulerOptions(context=600, max_running=max_running, chunk_tokens=chunk, max_queued=1000)
        setup = EngineSetup(vocab=VOCAB, eos_ids=(), tokenizer=None)
        self.core = EngineCore(self.memory, PrefillFirst(mixed=mixed), options, self.executor, setup)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], msg.Output] = {}

    def submit(self, rid: str, prompt: list[int], **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        self.core.submit(msg.Submit(rid=rid, prompt_ids=tuple(prompt), sampling=params))

    def turn(self) -> bool:
        busy = self.core.turn()
        self.take()
        return busy

    def take(self) -> None:
        for output in self.core.take_outputs():
            key = output.rid, output.choice
            assert key not in self.ends, f"{key} goes on after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[key] = output

    def run(self) -> None:
        while self.turn():
            pass

    def close(self) -> None:
        """Nothing may be held any more but what is cached."""
        self.run()
        stats = self.memory.stats()
        assert stats.running == stats.blocks_running == stats.pages_running == 0
        self.memory.check()
        self.core.scheduler.check()
        self.memory.flush()
        assert self.memory.stats().blocks_free == self.memory.stats().blocks
        self.core.close()


def lone_tokens(prompt: list[int], params: SamplingParams) -> list[int]:
    """What a request gets when nothing else runs: the fake network and the sampler, without any engine."""
    sampler = Sampler(VOCAB, CPU)
    sampler.add(RowAdd(row=0, state_block=0, pages=(), length=0, sampling=params, prompt_ids=tuple(prompt)))
    history = 0
    for token in prompt:
        history = extend(history, token)
    found: list[int] = []
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        token = int(sampler.sample(logits_of(history).unsqueeze(0), np.array([0])).tokens[0])
        history = extend(history, token)
        found.append(token)
    return found


def random_request(rng: random.Random, stems: list[list[int]]) -> tuple[list[int], SamplingParams]:
    """A prompt that often begins like others do, and parameters that touch every part of the sampler."""
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5, 70]))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.8]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(1 << 40),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        max_tokens=rng.choice([1, 2, 10, 40, 100]),
    )
    return prompt, params


@pytest.mark.parametrize(
    "shape",
    [
        {"blocks": 40},
        {"blocks": 9, "chunk": 30},
        {"blocks": 9, "mixed": True, "chunk": 50},
        {"blocks": 12, "overlap": False, "mixed": True},
        {"blocks": 10, "prefix_cache": False},
        {"blocks": 7, "max_running": 3, "chunk": 7},
    ],
    ids=lambda shape: "-".join(f"{k}{v}" for k, v in shape.items()),
)
def test_random_life_gives_everyone_the_tokens_of_a_lone_run(shape: dict[str, Any]) -> None:
    rng = random.Random(str(shape))
    rig = Rig(**shape)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.choice([3, 64, 128, 150]))] for _ in range(4)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    for i in range(60):
        prompt, params = random_request(rng, stems)
        rid = f"r{i}"
        asked[rid] = prompt, params
        rig.core.submit(msg.Submit(rid=rid, prompt_ids=tuple(prompt), sampling=params, priority=rng.choice([0, 0, 1])))
        for _ in range(rng.choice([0, 0, 1, 3, 12])):
            rig.turn()
        if rng.random() < 0.25:
            rig.core.abort(rng.choice(list(asked)))
    rig.run()
    for rid, (prompt, params) in asked.items():
        end = rig.ends[rid, 0]
        expected, tokens = lone_tokens(prompt, params), rig.tokens[rid, 0]
        assert end.finish_reason in ("length", "abort"), end
        assert tokens == (expected if end.finish_reason == "length" else expected[: len(tokens)]), rid
    assert sum(end.finish_reason == "length" for end in rig.ends.values()) > 30
    rig.close()


def test_a_reused_prefix_is_reported_and_changes_nothing() -> None:
    rig = Rig()
    prompt = [i % VOCAB for i in range(150)]
    rig.submit("first", prompt, max_tokens=5)
    rig.run()
    rig.submit("again", prompt, max_tokens=5)
    rig.submit("longer", [*prompt, 1, 2, 3], max_tokens=5)
    rig.run()
    assert rig.ends["first", 0].cached_tokens == 0
    assert rig.ends["again", 0].cached_tokens >= 128
    assert rig.tokens["again", 0] == rig.tokens["first", 0] == lone_greedy(prompt, 5)
    assert rig.ends["longer", 0].cached_tokens >= 128
    assert rig.tokens["longer", 0] == lone_greedy([*prompt, 1, 2, 3], 5)
    rig.close()


def test_choices_wait_for_the_first_and_find_its_prompt() -> None:
    rig = Rig()
    prompt = [i % VOCAB for i in range(140)]
    rig.submit("a", prompt, n=3, temperature=1.0, seed=7, max_tokens=20)
    rig.run()
    assert rig.ends["a", 0].cached_tokens == 0
    assert all(rig.ends["a", i].cached_tokens >= 128 for i in (1, 2))
    assert len({tuple(rig.tokens["a", i]) for i in range(3)}) == 3
    assert rig.tokens["a", 0] == lone_tokens(prompt, SamplingParams(temperature=1.0, seed=7, max_tokens=20))
    rig.close()


@pytest.mark.parametrize("turns", [0, 1, 3, 8])
def test_aborting_many_choices_ends_each_once(turns: int) -> None:
    rig = Rig()
    rig.submit("a", list(range(100)), n=4, max_tokens=50)
    for _ in range(turns):
        rig.turn()
    rig.core.abort("a")
    rig.core.abort("a")
    rig.run()
    assert {key: end.finish_reason for key, end in rig.ends.items()} == {("a", i): "abort" for i in range(4)}
    rig.close()


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    rig = Rig()
    rig.submit("a", list(range(100)), n=2, max_tokens=30)
    rig.turn()
    rig.core.drain()
    rig.submit("late", [1], max_tokens=1)
    rig.run()
    assert rig.core.drained
    assert [rig.ends[key].finish_reason for key in (("a", 0), ("a", 1), ("late", 0))] == [
        "length",
        "length",
        "rejected",
    ]
    assert rig.ends["late", 0].refusal == "draining"
    rig.close()


def test_flush_only_when_idle() -> None:
    rig = Rig()
    rig.submit("a", list(range(100)), max_tokens=3)
    rig.turn()
    assert not rig.core.flush()
    rig.run()
    assert rig.memory.stats().pages_cached > 0
    assert rig.core.flush() and rig.memory.stats().pages_cached == 0
    rig.close()


def test_a_failed_step_ends_its_requests_and_the_others_go_on() -> None:
    prompts = {f"g{i}": [i, i + 1, 3] for i in range(3)}
    expected = {rid: lone_greedy(prompt, 60) for rid, prompt in prompts.items()}
    never = next(t for t in range(10, VOCAB) if not any(t in tokens for tokens in expected.values()))
    rig = Rig(network=FakeNetwork(fail_on=never))
    for rid, prompt in prompts.items():
        rig.submit(rid, prompt, max_tokens=60)
    for _ in range(5):
        rig.turn()
    rig.submit("bad", [1, never, 2], max_tokens=5)
    rig.run()
    assert rig.ends["bad", 0].finish_reason == "error" and "poisonous" in (rig.ends["bad", 0].message or "")
    for rid, tokens in expected.items():
        assert (rig.ends[rid, 0].finish_reason, rig.tokens[rid, 0]) == ("length", tokens)
    rig.close()


def test_a_lost_device_ends_every_request_and_the_engine() -> None:
    rig = Rig(network=FakeNetwork(fail_on=100, error=torch.AcceleratorError))
    rig.submit("running", [1, 2, 3], max_tokens=50)
    for _ in range(3):
        rig.turn()
    rig.submit("bad", [100], max_tokens=5)
    rig.submit("waiting", [4], n=2, max_tokens=5)
    with pytest.raises(DeviceLost, match="poisonous"):
        rig.run()
    rig.take()
    assert {key: end.finish_reason for key, end in rig.ends.items()} == {
        ("running", 0): "error",
        ("bad", 0): "error",
        ("waiting", 0): "error",
        ("waiting", 1): "error",
    }
    rig.core.close()


def test_a_row_with_nan_ends_alone() -> None:
    rig = Rig(network=FakeNetwork(nan_on=100))
    rig.submit("bad", [1, 100], max_tokens=5)
    rig.submit("good", [1, 2], max_tokens=3)
    rig.run()
    assert rig.ends["bad", 0].finish_reason == "error" and "not finite" in (rig.ends["bad", 0].message or "")
    assert rig.ends["good", 0].finish_reason == "length"
    rig.close()


def test_prompt_scores_come_with_and_without_a_cached_prefix() -> None:
    rig = Rig(chunk=64)
    prompt = [(3 * i) % VOCAB for i in range(150)]
    scores: list[list[Any]] = []
    for rid, begin in (("a", 0), ("b", 0), ("c", 140)):
        rig.core.submit(
            msg.Submit(
                rid=rid,
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs_from=begin),
            )
        )
        found: list[Any] = []
        while rig.core.turn():
            found += [entry for output in rig.core.take_outputs() for entry in output.scored]
        scores.append(found)
    assert len(scores[0]) == 150 and scores[0] == scores[1] and scores[2] == scores[0][140:]
    assert [entry.token for entry in scores[0][1:]] == prompt[1:]
    rig.core.close()
