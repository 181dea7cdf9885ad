"""`k3 plan` on a CPU and the boot of the same options agree to the byte, and the boot saves what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3stack import LLM
from k3stack.cli import main
from k3stack.estimate.saved_plan import load_plan

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("k3_tiny_open", {"arena_gib": 0.02}),
    ("k3_tiny_open", {"arena_gib": 0.03, "dtype": "bfloat16"}),
    ("k3_tiny_8h_open", {"arena_gib": 0.02, "dtype": "float64", "context_length": 512}),
    ("kimi_linear_tiny_open", {"arena_gib": 0.02}),
    ("k3_tiny_open", {"arena_gib": 0.02, "kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16"}),
    ("k3_tiny_open", {"arena_gib": 0.02, "engine": "sglang", "mamba_full_memory_ratio": 1.1}),
    ("k3_tiny_open", {"arena_gib": 0.02, "mamba_full_memory_ratio": 0.5, "max_running_requests": 9}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_plan_equals_boot(
    name: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = str(GOLDEN / name), tmp_path / "pool_plan.json"
    words = ["--model-path", path, "--device", "cpu"]
    for key, value in {"dtype": "float32", **options}.items():
        words += ["--" + key.replace("_", "-"), str(value)]
    status = main(
        ["plan", "--json", "--hardware", "cpu", "--input-len", "300", "--output-len", "20", "--", "k3", "serve", *words]
    )
    planned = json.loads(capsys.readouterr().out)
    assert status == 0
    with LLM(path, pool_plan_file=str(file), **options) as llm:
        pools = llm.info["pools"]
        plan = llm._engine.plan
    assert planned["boot"] == pools["predicted"] == pools["actual"]
    saved = load_plan(file)
    assert saved.plan == plan and saved.predicted == saved.actual
    assert saved.actual.arena_bytes == planned["boot"]["arena_bytes"]
    assert main(["plan", "--from", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.count("none") >= 6 and f"{plan.blocks:,}" in text


def test_a_folder_that_cannot_be_written_does_not_end_a_boot(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(GOLDEN / "k3_tiny_open"), arena_gib=0.02, pool_plan_file="/proc/nowhere/plan.json") as llm:
        assert llm.info["pools"]["actual"]["blocks"] > 0
    assert "could not be written" in caplog.text
