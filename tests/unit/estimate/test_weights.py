"""Bytes of weights: the checkpoint's totals, published figures per layout, and slices that tile every tensor."""

from __future__ import annotations

import pytest

from k3stack.config.geometry import ModelGeometry
from k3stack.config.hardware import GIB
from k3stack.config.layout import ParallelLayout, check_layout, place, stage_layers
from k3stack.config.models import model_geometry
from k3stack.config.shard import AXES, TABLE, Slice, cut_dim, rank_slice, row
from k3stack.config.tensors import TensorSpec, expected_tensors, expert_tensors
from k3stack.errors import UserError
from k3stack.estimate.weights import weight_table


@pytest.fixture(scope="module")
def k3() -> ModelGeometry:
    return model_geometry("moonshotai/Kimi-K3")


def test_checkpoint_totals(k3: ModelGeometry) -> None:
    table = weight_table(k3)
    assert table.tensor_count() == 497_220
    totals = table.totals()
    assert sum(totals.values()) == 1_560_860_324_864
    assert totals["routed_experts"] == 1_446_456_066_048
    assert totals["kda_attention"] == 61_258_257_408
    assert totals["mla_attention"] == 11_145_412_608
    assert totals["latent_projections"] == 9_454_620_672
    assert totals["shared_experts"] == 24_310_185_984
    assert totals["embedding"] == totals["lm_head"] == 2_348_810_240
    assert totals["dense_mlp"] == 1_453_326_336
    assert totals["router"] == 1_182_074_880
    assert totals["vision"] == 894_717_952
    assert totals["norms_and_scorers"] == 8_042_496


@pytest.mark.parametrize(
    ("layout", "gib"),
    [
        (ParallelLayout(tp=4), 372.072),
        (ParallelLayout(tp=8), 191.807),
        (ParallelLayout(tp=16), 101.674),
        (ParallelLayout(tp=16, ep=16), 101.674),
        (ParallelLayout(tp=32), 56.608),
        (ParallelLayout(tp=8, dp=8, dp_lm_head=True), 253.942),
        (ParallelLayout(tp=8, dp=8), 252.028),
        (ParallelLayout(tp=8, ep=8, a2a="deepep"), 211.618),
    ],
)
def test_weights_per_gpu(k3: ModelGeometry, layout: ParallelLayout, gib: float) -> None:
    assert weight_table(k3).plan(layout).gib_per_gpu == pytest.approx(gib, abs=0.0006)


def test_k3_skips_the_vision_tower(k3: ModelGeometry) -> None:
    table = weight_table(k3)
    both = [table.plan(ParallelLayout(tp=8), engine) for engine in ("sglang", "k3")]
    assert both[0].bytes_per_gpu - both[1].bytes_per_gpu == 894_717_952
    assert "vision" not in both[1].by_group_gib


LAYOUTS = [
    ParallelLayout(tp=4, ep=2),
    ParallelLayout(tp=8, dp=2, dp_lm_head=True, dcp=4),
    ParallelLayout(tp=2, pp=3),
    ParallelLayout(tp=6, pp=2, dp=3, ep=2, dense_attn_tp=True, shared_attn_tp=True),
]


