"""Geometry is read from official configs, and wrong configs are refused by field name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3stack.config.geometry import parse_geometry
from k3stack.errors import CheckpointError

CONFIG = Path(__file__).parents[2] / "src/k3stack/config/data/k3_config.json"


@pytest.fixture
def k3() -> dict[str, Any]:
    return json.loads(CONFIG.read_text())


def test_k3_geometry(k3: dict[str, Any]) -> None:
    g = parse_geometry(k3)
    assert (g.family, g.layers, len(g.kda_layers), len(g.mla_layers)) == ("kimi_k3", 93, 69, 24)
    assert g.mla_layers[-2:] == (91, 92)
    assert g.kda.a_log_size == 128 and g.kda.heads == 96
    assert g.residual_rows == 8
    assert g.mla.row_width == 576


@pytest.mark.parametrize(
    ("path", "value", "needle"),
    [
        (("model_type",), "llama", "model_type"),
        (("text_config", "hidden_size"), None, "hidden_size"),
        (("text_config", "mla_use_nope"), False, "mla_use_nope"),
        (("text_config", "hidden_act"), "gelu", "hidden_act"),
        (("text_config", "quantization_config", "format"), "nvfp4-pack-quantized", "nvfp4"),
        (("text_config", "linear_attn_config", "kda_layers"), [1, 2], "each of the 93 layers once"),
        (("text_config", "num_nextn_predict_layers"), 1, "num_nextn_predict_layers"),
    ],
)
def test_wrong_config_names_the_field(k3: dict[str, Any], path: tuple[str, ...], value: object, needle: str) -> None:
    bad = copy.deepcopy(k3)
    at = bad
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(CheckpointError, match=needle):
        parse_geometry(bad)
