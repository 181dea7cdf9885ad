"""Step logs to step times to a scenario: the line is found, a scenario of a real server's pools is simulated."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from k3stack.cli import main
from k3stack.config.models import model_geometry
from k3stack.errors import UserError
from k3stack.estimate.measured import MeasuredCost, fit_steps, read_step_log, with_host
from k3stack.estimate.pools import block_layout, plan_pools
from k3stack.estimate.saved_plan import SavedPlan, figures, save_plan
from k3stack.estimate.work import StepLoad
from k3stack.simulator.scenario import load_scenario

TRUE = MeasuredCost(
    decode=2e-3, row=4e-4, context=1e-8, chunk=5e-3, chunk_row=1e-3, token=6e-5, prefix=1e-7, pair=2e-9, host_s=0.003
)


def steps(n: int = 400, noise: float = 0.0) -> list[tuple[StepLoad, float]]:
    rng = random.Random(1)
    found = []
    for i in range(n):
        if i % 3:
            rows = rng.randint(1, 32)
            load = StepLoad(decode_rows=rows, decode_context=rows * rng.randint(100, 4_000), samples=rows)
        else:
            count, start = rng.randint(64, 2_048), rng.choice((0, 0, 2_048, 4_096))
            pairs = count * (start + count / 2)
            load = StepLoad(chunk_rows=1, chunk_tokens=count, chunk_prefix=start, chunk_pairs=pairs, samples=1)
        found.append((load, TRUE.seconds(load) * (1 + noise * rng.uniform(-1, 1))))
    return found


def write_log(path: Path, rows: list[tuple[StepLoad, float]]) -> None:
    names = "decode_rows decode_context chunk_rows chunk_tokens chunk_prefix chunk_pairs samples".split()
    lines = [json.dumps({"k3stack_steps": 1, "model": "nano", "context": 16_384, "chunk_tokens": 2_048})]
    for load, seconds in rows:
        lines.append(json.dumps({"seconds": seconds, "device_s": seconds} | {n: getattr(load, n) for n in names}))
    path.write_text("\n".join(lines) + "\n")


def test_a_fit_finds_the_line() -> None:
    cost = fit_steps(steps())
    for load, seconds in steps():
        assert cost.seconds(load) == pytest.approx(seconds, rel=0.02)
    noisy = fit_steps(steps(noise=0.3))
    assert noisy.row == pytest.approx(TRUE.row, rel=0.15) and 0.1 < noisy.error < 0.5
    assert min(noisy.decode, noisy.context, noisy.chunk, noisy.pair) >= 0


def test_decode_steps_bend_where_they_were_seen_to() -> None:
    # One row is cheap, the second costs much, further ones little: no line goes through that.
    by_rows = {1: 0.014, 2: 0.020, 4: 0.023, 8: 0.030}
    seen = [
        (StepLoad(decode_rows=rows, decode_context=rows * 100 * i, samples=rows), seconds + 1e-7 * rows * 100 * i)
        for rows, seconds in by_rows.items()
        for i in range(30)
    ]
    cost = fit_steps([*steps(), *seen])
    assert [rows for rows, _ in cost.knots if rows in by_rows] == list(by_rows)
    cost = fit_steps([s for s in steps() if s[0].chunk_tokens] + seen)
    for rows, seconds in by_rows.items():
        assert cost.seconds(StepLoad(decode_rows=rows, samples=rows)) == pytest.approx(seconds, rel=0.03)
    assert cost.seconds(StepLoad(decode_rows=3)) == pytest.approx(0.0215, rel=0.03)
    eight, sixteen = (cost.seconds(StepLoad(decode_rows=n)) for n in (8, 16))
    assert sixteen - eight == pytest.approx(8 * cost.row)
    load = StepLoad(decode_rows=5, decode_context=700, samples=5)
    [(rest, slope)] = cost.decode_lines(5)
    assert rest + slope * 700 == cost.seconds(load)


def test_what_is_left_out_is_slow_for_its_size() -> None:
    # 1 % of the steps have many rows and as noisy times as all others: left out would be the slower half of them.
    rng = random.Random(2)
    sizes = [1] * 3_960 + [16] * 40
    seen = [(StepLoad(decode_rows=n, samples=n), (0.012 + 0.002 * n) * (1 + 0.5 * rng.uniform(-1, 1))) for n in sizes]
    stuck = (StepLoad(decode_rows=1, samples=1), 0.5)  # the processor was elsewhere
    cost = fit_steps([*[s for s in steps() if s[0].chunk_tokens], *seen, *[stuck] * 20])
    mean = sum(t for load, t in seen if load.decode_rows == 16) / 40
    assert cost.seconds(StepLoad(decode_rows=16)) == pytest.approx(mean, rel=0.03)
    assert cost.seconds(StepLoad(decode_rows=1)) == pytest.approx(0.014, rel=0.03)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match="at least 20"):
        fit_steps(steps(20))


def test_time_outside_steps_comes_from_lone_requests() -> None:
    lone = [(n, 0.004 + 1e-6 * n + TRUE.prompt_s(n, 2_048)) for n in range(100, 5_000, 100)]
    cost = with_host(TRUE, lone, 2_048)
    assert cost.before_s(3_000) == pytest.approx(0.007, rel=0.02)


def test_step_log_of_a_server_becomes_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = block_layout(model_geometry("kimi-linear-48b-a3b"), recurrent_itemsize=4, conv_itemsize=2, row_itemsize=2)
    plan = plan_pools(layout, 8 << 30, max_running=32)
    figure = figures(plan, 0)
    save_plan(tmp_path / "pools.json", SavedPlan("nano", "cpu", plan, figure, figure))
    write_log(tmp_path / "steps.jsonl", steps())
    scenario = tmp_path / "scenario.json"
    args = ["simulate", "--fit-steps", str(tmp_path / "steps.jsonl"), "--pools", str(tmp_path / "pools.json")]
    assert main([*args, "--write", str(scenario), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["servers"][0]["cost"]["row"] == pytest.approx(TRUE.row, rel=0.02)
    assert load_scenario(str(scenario)).servers[0].chunk_tokens == 2_048
    run = "simulate --concurrency 1 --requests 3 --input-len 1000 --output-len 5 --policy prefill-first --json"
    assert main([*run.split(), "--scenario", str(scenario)]) == 0
    summary = json.loads(capsys.readouterr().out)
    expected = TRUE.seconds(StepLoad(chunk_rows=1, chunk_tokens=1_000, chunk_pairs=500_000, samples=1))
    assert summary["ttft_s"]["p50"] == pytest.approx(expected, rel=0.02)
    assert summary["efficiency"] == "measured" and summary["completed"] == 3


def test_logs_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"k3stack_records": 1}\n')
    with pytest.raises(UserError, match="not a step log"):
        read_step_log(path)
    write_log(path, steps(3))
    assert len(read_step_log(path)[1]) == 3
    path.write_text(path.read_text() + '{"seconds": 1, "speed": 2}\n')
    with pytest.raises(UserError, match="line 5"):
        read_step_log(path)


def test_a_server_has_one_source_of_times_and_one_of_pools(tmp_path: Path) -> None:
    raw = {"name": "x", "about": "", "hardware": "8xB300", "servers": [{"layout": {}, "pools": {"budget_gib": 1}}]}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match="'efficiency' or 'cost'"):
        load_scenario(str(path))
    raw["servers"][0] |= {"cost": msgspec.to_builtins(TRUE), "pools": {}}  # type: ignore[index]
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match="'budget_gib' or 'saved_plan'"):
        load_scenario(str(path))