@pytest.mark.parametrize("engine", ["k3", "sglang"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.label)
@pytest.mark.parametrize("model", ["kimi-k3", "kimi-linear-48b-a3b"])
def test_slices_tile_every_tensor(model: str, layout: ParallelLayout, engine: str) -> None:
    """What the ranks hold of a tensor covers it, and cut parts meet without gap or overlap inside a group."""
    geometry = model_geometry(model)
    if geometry.kda.heads % layout.attn_tp:
        pytest.skip("heads do not divide")
    specs = list(expected_tensors(geometry, routed=False))
    specs += list(expert_tensors(geometry, 5, 0)) + list(expert_tensors(geometry, 5, geometry.moe.experts - 1))
    for spec in specs:
        held = [rank_slice(spec, geometry, layout, engine, r) for r in range(layout.gpus)]  # type: ignore[arg-type]
        found = [h for h in held if h is not None]
        if engine == "k3" and spec.kind.startswith("vision."):
            assert not found
            continue
        assert found, spec.name
        _assert_covered(spec, geometry, found, engine)


def _assert_covered(spec: TensorSpec, geometry: ModelGeometry, found: list[Slice], engine: str) -> None:
    if found[0].dim is None:
        assert all(s.dim is None for s in found)
        return
    rule = row(spec.kind, engine)  # type: ignore[arg-type]
    assert rule is not None
    size = geometry.kda.heads if spec.kind == "kda.A_log" else spec.shape[cut_dim(spec, rule)]
    reached = 0
    for start, stop in sorted({(s.start, s.stop) for s in found}):
        assert start == reached, spec.name
        reached = stop
    assert reached == size, spec.name


def test_totals_equal_the_sum_of_slices() -> None:
    """The fullest rank's bytes from the bundles equal the sum over that rank's slices, tensor by tensor."""
    geometry = model_geometry("kimi-linear-48b-a3b")
    layout = ParallelLayout(tp=4, ep=2, pp=2)
    plan = weight_table(geometry).plan(layout, "k3")
    for stage in range(2):
        total = 0
        for spec in expected_tensors(geometry):
            part = rank_slice(spec, geometry, layout, "k3", stage * 4)
            if part is not None:
                size = 1 if part.dim is None else spec.shape[part.dim]
                total += spec.nbytes * (1 if part.dim is None else part.stop - part.start) // size
        assert total == plan.stages[stage].total


def test_head_cuts_fall_between_heads(k3: ModelGeometry) -> None:
    layout = ParallelLayout(tp=32)
    for spec in expected_tensors(k3, routed=False):
        if spec.layer == 1 and spec.kind == "kda.o_proj":
            assert rank_slice(spec, k3, layout, "k3", 5) == Slice(1, 5 * 3 * 128, 6 * 3 * 128)
        if spec.layer == 1 and spec.kind == "kda.A_log":
            assert rank_slice(spec, k3, layout, "k3", 31) == Slice(0, 93, 96)


def test_expert_columns_are_cut_at_scale_groups(k3: ModelGeometry) -> None:
    layout = ParallelLayout(tp=32)
    for spec in expert_tensors(k3, 1, 0):
        part = rank_slice(spec, k3, layout, "k3", 1)
        assert part is not None
        if spec.kind == "moe.expert.w2.packed":
            assert part == Slice(1, 48, 96)
        if spec.kind == "moe.expert.w2.scale":
            assert part == Slice(1, 3, 6)


def test_stage_splits(k3: ModelGeometry) -> None:
    def sizes(pp: int, engine: str) -> list[int]:
        return [len(s) for s in stage_layers(k3, ParallelLayout(pp=pp), engine)]  # type: ignore[arg-type]

    assert sizes(8, "sglang") == [11, 11, 11, 12, 12, 12, 12, 12]
    assert sizes(8, "k3") == [12] * 7 + [9]
    assert sizes(2, "sglang") == [46, 47]
    assert sizes(16, "k3") == [6] * 13 + [5] * 3


def test_places() -> None:
    layout = ParallelLayout(tp=8, pp=2, dp=2, dcp=2, ep=4)
    at = place(layout, 13)
    assert (at.stage, at.tp, at.dp, at.attn_tp, at.dcp, at.ep, at.moe_tp) == (1, 5, 1, 1, 1, 2, 1)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (ParallelLayout(tp=5), "96 KDA heads cannot be cut over an attention TP width of 5"),
        (ParallelLayout(tp=8, dcp=3), "does not divide the attention TP width"),
        (ParallelLayout(tp=8, dp=3), "does not divide --tp-size 8"),
        (ParallelLayout(tp=48, ep=3), "896 experts cannot be shared out over ep 3"),
        (ParallelLayout(tp=64, dp=8), None),
        (ParallelLayout(pp=2, pp_partition=(90, 2)), "93 in all"),
    ],
)
def test_illegal_layouts_say_what_would_do(k3: ModelGeometry, layout: ParallelLayout, words: str | None) -> None:
    if words is None:
        with pytest.raises(UserError, match="raise --ep-size"):
            check_layout(layout, k3)
        return
    with pytest.raises(UserError, match=words):
        check_layout(layout, k3)


def test_table_covers_every_kind_and_axis(k3: ModelGeometry) -> None:
    linear = model_geometry("kimi-linear-48b-a3b")
    kinds = {s.kind for g in (k3, linear) for s in (*expected_tensors(g, routed=False), *expert_tensors(g, 1, 0))}
    for kind in kinds:
        rule = row(kind, "sglang")
        assert rule is not None
        assert {rule.fate(a) for a in AXES} <= {"cut", "copied", "owned"}
    assert set(TABLE["sglang"]) >= kinds
    q = TABLE["k3"]["kda.q_proj"]
    assert [q.fate(a) for a in AXES] == ["cut", "copied", "copied", "copied", "owned"]
    w2 = TABLE["k3"]["moe.expert.w2.packed"]
    assert [w2.fate(a) for a in AXES] == ["cut", "owned", "cut", "copied", "owned"]


def test_replicated_share(k3: ModelGeometry) -> None:
    """What every rank holds whole is 11.542 GiB: TP8 and TP4 differ by an eighth of the rest."""
    table = weight_table(k3)
    by8, by4 = (table.plan(ParallelLayout(tp=n)).bytes_per_gpu for n in (8, 4))
    assert (2 * by8 - by4) / GIB == pytest.approx(11.542, abs=0.001)
