"""Published recipes, written out: each parses and plans, or is refused for the known reason."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from k3stack.config.hardware import load_catalogue
from k3stack.errors import UserError
from k3stack.planner.command import read_command
from k3stack.planner.plan import Plan, make_plan
from k3stack.planner.setup import build_setup

CELLS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cookbook.json").read_text())["cells"]
PLAIN = [c for c in CELLS if not {"refused", "does_not_fit", "nvfp4"} & set(c)]


def planned(cell: dict[str, Any], tokens: int = 9_216) -> Plan:
    command = read_command(shlex.split(cell["command"]))
    assert not command.unknown, command.unknown
    return make_plan(build_setup(command, load_catalogue().parse(cell["hardware"])), tokens)


def cell_id(cell: dict[str, Any]) -> str:
    return str(cell["id"])


@pytest.mark.parametrize("cell", PLAIN, ids=cell_id)
def test_recipe_plans(cell: dict[str, Any]) -> None:
    plan = planned(cell)
    assert plan.refused is None, plan.refused
    assert plan.fits, plan.reason
    assert plan.state_slots >= plan.slots_per_request and plan.cache_tokens > 0 and plan.max_running > 0
    assert plan.setup.gpus_used == plan.setup.hardware.count
    assert plan.weights.gib_per_gpu + plan.budget.gib < plan.setup.hardware.gpu.memory_gib


@pytest.mark.parametrize("cell", [c for c in CELLS if "refused" in c], ids=cell_id)
def test_impossible_recipe_is_refused_by_name(cell: dict[str, Any]) -> None:
    plan = planned(cell)
    assert plan.refused is not None
    assert plan.refused.id == cell["refused"]
    assert plan.refused.severity == "fatal" and plan.refused.source


@pytest.mark.parametrize("cell", [c for c in CELLS if "does_not_fit" in c], ids=cell_id)
def test_recipe_that_does_not_fit_says_what_is_left(cell: dict[str, Any]) -> None:
    plan = planned(cell)
    assert not plan.fits and plan.missing_gib > 0
    assert "else" in plan.reason and f"{plan.weights.gib_per_gpu:.1f} GiB of weights" in plan.reason


def test_attention_dp_on_eight_b300_names_what_is_left() -> None:
    cell = next(c for c in CELLS if c["id"] == "dp-attention-b300")
    plan = planned(cell)
    assert "leave 16.6 GiB for everything else" in plan.reason
    assert "dp8-attn-oom" in {f.id for f in plan.findings}


def test_nvfp4_is_refused_with_the_figure_that_is_needed() -> None:
    cell = next(c for c in CELLS if "nvfp4" in c)
    with pytest.raises(UserError, match=r"NVFP4.*total_size.*1,426 GiB instead of 1,347"):
        planned(cell)


@pytest.mark.parametrize(
    ("cell_name", "state_mib", "row", "slots_per_request"),
    [
        ("preset-throughput-gb300-16", 27.694, 13_824, 4),
        ("unified-h200-32-ht", 13.392, 27_648, 4),
        ("prefill-b300-long", 55.898, 4_608, 4),
        ("decode-b300-bal", 53.569, 27_648, 1),
    ],
)
def test_sizes_of_recipes(cell_name: str, state_mib: float, row: int, slots_per_request: int) -> None:
    plan = planned(next(c for c in CELLS if c["id"] == cell_name))
    assert plan.state_bytes / 2**20 == pytest.approx(state_mib, abs=0.001)
    assert plan.row_bytes == row and plan.slots_per_request == slots_per_request


def test_every_recipe_is_here_once() -> None:
    ids = [c["id"] for c in CELLS]
    assert len(ids) == len(set(ids)) == 83
