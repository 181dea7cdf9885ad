"""The verb: its JSON fields, exit statuses, speed, and that it needs neither torch nor numpy."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3stack.cli import main
from k3stack.estimate.pools import block_layout, plan_pools
from k3stack.estimate.saved_plan import SavedPlan, figures, load_plan, save_plan

FIELDS = (
    "weights_gib_per_gpu weights_by_kind_gib state_block_mib cache_row_bytes budget_gib state_slots cache_tokens "
    "max_running_requests binding crossing_tokens ratio_calculator ratio_balanced allreduce_per_step warnings layout "
    "engine commands draft_weights_gib_per_gpu"
).split()
LOW_LATENCY = "sglang serve --model-path moonshotai/Kimi-K3 --tp-size 8 --mem-fraction-static 0.85"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    out, err = capsys.readouterr()
    return status, out, err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status, out, _ = run(capsys, "--json", *words)
    return status, json.loads(out)


def test_fields_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--hardware 8xB300 --budget-gib 30.368 -- {LOW_LATENCY} --mamba-full-memory-ratio 1.1".split()
    status, found = run_json(capsys, *words)
    assert status == 0 and set(FIELDS) <= set(found)
    assert found["weights_gib_per_gpu"] == pytest.approx(191.807, abs=0.001)
    assert sum(found["weights_by_kind_gib"].values()) == pytest.approx(found["weights_gib_per_gpu"])
    assert found["state_block_mib"] == pytest.approx(53.569, abs=0.001)
    assert found["cache_row_bytes"] == 27_648
    assert (found["budget_gib"], found["state_slots"], found["cache_tokens"]) == (30.368, 303, 561_728)
    assert (found["max_running_requests"], found["binding"]) == (60, "state")
    assert found["crossing_tokens"] == pytest.approx(10_158.333, abs=0.001)
    assert found["ratio_calculator"] == pytest.approx(1.1022497, abs=1e-6)
    assert found["allreduce_per_step"] == 186 and found["draft_weights_gib_per_gpu"] == 0
    assert found["engine"] == "sglang" and found["layout"]["tp"] == 8
    assert set(found["commands"]) == {"k3", "sglang", "vllm"}
    assert found["commands"]["sglang"] == [f"{LOW_LATENCY} --mamba-full-memory-ratio 1.1"]
    for warning in found["warnings"]:
        assert set(warning) == {"id", "severity", "message", "source"}


def test_flags_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, *"--hardware 8xB300 --tp-size 8 --dcp-size 8 --budget-gib 30".split())
    assert status == 0 and found["engine"] == "k3"
    assert found["crossing_tokens"] == pytest.approx(2_031.67 * 8, abs=0.1)
    layout = block_layout_tp8(dcp=8)
    arena = plan_pools(layout, 30 * 2**30, max_running=1 << 20)
    assert (found["state_slots"], found["cache_tokens"]) == (arena.blocks, arena.blocks * 32 * 64 * 8)
    assert found["max_running_requests"] > 3.5 * 101


def block_layout_tp8(dcp: int = 1) -> Any:
    from k3stack.config.models import model_geometry

    return block_layout(model_geometry("kimi-k3"), tp=8, dcp=dcp)


def test_what_does_not_fit_exits_1_with_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *"--json --hardware 8xB300 -- sglang serve --tp-size 4 --dp-size 2".split())
    found = json.loads(out)
    assert status == 1 and not found["fits"]
    assert found["missing_gib"] > 100 and found["weights_gib_per_gpu"] == pytest.approx(372.07, abs=0.01)
    assert found["alternatives"] and "tp8" in found["alternatives"][0]
    assert "GiB per GPU short" in err
    status, out, err = run(capsys, *"--hardware 4xB300 -- sglang serve --tp-size 4".split())
    assert status == 1 and "DOES NOT FIT" in out and "on 8xB300" in out


def test_too_few_gpus_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, *"--hardware 8xH200 -- sglang serve --tp-size 16".split())
    assert status == 1 and "needs 16 GPUs and there are 8" in found["reason"]


def test_refused_command_exits_1_and_names_the_finding(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--json --hardware 32xB300 -- sglang serve --tp-size 32 --dp-size 4 --enable-dp-attention "
    status, out, err = run(capsys, *(words + "--moe-a2a-backend megamoe --nnodes 4").split())
    found = json.loads(out)
    assert status == 1 and found["refused"]["id"] == "megamoe-across-nvlink-domain"
    assert found["warnings"][0]["severity"] == "fatal" and "megamoe-across-nvlink-domain" in err
    assert found["commands"] == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tp-size 8", "--hardware is missing"),
        ("--hardware 8xMI355X", "AMD hardware is not planned for"),
        ("--hardware 8xB300 --tp-sise 8", "did you mean --tp-size?"),
        ("--hardware 8xB300 --input-len 0", "must be above 0"),
        ("--hardware 8xB300 --input-len", "needs a value"),
        ("--hardware 8xB300 --engine trt", "known: k3, sglang, vllm"),
        ("--hardware 8xB300 --engine vllm -- sglang serve --tp-size 8", "contradicts"),
        ("--hardware 8xB300 --tp-size 8 -- sglang serve --tp-size 8", "given both"),
        ("--hardware 8xB300 --engine-version new --tp-size 8", "write it as"),
        ("--hardware 8xB300 -- sglang serve --model-path nvidia/Kimi-K3-NVFP4 --tp-size 8", "NVFP4"),
        ("--from /nowhere.json", "No such file"),
    ],
)
def test_wrong_requests_exit_2(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    status, out, err = run(capsys, *words.split())
    assert status == 2 and said in err and not out


def test_version_changes_what_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hardware 8xB300 --engine-version 0.5.18 --budget-gib 29.538 -- sglang serve --tp-size 8 --dcp-size 8"
    _, found = run_json(capsys, *words.split(), "--mamba-full-memory-ratio", "8.82")
    assert found["logged_tokens"] == 117_056 and found["cache_tokens"] == 936_448


def test_report_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--hardware 8xB300 --disk-gbps 5 --session-len 118000 -- {LOW_LATENCY} --quux 3"
    status, out, _ = run(capsys, *words.split())
    assert status == 0
    for part in (
        "weights per GPU          191.81 GiB",
        "budget for states and cache",
        "boot lines to expect",
        "capped to",
        "sums in layers a step: 186",
        "at 5 GB/s: 5 min",
        "sessions of 118,000 tokens kept",
        "--quux is not known here",
        "vllm serve",
    ):
        assert part in out, part


def test_commands_are_one_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hardware 32xH200 -- sglang serve --tp-size 32 --ep-size 32 --moe-runner-backend marlin --nnodes 4"
    _, found = run_json(capsys, *words.split())
    sglang = found["commands"]["sglang"]
    assert len(sglang) == 4
    assert [c.rsplit(" ", 1)[1] for c in sglang] == list("0123") and all("--dist-init-addr" in c for c in sglang)


def test_saved_plan_of_a_boot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = plan_pools(block_layout_tp8(), 20 * 2**30)
    smaller = plan_pools(block_layout_tp8(), 19 * 2**30)
    file = tmp_path / "pool_plan.json"
    saved = SavedPlan("moonshotai/Kimi-K3", "cuda:0", smaller, figures(plan, 191 << 30), figures(smaller, 192 << 30))
    save_plan(file, saved)
    assert load_plan(file) == saved
    status, out, _ = run(capsys, "--from", str(file))
    assert status == 0 and "-1.000 GiB" in out and "+1.000 GiB" in out and "predicted" in out
    status, found = run_json(capsys, "--from", str(file))
    assert found["plan"]["blocks"] == smaller.blocks
    file.write_text('{"format": 99}')
    assert run(capsys, "--from", str(file))[0] == 2


def test_starts_within_half_a_second_without_torch() -> None:
    """Processor time of the whole process: the clock on the wall depends on what else the machine does."""
    code = (
        "import sys; from k3stack.cli import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules), 'heavy import'; sys.exit(status)"
    )
    words = ["plan", "--hardware", "8xB300", "--", *LOW_LATENCY.split()]
    times = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    assert min(times) < 0.5
