"""Simulated runs: times that can be computed by hand, determinism, conservation, every kind of deployment."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from k3stack.cli import main
from k3stack.errors import UserError
from k3stack.estimate.work import StepLoad
from k3stack.scheduler.clock import VirtualClock
from k3stack.simulator.build import Builder, SimSettings
from k3stack.simulator.events import EventQueue
from k3stack.simulator.pricing import Drafter, StepPrice, accept_shares
from k3stack.simulator.run import SimResult, simulate, start_notes
from k3stack.simulator.scenario import Scenario, load_scenario, scenario_names
from k3stack.workload import synthetic
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.sessions import Session, Turn, Workload

FIRST = SimSettings(engine="k3", policy="prefill-first", check_every=50)
SGLANG = SimSettings(engine="sglang", policy="prefill-first", check_every=50)


def fresh(**kw: Any) -> Workload:
    return build_workload(WorkloadSpec(name="fresh", **kw))


def run(name: str, workload: Workload, settings: SimSettings = FIRST) -> SimResult:
    return simulate(load_scenario(name), workload, settings)


def model(name: str, settings: SimSettings = FIRST) -> Any:
    scenario = load_scenario(name)
    return Builder(scenario, settings, EventQueue(VirtualClock())).price(scenario.servers[0]).model


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    w = fresh(concurrency=1, requests=1, input_len=8_192, output_len=11)
    (record,) = run("b300x8-low-latency", w).records
    m = model("b300x8-low-latency")
    chunk = m.seconds(StepLoad(chunk_rows=1, chunk_tokens=8_192, chunk_pairs=8_192**2 / 2, samples=1))
    decode = sum(m.seconds(StepLoad(decode_rows=1, decode_context=8_192 + i, samples=1)) for i in range(10))
    assert record.ttft_s == pytest.approx(m.efficiency.before_s(8_192) + chunk, rel=1e-9)
    assert record.finished_s - record.first_s == pytest.approx(decode, rel=1e-9)
    assert record.output_tokens == 11 and record.end == "length"


@pytest.mark.parametrize("settings", [FIRST, SGLANG], ids=["k3", "sglang"])
def test_same_seed_same_bytes(settings: SimSettings) -> None:
    w = fresh(rate=1.2, duration_s=60, seed=5)
    a, b = run("b300x8-low-latency", w, settings), run("b300x8-low-latency", w, settings)
    assert msgspec.json.encode(a.records) == msgspec.json.encode(b.records)
    assert json.dumps(a.summary) == json.dumps(b.summary)
    assert all(r.end == "length" and r.output_tokens == r.asked_tokens for r in a.records)


@pytest.mark.parametrize("name", ["b300x8-four", "rack-a", "rack-b", "rack-c", "h200x16", "h200x32"])
@pytest.mark.parametrize("engine", ["k3", "sglang"])
def test_every_scenario_serves_every_request(name: str, engine: str) -> None:
    settings = SimSettings(engine=engine, policy="prefill-first", check_every=100)  # type: ignore[arg-type]
    result = run(name, fresh(rate=1.0, duration_s=12, seed=1), settings)
    assert result.records and all(r.output_tokens == r.asked_tokens for r in result.records)
    assert result.summary["completed"] == len(result.records)


def test_shipped_names() -> None:
    wanted = (
        "b300x8-low-latency b300x8-balanced b300x8-balanced-drafter h200x16 h200x32 b300x8-four rack-a rack-b rack-c"
    )
    assert set(scenario_names()) >= set(wanted.split())
    for name in scenario_names():
        assert load_scenario(name).gpus in (8, 16, 32, 72)


def test_returning_turns_find_their_prefix() -> None:
    turns = (Turn(new_tokens=20_000, output_tokens=64), Turn(new_tokens=500, output_tokens=64, think_s=1.0))
    w = Workload(name="s", sessions=(Session(sid=0, arrival_s=0.0, turns=turns),))
    first, second = run("b300x8-low-latency", w).records
    assert first.cached_tokens == 0
    assert second.prompt_tokens == 20_564
    assert second.cached_tokens >= 20_000
    assert second.ttft_s < first.ttft_s / 2


def test_first_token_of_a_handed_on_request_waits_for_prefill_and_transfer() -> None:
    w = fresh(concurrency=1, requests=1, input_len=4_096, output_len=5)
    (record,) = run("rack-b", w).records
    m = model("rack-b")
    load = StepLoad(chunk_rows=1, chunk_tokens=4_096, chunk_pairs=4_096**2 / 2, samples=1)
    through = sum(m.step(load, i).seconds for i in range(8)) + 7 * m.handon_s(4_096)
    assert record.ttft_s > through + 0.005
    assert record.ttft_s < through + 0.1
    assert record.output_tokens == 5


def test_what_a_decode_server_receives_runs_as_a_row_of_its_step() -> None:
    """The last token of a prompt computed elsewhere costs what a decode row costs; a prompt computed here does not."""
    step_model = model("b300x8-low-latency")
    received = StepPrice(step_model, received=True)
    joined = StepLoad(decode_rows=4, decode_context=20_000, chunk_rows=1, chunk_tokens=1, chunk_prefix=8_399, samples=5)
    assert received(joined) == received(StepLoad(decode_rows=5, decode_context=28_399, samples=5))
    assert StepPrice(step_model)(joined) > 2 * received(joined)
    whole = StepLoad(chunk_rows=1, chunk_tokens=500, chunk_pairs=125_000, samples=1)
    assert received(whole) == StepPrice(step_model)(whole)


def test_a_pipeline_overlaps_chunks() -> None:
    """Eight stages: eight prompts of one chunk take far less than eight times one."""
    one = run("rack-b", fresh(concurrency=1, requests=1, input_len=4_096, output_len=1)).records[0]
    scenario = load_scenario("rack-b")
    prefill = msgspec.structs.replace(scenario.servers[0], servers=1)
    single = msgspec.structs.replace(scenario, servers=[prefill, scenario.servers[1]])
    eight = simulate(single, fresh(concurrency=8, requests=8, input_len=4_096, output_len=1), FIRST).records
    assert max(r.finished_s for r in eight) < 4 * one.finished_s


def test_a_drafter_divides_the_step_by_its_accept_length() -> None:
    plain = run("b300x8-balanced", fresh(concurrency=1, requests=1, input_len=1_000, output_len=400)).summary
    drafted = run("b300x8-balanced-drafter", fresh(concurrency=1, requests=4, input_len=1_000, output_len=400)).summary
    assert drafted["accept_length"] == pytest.approx(3.75, rel=0.05)
    assert drafted["tpot_ms"]["p50"] < plain["tpot_ms"]["p50"] / 2


@pytest.mark.parametrize("mean", [1.0, 2.7, 3.75, 7.9])
def test_accept_shares_have_their_mean(mean: float) -> None:
    shares = accept_shares(mean)
    assert sum(shares) == pytest.approx(1) and len(shares) == 8
    assert Drafter(shares).mean == pytest.approx(mean, abs=1e-6)


def test_drafted_time_per_token_is_step_over_mean_for_any_batch() -> None:
    m = model("b300x8-balanced-drafter")
    for rows in (1, 4):
        price = StepPrice(m, Drafter(accept_shares(3.0)), seed=2)
        load = StepLoad(decode_rows=rows, decode_context=rows * 1_000, samples=rows)
        drafted = m.seconds(StepLoad(decode_rows=rows, decode_context=rows * 1_000, verify=8, samples=8 * rows))
        mean = sum(price(load) for _ in range(8_000)) / 8_000
        assert mean == pytest.approx(drafted / 3.0, rel=0.03)


def test_interference_takes_the_prompts_share_of_the_time() -> None:
    result = run("b300x8-low-latency", synthetic.interference(), SGLANG)
    prompt = model("b300x8-low-latency", SGLANG).seconds(
        StepLoad(chunk_rows=1, chunk_tokens=8_400, chunk_pairs=8_400**2 / 2, samples=1)
    )
    assert result.summary["stream_output_lost"] == pytest.approx(prompt, abs=0.05)  # one prompt a second
    assert result.summary["longest_gap_s"] >= prompt


def test_a_bound_that_the_smallest_chunk_outlasts_is_said_before_the_run() -> None:
    """Two nodes of H200: a chunk reads nearly all experts, whatever its length."""
    slow, settings = load_scenario("h200x16"), SimSettings(policy="slo", mixed=True, max_gap_s=0.05)
    (note,) = start_notes(slow, settings)
    assert "the bound of 50 ms" in note and "cannot be kept" in note
    assert start_notes(slow, replace(settings, max_gap_s=0.15)) == []
    assert start_notes(slow, replace(settings, max_gap_s=None)) == []


def test_router_spreads_and_keeps_sessions() -> None:
    turns = tuple(Turn(new_tokens=3_000, output_tokens=32, think_s=0.5) for _ in range(4))
    w = Workload(name="s", sessions=tuple(Session(sid=i, arrival_s=0.1 * i, turns=turns) for i in range(8)))
    result = run("b300x8-four", w)
    hits = Counter(r.turn for r in result.records if r.cached_tokens > 2_900)
    assert hits[1] == hits[2] == hits[3] == 8


def test_servers_that_start_later_take_load_later() -> None:
    scenario = load_scenario("b300x8-low-latency")
    late = msgspec.structs.replace(scenario.servers[0], starts_s=100.0)
    w = fresh(rate=0.5, duration_s=60, seed=3)
    grown = msgspec.structs.replace(scenario, hardware="16xB300", servers=[scenario.servers[0], late])
    assert simulate(grown, w, FIRST).summary["completed"] == len(w.sessions)
    alone = msgspec.structs.replace(scenario, servers=[late])
    assert min(r.first_s or math.inf for r in simulate(alone, w, FIRST).records) > 100.0


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"servers": []}, "either all unified"),
        ({"hardware": "4xB300"}, "take 8 GPUs"),
        ({"router": "sticky"}, "router policy"),
    ],
)
def test_scenarios_that_cannot_be_are_refused(change: dict[str, Any], needle: str) -> None:
    scenario = load_scenario("b300x8-low-latency")
    with pytest.raises(UserError, match=needle):
        simulate(_changed(scenario, change), fresh(rate=1.0, duration_s=5), FIRST)


def _changed(scenario: Scenario, change: dict[str, Any]) -> Scenario:
    return msgspec.structs.replace(scenario, **change).validate()


def test_verb_prints_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--scenario", "b300x8-low-latency", "--policy", "prefill-first", "--rate", "0.5", "--json"]
    assert main([*argv, "--duration", "20"]) == 0
    summary = json.loads(capsys.readouterr().out)
    wanted = "requests share_within_target ttft_s tpot_ms longest_gap_s output_tokens_per_s kv_hit_rate".split()
    assert set(summary) >= {*wanted, "max_running", "total_tokens_per_s_per_gpu", "stream_output_lost", "binding"}
    assert set(summary["ttft_s"]) >= {"p50", "p90", "p99", "mean"}
    assert main(["simulate", "--scenario", "b300", "--rate", "1"]) == 2
    assert "b300x8-low-latency" in capsys.readouterr().err


def test_the_comparison_says_who_serves_the_most_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve prompts a second stop the streams of nine servers; with prefill apart they keep their pace."""
    words = ["simulate", "--compare", "rack-a,rack-b", "--workload", "fresh", "--rate", "12", "--duration", "6"]
    assert main([*words, "--policy", "prefill-first", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best, other = found["scenarios"]
    assert (best["scenario"], other["scenario"]) == ("rack-b", "rack-a")
    assert set(best["busy_share"]) == {"prefill", "decode"} and set(other["busy_share"]) == {"unified"}
    assert other["missed_pace"] > other["missed_first_token"] and best["missed_pace"] == 0
    assert found["answer"].startswith("rack-b serves ") and "rack-a: " in found["answer"]
    assert "tokens after the first" in found["answer"]
    for row in (best, other):
        late = row["missed_first_token"] + row["missed_pace"] + row["missed_whole"]
        assert row["share_within_target"] == pytest.approx(1 - late)
