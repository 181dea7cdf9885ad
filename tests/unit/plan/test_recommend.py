"""The search: quick, complete, honest about what it rejects, and ranked by what was asked."""

from __future__ import annotations

import json
import time

import pytest

from k3stack.cli import main
from k3stack.config.hardware import load_catalogue
from k3stack.planner.command import Command
from k3stack.planner.recommend import Recommendation, alternatives, recommend
from k3stack.planner.setup import build_setup


def answer(engine: str, hardware: str, concurrency: int | None = None, **flags: object) -> Recommendation:
    setup = build_setup(Command(engine, flags), load_catalogue().parse(hardware))  # type: ignore[arg-type]
    return recommend(setup, 8_192, 1_024, concurrency)


@pytest.mark.parametrize("engine", ["k3", "sglang", "vllm"])
def test_full_search_for_72_gpus_is_quick(engine: str) -> None:
    times = []
    for _ in range(2):
        start = time.process_time()
        found = answer(engine, "gb300-nvl72")
        times.append(time.process_time() - start)
    assert found.considered > 100 and len(found.layouts) > 50
    assert min(times) < 2


def test_what_is_rejected_says_why() -> None:
    found = answer("sglang", "8xB300")
    reasons = {r.layout: r for r in found.rejected}
    assert "2 × tp4" in reasons and reasons["2 × tp4"].missing_gib > 100
    assert "103.5 GiB too many before anything else" in reasons["2 × tp4"].reason
    labels = [c.plan.setup.layout.label for c in found.layouts]
    assert "tp8" in labels and "tp8 dcp8" in labels
    assert not set(labels) & set(reasons)


def test_every_candidate_fits_its_gpu() -> None:
    for candidate in answer("sglang", "16xH200").layouts:
        plan = candidate.plan
        assert plan.fits and plan.refused is None
        assert plan.weights.gib_per_gpu + plan.budget.gib < 140.4
        assert plan.setup.gpus_used <= 16


def test_concurrency_comes_before_speed() -> None:
    found = answer("sglang", "8xB300", concurrency=100)
    flags = [c.enough for c in found.layouts]
    assert flags == sorted(flags, reverse=True) and flags[0]
    assert all(c.running >= 100 or not c.enough for c in found.layouts)
    few = answer("sglang", "8xB300", concurrency=10_000)
    assert not any(c.enough for c in few.layouts)


def test_two_pools_get_the_balanced_ratio() -> None:
    for candidate in answer("sglang", "8xB300").layouts:
        plan = candidate.plan
        assert plan.setup.settings.ratio == pytest.approx(plan.ratio_balanced())
        pools = plan.pools
        assert pools is not None
        assert pools.slots / pools.slots_per_request == pytest.approx(pools.tokens / 9_216, rel=0.1, abs=1.5)


def test_given_ratio_is_kept() -> None:
    assert {c.plan.setup.settings.ratio for c in answer("sglang", "8xB300", ratio=2.0).layouts} == {2.0}


def test_arena_admits_more_than_the_best_split() -> None:
    best = {e: max(c.admitted for c in answer(e, "8xB300").layouts) for e in ("k3", "sglang")}
    assert best["k3"] > 2 * best["sglang"]


def test_alternatives_go_to_more_gpus() -> None:
    from k3stack.config.layout import ParallelLayout
    from k3stack.planner.plan import make_plan

    setup = build_setup(Command("sglang", {"tp": 8}), load_catalogue().parse("8xH200"))
    plan = make_plan(setup, 9_216)
    assert not plan.fits
    assert alternatives(plan)[0].find("on 16xH200") > 0
    assert plan.setup.layout == ParallelLayout(tp=8)


def test_json_of_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --json --hardware 32xH200 --input-len 8192 --output-len 1024 --concurrency 64 --engine sglang"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"] and found["rejected"]
    first = found["layouts"][0]
    for name in ("weights_gib_per_gpu", "ratio_balanced", "ratio_calculator", "requests_per_second", "commands"):
        assert name in first
    assert len(first["commands"]["sglang"]) == 4 and len(first["commands"]["vllm"]) == 4
    rates = [x["requests_per_second"] for x in found["layouts"] if x["enough_for_concurrency"]]
    assert rates == sorted(rates, reverse=True)


def test_nothing_fits_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --json --hardware 8xH100".split()) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["layouts"] == [] and "no layout" in err
