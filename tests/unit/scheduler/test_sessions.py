"""Agents whose turns return to a long history: what is reused, end to end through scheduler, memory and toy device."""

from __future__ import annotations

import random

import pytest

from k3stack.config.models import model_geometry
from k3stack.estimate.pools import PoolPlan, block_layout
from k3stack.scheduler import SchedulerOptions
from tests.unit.scheduler.rig import Rig

HISTORIES, TURNS, LENGTH, ADDED, ANSWER = 8, 5, 4_000, 60, 40


def arena(histories: float) -> PoolPlan:
    """Blocks (Kimi-K3 at TP8: 32 pages each) for so many histories at their full length, each with a snapshot."""
    layout = block_layout(model_geometry("kimi-k3"), tp=8)
    pages = -(-(LENGTH + (TURNS + 1) * (ADDED + ANSWER)) // layout.page_tokens)
    blocks = int(histories * (1 + pages / layout.pages_per_block) + 0.5)
    return PoolPlan(engine="k3", layout=layout, budget_bytes=0, blocks=blocks)


def share_cached(plan: PoolPlan, overlap: int) -> tuple[list[float], Rig]:
    """Cached share of the prompt tokens of each round of turns, histories taking turns one after the other."""
    options = SchedulerOptions(context=100_000, max_running=8, chunk_tokens=2048)
    rig = Rig(plan, options, overlap=overlap, poison=False)
    rng = random.Random(3)
    histories = [[rng.randrange(512) for _ in range(LENGTH)] for _ in range(HISTORIES)]
    shares = []
    for turn in range(TURNS + 1):
        prompt = cached = 0
        for i, history in enumerate(histories):
            history += [rng.randrange(512) for _ in range(ADDED)]
            rid = f"h{i}t{turn}"
            rig.submit(rid, history, max_tokens=ANSWER)
            rig.run(check=False)
            history += rig.tokens[rid]
            prompt += rig.ends[rid].prompt_tokens
            cached += rig.ends[rid].cached_tokens
        shares.append(cached / prompt)
    return shares, rig


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize(("histories", "least"), [(8.9, 0.95), (4, 0.30), (2, 0.07)])
def test_returning_turns_reuse_their_history(histories: float, least: float, overlap: int) -> None:
    shares, rig = share_cached(arena(histories), overlap)
    returning = shares[1:]
    assert sum(returning) / len(returning) >= least, shares
    if histories > HISTORIES:
        assert min(returning) >= least
    rig.check_tokens(*[rid for rid in rig.requests if rid.endswith(f"t{TURNS}")])
