"""Known failures are data: every entry can be evaluated, and each fires and stays silent where it should."""

from __future__ import annotations

import pytest

from k3stack.config.hardware import load_catalogue
from k3stack.errors import BugError
from k3stack.planner.command import read_command
from k3stack.planner.landmines import SEVERITIES, findings, holds, landmines
from k3stack.planner.plan import Plan, facts, make_plan
from k3stack.planner.setup import build_setup


def plan(hardware: str, command: str) -> Plan:
    return make_plan(build_setup(read_command(command.split()), load_catalogue().parse(hardware)), 9_216)


def ids(hardware: str, command: str) -> set[str]:
    return {f.id for f in plan(hardware, command).findings}


def test_entries_are_whole() -> None:
    known = facts(plan("8xB300", "sglang serve --tp-size 8"))
    assert len({m.id for m in landmines()}) == len(landmines()) >= 12
    for mine in landmines():
        assert mine.severity in SEVERITIES and mine.source and mine.remedy and mine.engines
        for condition in mine.when:
            assert condition[0] in known, f"{mine.id}: no fact {condition[0]}"
            if len(condition) > 2 and isinstance(condition[2], str) and condition[2].startswith("$"):
                assert condition[2][1:] in known
        assert mine.message.format_map({**known, "speculative": "DSPARK", "hicache_storage": "x"})


@pytest.mark.parametrize(
    ("name", "hardware", "fires", "silent"),
    [
        (
            "megamoe-across-nvlink-domain",
            "16xB300",
            "sglang serve --tp-size 16 --moe-a2a-backend megamoe --nnodes 2",
            "sglang serve --tp-size 16 --ep-size 16 --moe-a2a-backend deepep --nnodes 2",
        ),
        (
            "spec-maxrunning-48",
            "8xB300",
            "sglang serve --tp-size 8 --speculative-algorithm DSPARK",
            "sglang serve --tp-size 8 --speculative-algorithm DSPARK --max-running-requests 64",
        ),
        (
            "dcp8-default-ratio",
            "8xB300",
            "sglang serve --tp-size 8 --dcp-size 8",
            "sglang serve --tp-size 8 --dcp-size 8 --mamba-full-memory-ratio 8.82",
        ),
        (
            "symm-mem-dcp",
            "8xB300",
            "sglang serve --tp-size 8 --dcp-size 8 --enable-symm-mem",
            "sglang serve --tp-size 8 --enable-symm-mem",
        ),
        (
            "pp-disables-overlap-slots",
            "16xB200",
            "sglang serve --tp-size 8 --pp-size 2 --nnodes 2",
            "sglang serve --tp-size 16 --nnodes 2",
        ),
        (
            "attention-knob-cancels-auto",
            "8xB300",
            "sglang serve --tp-size 8 --decode-attention-backend trtllm_mla",
            "sglang serve --tp-size 8",
        ),
        (
            "k3-moe-padding-tp",
            "16xGB200",
            "vllm serve moonshotai/Kimi-K3 -tp 16",
            "vllm serve moonshotai/Kimi-K3 -tp 16 --enable-expert-parallel",
        ),
        (
            "fp8kv-hopper-k3",
            "32xH200",
            "vllm serve moonshotai/Kimi-K3 -tp 32 --enable-expert-parallel --kv-cache-dtype fp8",
            "vllm serve moonshotai/Kimi-K3 -tp 32 --enable-expert-parallel",
        ),
        (
            "maxseqs-exceeds-mamba-blocks",
            "8xB300",
            "vllm serve moonshotai/Kimi-K3 -tp 8",
            "vllm serve moonshotai/Kimi-K3 -tp 8 --max-num-seqs 64",
        ),
        (
            "kda-conv-int32-overflow",
            "8xB300",
            "sglang serve --tp-size 8 --chunked-prefill-size 500000",
            "sglang serve --tp-size 8 --chunked-prefill-size 16384",
        ),
    ],
)
def test_fires_and_stays_silent(name: str, hardware: str, fires: str, silent: str) -> None:
    assert name in ids(hardware, fires)
    assert name not in ids(hardware, silent)


def test_drafter_with_stages_only_on_prefill() -> None:
    base = "sglang serve --tp-size 8 --pp-size 2 --speculative-algorithm DSPARK --nnodes 2"
    assert "dspark-pp" in ids("16xB200", base)
    assert "dspark-pp" not in ids("16xB200", base + " --disaggregation-mode prefill")


def test_worst_comes_first() -> None:
    found = plan("16xB200", "sglang serve --tp-size 8 --pp-size 2 --speculative-algorithm DSPARK").findings
    order = [SEVERITIES.index(f.severity) for f in found]
    assert order == sorted(order) and found[0].refuse


def test_conditions() -> None:
    known = {"a": 3, "b": 5, "c": None, "d": "x"}
    assert holds(("a", "<", "$b"), known) and not holds(("c", "<", 5), known)
    assert holds(("c", "unset"), known) and holds(("d", "in", ["x", "y"]), known)
    with pytest.raises(BugError):
        holds(("a", "~", 1), known)
    assert findings("atom", known) == ()
