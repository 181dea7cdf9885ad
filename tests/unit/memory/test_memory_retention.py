"""What is kept: learning when sessions return, and what that is worth against least recent use."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from k3stack.estimate.pools import BlockLayout, PoolPlan
from k3stack.memory import Memory
from k3stack.memory.retention import BINS, EDGES, FRESH_TIP, PRIOR, Recency, Worth, age_bin, chances, gittins

ADDED, ANSWER = 60, 40
VOCAB = 160_000


def plan(blocks: int, pages_per_block: int = 32) -> PoolPlan:
    """64-token pages, one cache row a byte."""
    layout = BlockLayout(1, 1, 1, pages_per_block * 64, 0, pages_per_block)
    return PoolPlan("k3", layout, blocks * layout.block_bytes, blocks)


def serve(memory: Memory, ids: list[int], rng: random.Random, chunk: int = 2048) -> int:
    """One request alone; ``ids`` grows by the answer. Returns the tokens it reused."""
    opened = memory.open(0, ids)
    assert opened is not None
    at = opened.cached
    while at < len(ids):
        end = memory.cut(0, at, min(len(ids), at + chunk))
        assert memory.extend(0, end) is not None
        memory.snapshot(0, ids, end)
        memory.advance(0, ids, end)
        at = end
    ids += tokens(ANSWER, rng)
    assert memory.extend(0, len(ids)) is not None
    memory.close(0, ids, state_at=len(ids) - 1)
    return opened.cached


def tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def round_robin(
    memory: Memory, histories: int = 8, length: int = 4_000, turns: int = 5, chunk: int = 2048, rests: bool = False
) -> float:
    """Cached share of the prompt tokens from the second turn on."""
    rng = random.Random(3)
    sessions = [tokens(length, rng) for _ in range(histories)]
    asked = cached = 0
    for turn in range(turns + 1):
        for ids in sessions:
            ids += tokens(ADDED, rng) if turn else []
            asked += len(ids) if turn else 0
            cached += serve(memory, ids, rng, chunk)
            if rests:
                memory.rest()
    memory.check()
    return cached / asked


def blocks_for(histories: float, pages_per_block: int, length: int = 4_540) -> int:
    """Blocks that hold so many whole histories at their full length, each with one state."""
    return -int(-histories * (-(-length // 64) + pages_per_block) // pages_per_block)


@pytest.mark.parametrize("chunk", [512, 2048, 16_384])
@pytest.mark.parametrize("pages_per_block", [1, 4, 8, 16, 32])
@pytest.mark.parametrize(("histories", "least"), [(12, 0.95), (4, 0.30), (2, 0.07)])
def test_sessions_in_turn(histories: float, least: float, pages_per_block: int, chunk: int) -> None:
    """43 % is the best possible with room for four of eight, 14 % with room for two."""
    blocks = blocks_for(histories, pages_per_block)
    assert round_robin(Memory(plan(blocks, pages_per_block)), chunk=chunk) >= least


def test_what_is_done_ahead_changes_nothing() -> None:
    """Between requests, when the device is busy: the order of eviction, and what is remembered of the next to go."""
    memories = [Memory(plan(blocks_for(4, 16), 16)) for _ in range(2)]
    shares = [round_robin(memory, rests=rests) for memory, rests in zip(memories, (False, True), strict=True)]
    assert shares[0] == shares[1] >= 0.30
    ghosts = [memory._retention.ghosts for memory in memories]
    assert ghosts[0] and list(ghosts[0]) == list(ghosts[1])


def test_least_recent_use_hits_nothing_in_turn() -> None:
    assert round_robin(Memory(plan(blocks_for(4, 32)), ranking=Recency())) == 0.0


def test_stays_whole_in_a_longer_round() -> None:
    memory = Memory(plan(blocks_for(20, 16, 4_000), 16))
    assert round_robin(memory, histories=40, turns=6) > 0.35


def agents(rng: random.Random, requests: int, one_shot: float) -> Iterator[list[int]]:
    """Sessions with one system prompt, born at random, that return after pauses of all lengths and then end."""
    system = tokens(1_500, rng)
    alive: list[tuple[float, int, list[int]]] = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(1.0)
        due = min(alive, default=(now + 1, 0, []))
        if due[0] > now:
            turns = 1 if rng.random() < one_shot else rng.randint(2, 9)
            due = (now, turns, [*system, *tokens(rng.randint(300, 4_000), rng)])
        else:
            alive.remove(due)
        _, turns, ids = due
        ids += tokens(rng.randint(20, 300), rng)
        yield ids
        if turns > 1:
            alive.append((now + rng.lognormvariate(1.5, 1.0), turns - 1, ids))


@pytest.mark.parametrize(("blocks", "one_shot", "least"), [(14, 0.0, 1.05), (30, 0.0, 1.05), (30, 0.6, 1.0)])
def test_no_worse_than_least_recent_use_where_that_is_good(blocks: int, one_shot: float, least: float) -> None:
    share = {}
    for name, ranking in (("worth", None), ("recency", Recency())):
        rng, memory = random.Random(11), Memory(plan(blocks), ranking=ranking)
        for ids in agents(rng, 300, one_shot):
            serve(memory, ids, rng)
        stats = memory.stats()
        share[name] = stats.cached_tokens / stats.prompt_tokens
        assert stats.evicted_snapshots > 50
    assert share["worth"] >= least * share["recency"] > 0.2


def test_popular_prefixes_stay() -> None:
    """Every other request is about one of three documents; half of all tokens can be cached at most."""
    shares = []
    for seed in range(3):
        rng, memory = random.Random(seed), Memory(plan(30))
        popular = [tokens(3_000, rng) for _ in range(3)]
        for _ in range(60):
            serve(memory, [*rng.choice(popular), *tokens(ADDED, rng)], rng)
            serve(memory, tokens(3_000, rng), rng)
        stats = memory.stats()
        shares.append(stats.cached_tokens / stats.prompt_tokens)
        assert all(memory.lookup([*ids, 1]).cached >= 2_048 for ids in popular)
    assert sum(shares) > 3 * 0.4


def test_bins_of_age() -> None:
    for age in range(1, 3_000):
        at = age_bin(age)
        assert EDGES[at] <= age < EDGES[at + 1]
    assert age_bin(0) == 0 and age_bin(1 << 40) == BINS - 1


def test_before_anything_is_known_older_is_worth_less() -> None:
    index = gittins([PRIOR[FRESH_TIP]] * BINS)
    assert all(a >= b for a, b in itertools.pairwise(index)) and index[0] > 5 * index[8]


def test_index_of_returns_at_one_age_rises_towards_it() -> None:
    returns = [0.0] * BINS
    returns[5] = 20.0  # ages 8 to 11
    index = gittins(chances(returns, [0.0] * BINS, [0.29] * BINS))
    assert index[0] < index[1] < index[2] < index[3] < index[4] < index[5]
    assert index[6] < index[0]


def test_chances_count_those_that_reach_a_bin() -> None:
    returns, ends = [0.0] * BINS, [0.0] * BINS
    returns[2], ends[0], ends[4] = 3.0, 5.0, 1.0
    chance = chances(returns, ends, [0.0] * BINS)
    assert chance[:4] == [0.0, 0.0, 3 / 5, 0.0]  # 4 reach bin 2, and the prior weighs 1


def test_rate_forgets_old_traffic() -> None:
    worth = Worth(64, 32)
    for _ in range(3_000):
        worth.returned(FRESH_TIP, 4)
    assert sum(worth._returns[FRESH_TIP]) <= 1_025


def test_many_short_prompts_beside_many_long_ones_stay_cheap() -> None:
    """Prompts shorter than a page all hang at the root; filing one must not walk the others' paths."""
    rng, memory = random.Random(4), Memory(plan(2_000))
    for _ in range(200):
        serve(memory, tokens(2_000, rng), rng)
    steps = 0
    below = memory._tree._is_below

    def counted(*args: Any) -> bool:
        nonlocal steps
        steps += 1
        return below(*args)

    memory._tree._is_below = counted  # type: ignore[method-assign]
    for _ in range(50):
        serve(memory, tokens(20, rng), rng)
    assert steps == 0
    memory.check()
