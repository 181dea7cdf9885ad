"""SGLang's pools against the integers that its servers reported, and the rules that differ by version."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3stack.config.drafter import drafter
from k3stack.config.hardware import GIB, MIB
from k3stack.config.layout import ParallelLayout
from k3stack.config.models import model_geometry
from k3stack.errors import DoesNotFit, UserError
from k3stack.estimate.pools import admitted, block_layout, plan_pools, replay_ring_bytes, stage_block_layouts
from k3stack.estimate.sglang import (
    SglangSettings,
    balanced_ratio,
    calculator_ratio,
    calculator_text,
    crossing_tokens,
    sglang_pools,
    slots_per_request,
)

K3 = model_geometry("kimi-k3")
TP8 = block_layout(K3, tp=8)
DCP8 = block_layout(K3, tp=8, dcp=8)
RING8 = replay_ring_bytes(K3, tp=8, kda_layers=69)
DSPARK = drafter("DSPARK")
BALANCED_DSPARK = SglangSettings(
    ratio=6.28, draft_tokens=8, replay=True, ring_bytes=RING8, draft_row_bytes=DSPARK.row_bytes(8), max_running=256
)


def test_sizes() -> None:
    assert TP8.state_bytes == 56_171_520 and TP8.cache_layers * TP8.row_bytes == 27_648
    assert block_layout(K3, tp=32).state_bytes == 14_042_880
    assert block_layout(K3, row_itemsize=1).row_bytes * 24 == 13_824
    assert block_layout(K3).state_bytes / MIB == pytest.approx(428.555, abs=0.001)
    assert block_layout(K3, tp=8, recurrent_itemsize=2).state_bytes / MIB == pytest.approx(27.694, abs=0.001)
    assert RING8 == 20_401_920
    assert [DSPARK.row_bytes(n) for n in (1, 4, 8, 16, 32)] == [20_480, 5_120, 2_560, 1_280, 1_280]


@pytest.mark.parametrize("budget", [30.3676, 30.3682, 30.3689])
def test_low_latency_boot(budget: float) -> None:
    pools = sglang_pools((TP8,), int(budget * GIB), SglangSettings(ratio=1.1))
    assert (pools.slots, pools.tokens, pools.max_running) == (303, 561_728, 60)
    assert pools.binding == "state"


@pytest.mark.parametrize(("budget", "slots"), [(29.4857, 505), (29.538, 506), (29.5905, 507)])
def test_balanced_boot(budget: float, slots: int) -> None:
    pools = sglang_pools((DCP8,), int(budget * GIB), SglangSettings(ratio=8.82))
    assert (pools.slots, pools.tokens, pools.max_running) == (slots, 936_448, 101)


def test_balanced_boot_with_drafter() -> None:
    found = set()
    for step in range(10_000):
        pools = sglang_pools((DCP8,), int((28.228 + step * 0.0000217) * GIB), BALANCED_DSPARK)
        if pools.tokens == 697_856:
            assert pools.max_running == 68
            found.add(pools.slots)
    assert found == {340, 341, 342, 343}


def test_plan_pools_carries_the_same_integers() -> None:
    plan = plan_pools(TP8, int(30.368 * GIB), engine="sglang", sglang=SglangSettings(ratio=1.1), within_budget=False)
    assert (plan.max_states, plan.tokens_alone, plan.max_running) == (303, 561_728, 60)
    assert admitted(plan, 9216).requests == 60


def test_rack_row_of_32_h200() -> None:
    settings = SglangSettings(
        ratio=0.058, strategy="extra_buffer_lazy", draft_tokens=8, replay=True,
        ring_bytes=replay_ring_bytes(K3, tp=32, kda_layers=69), draft_row_bytes=DSPARK.row_bytes(32),
    )  # fmt: skip
    pools = sglang_pools((block_layout(K3, tp=32),), int(55.307 * GIB), settings)
    assert (pools.slots, pools.max_running, pools.tokens) == (169, 42, 1_940_352)


@pytest.mark.parametrize(
    ("ratio", "slots", "requests", "tokens"),
    [(0.9, 273, 54, 622_656), (1.1, 303, 60, 561_728), (2, 385, 77, 395_136), (4, 463, 92, 236_672)],
)
def test_table_of_ratios(ratio: float, slots: int, requests: int, tokens: int) -> None:
    pools = sglang_pools((TP8,), int(30.368 * GIB), SglangSettings(ratio=ratio))
    assert (pools.slots, pools.max_running, pools.tokens) == (slots, requests, tokens)


def test_slots_per_request() -> None:
    base = SglangSettings()
    assert slots_per_request(base) == 5
    assert slots_per_request(base, pp=2) == 4
    assert slots_per_request(replace(base, overlap=False)) == 4
    assert slots_per_request(replace(base, strategy="extra_buffer_lazy")) == 4
    assert slots_per_request(replace(base, strategy="no_buffer")) == 3
    assert slots_per_request(replace(base, skip_decode_lock=True)) == 4
    assert slots_per_request(replace(base, strategy="no_buffer", skip_decode_lock=True)) == 3
    assert slots_per_request(replace(base, radix_cache=False)) == 1
    assert slots_per_request(replace(base, role="decode")) == 1
    assert slots_per_request(replace(base, role="decode", decode_radix=True)) == 3


@pytest.mark.parametrize(("pp", "state_mib", "cell"), [(2, 217.38, 14_976), (8, 55.898, 4_608), (16, 31.055, 3_456)])
def test_pipeline_stages(pp: int, state_mib: float, cell: int) -> None:
    stages = stage_block_layouts(K3, ParallelLayout(pp=pp), engine="sglang")
    pools = sglang_pools(stages, 40 * GIB, SglangSettings())
    assert pools.slots_per_request == 4
    assert pools.state_bytes / MIB == pytest.approx(state_mib, abs=0.01)
    assert pools.cell_bytes == cell
    old = sglang_pools(stages, 40 * GIB, SglangSettings(version=(0, 5, 16)))
    assert old.state_bytes / MIB == pytest.approx(428.555, abs=0.001)


def test_versions_log_rows_or_tokens() -> None:
    budget = int(29.538 * GIB)
    new = sglang_pools((DCP8,), budget, SglangSettings(ratio=8.82))
    old = sglang_pools((DCP8,), budget, SglangSettings(ratio=8.82, version=(0, 5, 18)))
    assert (new.logged_tokens, old.logged_tokens) == (936_448, 117_056)


def test_speculation_without_replay_keeps_a_state_for_each_draft() -> None:
    settings = SglangSettings(draft_tokens=8, draft_row_bytes=2_560)
    pools = sglang_pools((TP8,), 30 * GIB, settings)
    share = 30 * GIB * 0.9 / 1.9
    assert pools.slots == int((share - TP8.state_bytes * 9) / (TP8.state_bytes * (1 + 8 / 5)))
    assert pools.want == 48
    assert pools.scratch_bytes == TP8.state_bytes * 8 * (min(48, pools.slots // 5) + 1)
    prefill = sglang_pools((TP8,), 30 * GIB, replace(settings, role="prefill"))
    assert prefill.scratch_bytes == 0 and prefill.slots > pools.slots
    older = sglang_pools((TP8,), 30 * GIB, replace(settings, role="prefill", version=(0, 5, 21)))
    assert older.scratch_bytes > 0


def test_attention_dp_divides_the_requests_asked_for() -> None:
    pools = sglang_pools((TP8,), 30 * GIB, SglangSettings(max_running=64, attention_dp=4))
    assert (pools.want, pools.max_running, pools.binding) == (16, 16, "max_running_requests")


def test_decode_worker_enlarges_its_state_pool() -> None:
    settings = SglangSettings(role="decode", max_running=4000, extra_slots=16)
    pools = sglang_pools((TP8,), 30 * GIB, settings)
    assert pools.slots == 4016 and pools.beyond_budget_bytes > 0


def test_calculator_and_balance() -> None:
    base = {"slots": 5, "state_bytes": TP8.state_bytes, "row_bytes": 27_648}
    for tokens, dcp, drafter_on, shown in (
        (9_216, 1, False, 1.1022),
        (9_216, 8, False, 8.818),
        (9_216, 8, True, 6.276),
        (128_000, 8, False, 0.6349),
        (128_000, 8, True, 0.4519),
    ):
        ratio = calculator_ratio(**base, dcp=dcp, tokens=tokens, drafter=drafter_on)
        assert ratio == pytest.approx(shown, rel=2e-4)
    lazy = calculator_ratio(
        slots=4, state_bytes=block_layout(K3, tp=32).state_bytes, row_bytes=13_824, dcp=1, tokens=50_792, drafter=False
    )
    assert lazy == pytest.approx(0.08, rel=1e-3)
    assert [calculator_text(r) for r in (12.345, 8.818, 1.1022, 0.6349)] == ["12.3", "8.82", "1.10", "0.63"]
    assert crossing_tokens(slots=5, slot_bytes=TP8.state_bytes, cell_bytes=27_648, dcp=1) == pytest.approx(
        10_158.3, abs=0.05
    )


@pytest.mark.parametrize("settings", [SglangSettings(), replace(BALANCED_DSPARK, max_running=None)])
def test_balanced_ratio_admits_equally_from_both_pools(settings: SglangSettings) -> None:
    pools = sglang_pools((DCP8,), 30 * GIB, settings)
    ratio = balanced_ratio(
        slots=pools.slots_per_request, slot_bytes=pools.slot_bytes, cell_bytes=pools.cell_bytes, dcp=8, tokens=20_000
    )
    at = sglang_pools((DCP8,), 30 * GIB, replace(settings, ratio=ratio))
    assert at.tokens / 20_000 == pytest.approx(at.slots / at.slots_per_request, rel=0.01)


def test_refusals_say_how_much_is_missing() -> None:
    with pytest.raises(DoesNotFit, match="GiB short"):
        sglang_pools((TP8,), GIB // 8, SglangSettings())
    with pytest.raises(DoesNotFit, match="leave nothing for the cache"):
        sglang_pools((TP8,), 4 * GIB, SglangSettings(max_mamba_cache_size=80))
    with pytest.raises(UserError, match="above 0"):
        sglang_pools((TP8,), GIB, SglangSettings(ratio=0))
    with pytest.raises(UserError, match="known: DSPARK, DFLASH"):
        drafter("EAGLE3")
