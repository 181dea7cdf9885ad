"""The expected tensors against the published totals of Kimi-K3 and the facts of Kimi-Linear."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib.resources import files

import pytest

from k3stack.config.geometry import ModelGeometry, parse_geometry
from k3stack.config.tensors import TensorSpec, expected_tensors, expert_tensors, layer_tensors, total_bytes
from k3stack.errors import CheckpointError


def published(name: str) -> ModelGeometry:
    return parse_geometry(json.loads((files("k3stack.config") / "data" / name).read_text()))


K3 = published("k3_config.json")
LINEAR = published("kimi_linear_48b_config.json")


def test_k3_has_the_published_count_and_bytes() -> None:
    names: set[str] = set()
    total = 0
    for t in expected_tensors(K3):
        names.add(t.name)
        total += t.nbytes
    assert len(names) == 497_220
    assert total == 1_560_860_324_864
    assert total_bytes(K3) == total


def test_k3_groups_match_the_published_split() -> None:
    by_group: Counter[str] = Counter()
    assert sum(1 for _ in expected_tensors(K3, routed=False)) == 497_220 - 92 * 896 * 6
    for t in expected_tensors(K3, routed=False):
        by_group[t.kind.split(".")[0]] += t.nbytes
    assert by_group["kda"] == 61_258_257_408
    assert by_group["mla"] == 11_145_412_608
    assert by_group["dense"] == 1_453_326_336
    assert by_group["vision"] == 894_717_952
    assert by_group["embed"] == by_group["lm_head"] == 2_348_810_240
    assert sum(t.nbytes for t in expert_tensors(K3, 1, 0)) == 17_547_264


@pytest.mark.parametrize(("layer", "payload"), [(0, 2_341_213_184), (1, 16_990_092_800), (3, 16_566_684_160)])
def test_k3_layer_payloads(layer: int, payload: int) -> None:
    assert sum(t.nbytes for t in layer_tensors(K3, layer)) == payload


def test_order_in_a_layer_is_dense_first_then_expert_by_expert() -> None:
    experts = [t.expert for t in layer_tensors(K3, 1)]
    first = experts.index(0)
    assert all(e is None for e in experts[:first])
    assert experts[first:] == [e for e in range(896) for _ in range(6)]
    dense = sum(t.nbytes for t in list(layer_tensors(K3, 1))[:first])
    assert dense == 1_267_744_256


def test_kimi_linear_counts() -> None:
    tensors = list(expected_tensors(LINEAR))
    assert len(tensors) == 20_493
    assert sum(t.numel for t in tensors) == 49_122_681_728
    kda = [t for t in layer_tensors(LINEAR, 1) if t.kind.startswith("kda.")]
    assert len(kda) == 15
    a_log: TensorSpec = next(t for t in kda if t.kind == "kda.A_log")
    assert (a_log.shape, a_log.dtype, a_log.also) == ((1, 1, 32, 1), "F32", "BF16")


def test_names_are_unique_and_prefixed() -> None:
    tiny = replace(K3, moe=replace(K3.moe, experts=3))
    names = [t.name for t in expected_tensors(tiny, vision=False)]
    assert len(names) == len(set(names))
    assert all(n.startswith("language_model.") for n in names)


def test_mxfp4_needs_whole_groups() -> None:
    odd = replace(K3, moe=replace(K3.moe, expert_width=3080))
    with pytest.raises(CheckpointError, match="3080 columns"):
        list(expert_tensors(odd, 1, 0))
