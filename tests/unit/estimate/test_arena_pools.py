"""The arena's plan: blocks, padding, what it admits, pipelines, caps, and the split that must fit a real buffer."""

from __future__ import annotations

import pytest

from k3stack.config.hardware import GIB
from k3stack.config.layout import ParallelLayout
from k3stack.config.models import model_geometry
from k3stack.errors import DoesNotFit
from k3stack.estimate.pools import admitted, block_layout, plan_pools, plan_stages, stage_block_layouts
from k3stack.estimate.sglang import SglangSettings

K3 = model_geometry("kimi-k3")
BUDGET = int(30.368 * GIB)


@pytest.mark.parametrize(
    ("tp", "pages", "padding"), [(1, 254, 0.0002), (2, 127, 0.0002), (8, 32, 0.008), (16, 16, 0.008), (32, 8, 0.008)]
)
def test_blocks(tp: int, pages: int, padding: float) -> None:
    layout = block_layout(K3, tp=tp)
    assert layout.pages_per_block == pages
    assert layout.padding_share == pytest.approx(padding, abs=0.0001)


def test_arena_admits_more_than_reserved_slots() -> None:
    plan = plan_pools(block_layout(K3, tp=8), BUDGET)
    assert plan.blocks == BUDGET // (32 * 64 * 27_648)
    alone = admitted(plan, 9_216)
    # 144 pages are 4.5 blocks; with the state 5.5 blocks a request.
    assert alone.requests == int(plan.blocks / 5.5)
    assert alone.binding == "cache"
    kept = admitted(plan, 9_216, snapshots=1)
    assert kept.requests == int(plan.blocks / 6.5)
    assert admitted(plan_pools(block_layout(K3, tp=8), BUDGET, max_running=4096), 500).binding == "state"


def test_running_cap_binds() -> None:
    plan = plan_pools(block_layout(K3, tp=8), BUDGET, max_running=10)
    assert admitted(plan, 9_216).binding == "max_running_requests" and admitted(plan, 9_216).requests == 10


def test_caps() -> None:
    layout = block_layout(K3, tp=8)
    plan = plan_pools(layout, BUDGET, ratio=1.0)
    assert plan.max_states == plan.blocks // 2
    assert plan.max_pages == (plan.blocks - plan.max_states) * 32
    capped = plan_pools(layout, BUDGET, max_states=7, max_tokens=64_000)
    assert (capped.max_states, capped.max_pages) == (7, 1_000)
    assert admitted(capped, 64).requests == 7
    assert admitted(capped, 32_000).binding == "cache"


def test_split_fits_a_real_buffer() -> None:
    layout = block_layout(K3, tp=8)
    exact = plan_pools(layout, BUDGET, engine="sglang", sglang=SglangSettings(ratio=1.1), within_budget=False)
    real = plan_pools(layout, BUDGET, engine="sglang", sglang=SglangSettings(ratio=1.1))
    assert exact.arena_bytes > BUDGET >= real.arena_bytes
    assert real.max_states == exact.max_states
    assert real.max_pages is not None and exact.max_pages is not None
    assert 0 < exact.max_pages - real.max_pages < 100
    assert any("padding" in note for note in real.notes)


def test_pipeline_takes_the_widest_block() -> None:
    stages = stage_block_layouts(K3, ParallelLayout(pp=8))
    assert [s.state_layers for s in stages] == [9] * 7 + [6]
    assert {s.pages_per_block for s in stages} == {stages[0].pages_per_block}
    plan = plan_stages(stages, 40 * GIB)
    assert plan.blocks == 40 * GIB // max(s.block_bytes for s in stages)


def test_padding_is_said() -> None:
    linear = model_geometry("kimi-linear-48b-a3b")
    plan = plan_pools(block_layout(linear), GIB)
    assert (plan.layout.padding_share > 0.03) == any("of its block empty" in note for note in plan.notes)


def test_too_small_says_by_how_much() -> None:
    with pytest.raises(DoesNotFit, match="B short"):
        plan_pools(block_layout(K3, tp=8), 50_000_000)
    budget = 6 * 56_171_520 + 64 * 27_648
    with pytest.raises(DoesNotFit, match="reserves 5 states"):
        plan_pools(block_layout(K3, tp=8), budget, engine="sglang", sglang=SglangSettings(max_mamba_cache_size=5))
