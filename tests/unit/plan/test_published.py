"""Every arithmetic row of the published study, from the planner's own functions, within the row's rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest

from k3stack.config.hardware import GIB, MIB, load_catalogue
from k3stack.config.layout import ParallelLayout, stage_layers
from k3stack.config.models import model_geometry
from k3stack.estimate.collectives import collectives, sums_per_step
from k3stack.estimate.pools import block_layout
from k3stack.estimate.sglang import crossing_tokens
from k3stack.estimate.weights import weight_table
from k3stack.planner.command import read_command
from k3stack.planner.plan import Plan, make_plan
from k3stack.planner.recommend import recommend
from k3stack.planner.setup import build_setup

K3 = model_geometry("kimi-k3")
TABLE = weight_table(K3)
TOTALS = TABLE.totals()
WHOLE = sum(TOTALS.values())
TP8, TP32 = block_layout(K3, tp=8), block_layout(K3, tp=32)


def plan(hardware: str, flags: str, tokens: int = 9_216, **extra: Any) -> Plan:
    command = read_command(f"sglang serve {flags}".split())
    return make_plan(build_setup(command, load_catalogue().parse(hardware), **extra), tokens)


def weights(**layout: Any) -> float:
    return TABLE.plan(ParallelLayout(**layout)).gib_per_gpu


def row_bytes(itemsize: int) -> int:
    return block_layout(K3, row_itemsize=itemsize).row_bytes * 24


ROWS: list[tuple[str, float, float, int]] = [
    ("checkpoint, GiB", WHOLE / GIB, 1454, 0),
    ("checkpoint, TB", WHOLE / 1e12, 1.56, 2),
    ("share of routed experts", TOTALS["routed_experts"] / WHOLE, 0.93, 2),
    ("all but routed experts, GiB", (WHOLE - TOTALS["routed_experts"]) / GIB, 107, 0),
    ("KDA attention, GiB", TOTALS["kda_attention"] / GIB, 57, 0),
    ("MLA attention, GiB", TOTALS["mla_attention"] / GIB, 10, 0),
    ("latent projections, GiB", TOTALS["latent_projections"] / GIB, 9, 0),
    ("experts of one layer, GiB", TOTALS["routed_experts"] / 92 / GIB, 14.6, 1),
    ("cache row, bf16", row_bytes(2), 27_648, 0),
    ("cache row, fp8", row_bytes(1), 13_824, 0),
    ("KDA matrices, MiB", block_layout(K3).recurrent_bytes * 69 / MIB, 414, 0),
    ("state, MiB", block_layout(K3).state_bytes / MIB, 429, 0),
    ("state at TP8, MiB", TP8.state_bytes / MIB, 53.6, 1),
    ("state at TP32, MiB", TP32.state_bytes / MIB, 13.4, 1),
    ("5 states at TP8, MiB", 5 * TP8.state_bytes / MIB, 268, 0),
    ("cache of 8,500 tokens, MiB", 8_500 * row_bytes(2) / MIB, 224, 0),
    ("cache of 128,000 tokens, GiB", 128_000 * row_bytes(2) / GIB, 3.3, 1),
    ("weights at TP8", weights(tp=8), 192, 0),
    ("weights at TP4", weights(tp=4), 372, 0),
    ("weights, 8 GPUs with DP attention", weights(tp=8, dp=8, dp_lm_head=True), 254, 0),
    ("weights on 16", weights(tp=16, ep=16), 102, 0),
    ("weights on 32", weights(tp=32, ep=32), 57, 0),
    ("B300 memory, GiB", load_catalogue().gpus["B300"].memory_gib, 268.6, 1),
    ("H200 memory, nominal, GiB", load_catalogue().gpus["H200"].nominal_bytes / GIB, 131, 0),
    ("ratio, TP8", plan("8xB300", "--tp-size 8").ratio_calculator(9_216), 1.1, 2),
    ("ratio, DCP8", plan("8xB300", "--tp-size 8 --dcp-size 8").ratio_calculator(9_216), 8.82, 2),
    ("ratio, DCP8, 128,000", plan("8xB300", "--tp-size 8 --dcp-size 8").ratio_calculator(128_000), 0.63, 2),
    ("sums a step", sums_per_step(K3, ParallelLayout(tp=32, ep=32)), 186, 0),
]


@pytest.mark.parametrize(("what", "value", "published", "digits"), ROWS, ids=[r[0] for r in ROWS])
def test_arithmetic(what: str, value: float, published: float, digits: int) -> None:
    assert round(value, digits) == published, what


def test_cache_at_tp32_fp8() -> None:
    """128,000 tokens in fp8: 1.65 GiB (published as 1.6, rounded down)."""
    assert math.floor(128_000 * row_bytes(1) / GIB * 10) / 10 == 1.6


def test_crossing() -> None:
    """Published as 10,160: to the nearest ten."""
    tokens = crossing_tokens(slots=5, slot_bytes=TP8.state_bytes, cell_bytes=27_648, dcp=1)
    assert round(tokens, -1) == 10_160
    assert plan("8xB300", "--tp-size 8").crossing == pytest.approx(10_158.33, abs=0.01)


def test_ratio_with_drafter() -> None:
    flags = "--tp-size 8 --dcp-size 8 --speculative-algorithm DSPARK --enable-linear-replayssm-spec"
    assert round(plan("8xB300", flags).ratio_calculator(128_000), 2) == 0.45


def test_ratio_of_32_h200_corresponds_to_51000_tokens() -> None:
    flags = "--tp-size 32 --ep-size 32 --kv-cache-dtype fp8_e4m3 --mamba-radix-cache-strategy extra_buffer_lazy"
    at_one = plan("32xH200", flags).ratio_calculator(1)
    assert round(at_one / 0.08, -3) == 51_000


def test_cache_pool_of_55_gib() -> None:
    rows = 55 * GIB / row_bytes(1)
    assert rows / 128_000 == pytest.approx(33, abs=0.5)
    assert rows / 51_000 == pytest.approx(80, rel=0.06)
    slots = int(0.08 * 55 * GIB / TP32.state_bytes)
    assert slots // 4 == pytest.approx(80, rel=0.06)


def test_sizes_of_sums() -> None:
    """A sum of a 64-request step is about 1 MB, one of an 8,192-token chunk more than 100 MB."""
    found = {c.name: c for c in collectives(K3, ParallelLayout(tp=32, ep=32))}
    step = [found[n].bytes_for(64) / 1e6 for n in ("attention sum", "expert sum")]
    assert sum(step) / 2 == pytest.approx(1, abs=0.2)
    assert min(found[n].bytes_for(8_192) / 1e6 for n in ("attention sum", "expert sum")) > 100


def test_layers_per_stage() -> None:
    assert {len(s) for s in stage_layers(K3, ParallelLayout(pp=8), "sglang")} == {11, 12}


def test_rack_holds_nine_copies_of_eight() -> None:
    setup = build_setup(read_command(["sglang", "serve"]), load_catalogue().parse("gb300-nvl72"))
    found = [c.plan.setup.layout for c in recommend(setup, 8_192, 1_024).layouts]
    assert any(x.replicas == 9 and x.gpus == 8 and x.tp == 8 for x in found)


BOOTS = [
    ("--tp-size 8 --mem-fraction-static 0.85 --mamba-full-memory-ratio 1.1", 30.368, 303, 561_728, 60),
    ("--tp-size 8 --dcp-size 8 --mem-fraction-static 0.85 --mamba-full-memory-ratio 8.82", 29.538, 506, 936_448, 101),
    (
        "--tp-size 8 --dcp-size 8 --mem-fraction-static 0.85 --mamba-full-memory-ratio 6.28 --speculative-algorithm "
        "DSPARK --enable-linear-replayssm-spec --max-running-requests 256",
        28.2285,
        340,
        697_856,
        68,
    ),
]


@pytest.mark.parametrize(("flags", "budget", "slots", "tokens", "running"), BOOTS)
def test_pools_reported_by_the_server(flags: str, budget: float, slots: int, tokens: int, running: int) -> None:
    given = plan("8xB300", flags, budget_gib=budget)
    assert (given.state_slots, given.cache_tokens, given.max_running) == (slots, tokens, running)
    assumed = plan("8xB300", flags)
    assert abs(assumed.budget.gib - budget) < 3
    assert assumed.max_running == running


def test_measured_boots_elsewhere() -> None:
    """A public boot of 16 H200 reported 98 requests; vLLM on 8 B300 reported 3,249,215 cache tokens."""
    flags = "--tp-size 16 --ep-size 16 --mem-fraction-static 0.9 --mamba-radix-cache-strategy extra_buffer_lazy"
    assert plan("16xH200", flags).max_running == pytest.approx(98, abs=2)
    command = read_command("vllm serve moonshotai/Kimi-K3 -tp 8 --kv-cache-dtype fp8".split())
    found = make_plan(build_setup(command, load_catalogue().parse("8xB300")), 9_216)
    assert found.cache_tokens == pytest.approx(3_249_215, rel=0.08)
