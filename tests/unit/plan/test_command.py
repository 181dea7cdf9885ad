"""Commands are read as operators write them; what is no command, or a broken value, is refused by name."""

from __future__ import annotations

import pytest

from k3stack.config.hardware import load_catalogue
from k3stack.errors import UserError
from k3stack.planner.command import read_command
from k3stack.planner.plan import make_plan
from k3stack.planner.setup import build_setup


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("sglang serve --model-path moonshotai/Kimi-K3 --tp-size 8", "sglang"),
        ("python -m sglang.launch_server --model-path moonshotai/Kimi-K3 --tp 8", "sglang"),
        ("/usr/bin/python3.11 -m sglang.launch_server --tensor-parallel-size=8", "sglang"),
        ("vllm serve moonshotai/Kimi-K3 --tensor-parallel-size 8", "vllm"),
        ("python -m vllm.entrypoints.openai.api_server --model moonshotai/Kimi-K3 -tp 8", "vllm"),
        ("k3 serve --model-path moonshotai/Kimi-K3 --tp-size 8", "k3"),
        ("python -m k3stack serve --model-path moonshotai/Kimi-K3 --tp-size 8", "k3"),
        ("env A=1 NCCL_DEBUG=INFO sglang serve --tp_size 8", "sglang"),
    ],
)
def test_programs(text: str, engine: str) -> None:
    command = read_command(text.split())
    assert command.engine == engine and command.flags["tp"] == 8


def test_a_quoted_command_with_line_ends_is_split() -> None:
    command = read_command(["FOO=1 sglang serve \\\n  --tp-size 8 \\\n --cuda-graph-bs 1 2 4 --dcp-size 4"])
    assert command.env == {"FOO": "1"}
    assert command.flags == {"tp": 8, "graph_bs": [1, 2, 4], "dcp": 4}


def test_unknown_flags_are_kept_apart_with_a_suggestion() -> None:
    command = read_command("sglang serve --tp-size 8 --dcp-sizes 8 --enable-quux a b --pp-size 2".split())
    assert command.flags == {"tp": 8, "pp": 2}
    assert [(u.flag, u.meant) for u in command.unknown] == [("--dcp-sizes", "--dcp-size"), ("--enable-quux", "")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchrun serve.py", "no command that can be planned"),
        ("", "no command after --"),
        ("sglang serve --tp-size eight", "--tp-size is 'eight'; it must be a whole number"),
        ("sglang serve --tp-size", "--tp-size needs a value"),
        ("sglang serve 8", "stands alone"),
        ("vllm serve m --speculative-config {method", "must be a JSON object"),
        ("SGLANG_USE_AITER=1 sglang serve --tp-size 8", "AMD recipe"),
        ("sglang serve --device npu --tp-size 8", "NVIDIA GPUs only"),
        ("sglang serve --attention-backend aiter --tp-size 8", "AMD or NPU"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_command(text.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kv-cache-dtype int4", "--kv-cache-dtype is 'int4'; known"),
        ("--mem-fraction-static 1.2", "above 0 and at most 1"),
        ("--mamba-radix-cache-strategy fast", "known: auto, no_buffer"),
        ("--disaggregation-mode both", "known: null, prefill, decode"),
        ("--speculative-algorithm MEDUSA", "known: DSPARK, DFLASH"),
        (
            "--speculative-algorithm DSPARK --enable-linear-replayssm-spec --linear-replayssm-cache-len 12",
            "power of two",
        ),
        ("--tp-size 5", "widths that divide them"),
        ("--tp-size 8 --dcp-size 3", "does not divide"),
        ("--model-path /nowhere", "no such folder"),
    ],
)
def test_impossible_settings(flags: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_plan(build_setup(read_command(f"sglang serve {flags}".split()), load_catalogue().parse("8xB300")), 9_216)


@pytest.mark.parametrize("name", ["8xMI355X", "MI300X", "64xA3", "8xAscend910", "amd"])
def test_other_vendors_are_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match="hardware is not planned for here"):
        load_catalogue().parse(name)


def test_environment_changes_slots() -> None:
    hardware = load_catalogue().parse("8xB300")
    plain = make_plan(build_setup(read_command("sglang serve --tp-size 8".split()), hardware), 9_216)
    words = "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 sglang serve --tp-size 8".split()
    skipping = make_plan(build_setup(read_command(words), hardware), 9_216)
    assert (plain.slots_per_request, skipping.slots_per_request) == (5, 4)


def test_vllm_data_parallel_is_attention_dp_over_all_ranks() -> None:
    words = "vllm serve moonshotai/Kimi-K3 -tp 4 -dp 4 --enable-expert-parallel".split()
    setup = build_setup(read_command(words), load_catalogue().parse("16xGB200"))
    assert (setup.layout.tp, setup.layout.dp, setup.layout.ep, setup.layout.attn_tp) == (16, 4, 16, 4)


def test_default_memory_fraction_is_computed() -> None:
    setup = build_setup(read_command("sglang serve --tp-size 8".split()), load_catalogue().parse("8xB300"))
    assert setup.fraction == pytest.approx(0.851, abs=0.001) and not setup.fraction_given


def test_hardware_names_and_files(tmp_path: object) -> None:
    catalogue = load_catalogue()
    assert (catalogue.parse("32xH200").nodes, catalogue.parse("gb300-nvl72").count) == (4, 72)
    assert catalogue.parse("16xgb200").nodes == 4
    for text, words in (
        ("8x", "not understood"),
        ("0xB300", "at least 1"),
        ("12xB300", "no multiple"),
        ("8xL4", "no GPU"),
    ):
        with pytest.raises(UserError, match=words):
            catalogue.parse(text)


def test_user_hardware_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import json

    def fig(value: float, unit: str) -> dict[str, object]:
        return {"value": value, "unit": unit, "source": "mine"}

    gpu = {
        "sm": 120, "gpus_per_node": 8, "memory": fig(97_887, "MiB"), "bandwidth": fig(1.79, "TB/s"),
        "rates": {"bf16": fig(500, "TFLOP/s")}, "links": {"node": fig(64, "GB/s"), "network": fig(50, "GB/s")},
    }  # fmt: skip
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"gpus": {"RTXPRO": gpu}, "systems": {"box": {"gpu": "RTXPRO", "count": 8}}}))
    catalogue = load_catalogue(str(file))
    assert catalogue.parse("box").gpu.memory_gib == pytest.approx(95.59, abs=0.01)
    assert catalogue.parse("8xB300").count == 8
    file.write_text(json.dumps({"gpus": {"X": {**gpu, "memory": {"value": 1}}}}))
    load_catalogue.cache_clear()
    with pytest.raises(UserError, match="memory needs 'value'"):
        load_catalogue(str(file))
