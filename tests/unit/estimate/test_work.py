"""Floors of steps: bytes and operations of a rank against figures computed elsewhere by hand."""

from __future__ import annotations

from importlib.resources import files

import pytest

from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.config.hardware import load_catalogue
from k3stack.config.layout import ParallelLayout
from k3stack.errors import UserError
from k3stack.estimate.floor import decode_floor
from k3stack.estimate.seconds import Efficiency, StepModel, load_efficiency, parse_efficiency
from k3stack.estimate.work import Precision, RankModel, StepLoad, experts_touched


@pytest.fixture(scope="module")
def k3() -> ModelGeometry:
    return load_geometry(str(files("k3stack.config").joinpath("data/k3_config.json")))


@pytest.mark.parametrize(
    ("gpus", "row", "batch", "context", "gb"),
    [(16, 2, 1, 8_500, 19.6), (16, 2, 16, 8_500, 45.0), (16, 2, 64, 8_500, 98.2), (32, 1, 64, 8_500, 54.9),
     (32, 1, 64, 51_000, 92.5)],
)  # fmt: skip
def test_decode_bytes_of_one_rank(k3: ModelGeometry, gpus: int, row: int, batch: int, context: int, gb: float) -> None:
    model = RankModel(k3, ParallelLayout(tp=gpus, ep=gpus), precision=Precision(row=row))
    work = model.work(StepLoad(decode_rows=batch, decode_context=batch * context, samples=batch))
    assert work.bytes / 1e9 == pytest.approx(gb, abs=0.05)


@pytest.mark.parametrize(("sharded", "tflop"), [(False, 146), (True, 54)])
def test_prefill_operations_of_one_rank(k3: ModelGeometry, sharded: bool, tflop: float) -> None:
    """An 8,192-token chunk at TP32: as others split it, and with copied products on a rank's share of the tokens."""
    model = RankModel(k3, ParallelLayout(tp=32, ep=32), sharded_prefill=sharded)
    work = model.work(StepLoad(chunk_rows=1, chunk_tokens=8192, chunk_pairs=8192**2 / 2, samples=1))
    assert work.flops / 1e12 == pytest.approx(tflop, abs=1.0)


def test_sums_of_a_decode_step(k3: ModelGeometry) -> None:
    """186 sums of about 1 MB for 64 requests, more than 100 MB for a chunk of 8,192 tokens."""
    model = RankModel(k3, ParallelLayout(tp=32, ep=32))
    work = model.work(StepLoad(decode_rows=64, decode_context=64 * 8192))
    assert work.sums == 186
    assert 0.9e6 < work.sum_bytes / work.sums < 1.3e6
    chunk = model.work(StepLoad(chunk_rows=1, chunk_tokens=8192))
    assert chunk.sum_bytes / chunk.sums > 100e6


def test_experts_touched_and_slowest_rank(k3: ModelGeometry) -> None:
    assert experts_touched(896, 16, 1) == pytest.approx(16)
    assert experts_touched(896, 16, 0) == 0
    assert experts_touched(896, 16, 10_000) == pytest.approx(896)
    model = RankModel(k3, ParallelLayout(tp=32, ep=32))
    assert model.touched(64) < model.touched(64, slowest=True) <= 28
    whole = RankModel(k3, ParallelLayout(tp=8))
    assert whole.touched(64) == whole.touched(64, slowest=True)


def test_roofline_time_is_at_least_the_floor(k3: ModelGeometry) -> None:
    hardware = load_catalogue().parse("8xB300")
    layout = ParallelLayout(tp=8)
    roofline = StepModel(k3, layout, hardware, load_efficiency("roofline"), engine="sglang")
    usual = StepModel(k3, layout, hardware, Efficiency(), engine="sglang")
    for load in (
        StepLoad(decode_rows=1, decode_context=8_500, samples=1),
        StepLoad(decode_rows=64, decode_context=64 * 8_500, samples=64),
        StepLoad(chunk_rows=1, chunk_tokens=8_192, chunk_pairs=8_192**2 / 2, samples=1),
    ):
        bound, real = roofline.step(load), usual.step(load)
        assert bound.floor_s <= bound.seconds * (1 + 1e-12) <= real.seconds
        assert real.seconds == pytest.approx(sum(real.parts.values()))


def test_attention_dp_sends_all_groups_tokens_through_the_experts(k3: ModelGeometry) -> None:
    load = StepLoad(decode_rows=8, decode_context=8 * 1000, samples=8)
    one = RankModel(k3, ParallelLayout(tp=16, ep=16)).work(load)
    two = RankModel(k3, ParallelLayout(tp=16, ep=16, dp=2)).work(load)
    assert two.expert_flops == pytest.approx(2 * one.expert_flops)
    assert two.state_bytes == pytest.approx(2 * one.state_bytes)


def test_unknown_constants_and_sets_are_refused() -> None:
    with pytest.raises(UserError, match="no efficiencies named"):
        load_efficiency("h300")
    with pytest.raises(UserError, match="unknown constants"):
        parse_efficiency({"speed": {"value": 1, "source": "x"}}, "t")


def test_floor_by_part_adds_up(k3: ModelGeometry) -> None:
    model = RankModel(k3, ParallelLayout(tp=16, ep=16))
    load = StepLoad(decode_rows=64, decode_context=64 * 8_500, samples=64)
    parts = decode_floor(model, load)
    assert sum(parts.values()) == pytest.approx(model.work(load).bytes, rel=1e-9)
    # 24 layers' rows of 576 bf16 values, 64 rows of 8,500 tokens; and what a rank reads of MLA's weights.
    assert parts["mla"] > 64 * 8_500 * 24 * 1_152
    assert parts["experts"] == max(parts.values())
