"""Random operations against the dictionary twin, in arenas that are always too small."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.unit.memory.driver import Driver
from tests.unit.memory.twin import pool

POOLS: dict[str, dict[str, Any]] = {
    "k3": {"blocks": 9},
    "roomy": {"blocks": 40},
    "tiny": {"blocks": 4},
    "one page a block": {"blocks": 24, "per_block": 1},
    "wide blocks": {"blocks": 6, "per_block": 8},
    "dcp": {"blocks": 9, "dcp": 2},
    "dcp, wide": {"blocks": 8, "per_block": 2, "dcp": 4},
    "capped": {"blocks": 12, "max_states": 5, "max_pages": 20},
    "no state": {"blocks": 24, "states": False},
    "no pages": {"blocks": 9, "pages": False},
    "sglang 5": {"blocks": 24, "engine": "sglang", "slots_per_request": 5, "max_states": 15, "max_pages": 28},
    "sglang 4": {"blocks": 24, "engine": "sglang", "slots_per_request": 4, "max_states": 12, "max_pages": 48},
    "sglang 3": {"blocks": 24, "engine": "sglang", "slots_per_request": 3, "max_states": 9, "max_pages": 40},
    "sglang 1": {"blocks": 12, "engine": "sglang", "slots_per_request": 1, "max_states": 4, "max_pages": 30},
}


def make(name: str, seed: int) -> Driver:
    rng = random.Random(f"{name}{seed}")
    plan = pool(**POOLS[name])
    return Driver(
        plan,
        rng,
        prefix_cache=rng.random() < 0.95,
        track_interval=rng.choice([1, 4, 6, 16]),
        max_states_per_path=rng.choice([None, None, 1, 2]),
        decode_snapshots=rng.random() < 0.8,
    )


def run(name: str, seed: int, turns: int) -> Driver:
    driver = make(name, seed)
    for _ in range(turns):
        driver.turn()
    return driver


@pytest.mark.parametrize("name", POOLS)
def test_random_operations_agree_with_the_twin(name: str) -> None:
    operations = sum(run(name, seed, 80).operations for seed in range(6))
    assert operations > 2_500  # 35,000 over all pools; as many again below


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_many_random_operations_agree_with_the_twin(name: str) -> None:
    operations = sum(run(name, seed, 150).operations for seed in range(100, 130))
    assert operations > 15_000
