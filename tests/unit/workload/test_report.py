"""The target as the study states it, the report's fields, and the search for the sustained rate."""

from __future__ import annotations

import random

import pytest

from k3stack.cli.load_arguments import print_summary
from k3stack.workload.figures import latency_figure
from k3stack.workload.records import Record
from k3stack.workload.report import spread, stream_output_lost, summarize, wilson
from k3stack.workload.sustained import find_sustained
from k3stack.workload.target import Target


def record(**kw: object) -> Record:
    base: dict[str, object] = {
        "rid": "r", "session": 0, "turn": 0, "arrival_s": 10.0, "first_s": 11.0, "finished_s": 13.475,
        "output_tokens": 100, "prompt_tokens": 1000, "end": "stop",
    }  # fmt: skip
    return Record(**{**base, **kw})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"finished_s": 13.5}, False),  # 25.25 ms a token
        ({"first_s": 12.01, "finished_s": 13.0}, False),  # first token late, though fast after it
        ({"first_s": 12.0, "finished_s": 14.4}, True),
        ({"tool_call": True, "first_s": 14.4, "finished_s": 14.5}, True),  # 2 s + 100 x 25 ms after arrival
        ({"tool_call": True, "first_s": 10.1, "finished_s": 14.51}, False),
        ({"output_tokens": 1, "first_s": 11.9, "finished_s": 11.9}, True),
        ({"end": "error"}, False),
        ({"end": "unfinished", "finished_s": None}, False),
        ({"end": "abort"}, False),
    ],
)
def test_target(change: dict[str, object], met: bool) -> None:
    assert Target().met(record(**change)) is met


def test_summary_counts_failures_as_misses() -> None:
    rows = [record(), record(end="error"), record(end="rejected", first_s=None, finished_s=None, output_tokens=0)]
    s = summarize(rows, target=Target(), gpus=8)
    assert s["share_within_target"] == pytest.approx(1 / 3)
    assert (s["requests"], s["completed"], s["failed"]) == (3, 1, 2)
    assert s["tpot_ms"]["p50"] == pytest.approx(25.0)
    assert s["total_tokens_per_s_per_gpu"] == pytest.approx((200 + 3000) / 3.475 / 8)


def test_intervals() -> None:
    low, high = wilson(95, 100)
    assert low == pytest.approx(0.8882, abs=1e-3) and high == pytest.approx(0.9785, abs=1e-3)
    s = spread([float(i) for i in range(101)])
    assert (s["p50"], s["mean"]) == (50.0, 50.0) and s["p50_ci"][0] < 50 < s["p50_ci"][1]
    assert spread([])["p50"] is None


def test_stream_output_lost() -> None:
    quiet = [i * 0.1 for i in range(200)]  # 10 a second for 20 s
    busy = [20 + i * 0.2 for i in range(50)]  # 5 a second for 10 s
    row = record(stream=True, token_s=quiet + busy)
    assert stream_output_lost([row], (20.0, 30.0)) == pytest.approx(0.5, abs=0.02)
    assert stream_output_lost([record()], (20.0, 30.0)) is None


def test_sustained_finds_the_edge_through_noise() -> None:
    rng = random.Random(3)

    def measure(rate: float, _: int) -> tuple[int, int]:
        share = 1.0 if rate < 0.6 else max(0.0, 1.0 - (rate - 0.6) / 4)  # 95 % at 0.8
        n = 200
        return sum(rng.random() < share for _ in range(n)), n

    found = find_sustained(measure, start=0.2, resolution=0.02)
    assert found.above is not None
    assert 0.7 < found.rate < 0.9 and found.above / found.rate < 1.0201


def test_sustained_of_a_server_that_never_meets_the_target_is_zero() -> None:
    assert find_sustained(lambda rate, _: (0, 100), start=1.0, max_repeats=2).rate == 0.0


def test_why_requests_failed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    s = {**summarize([record(end="error")], target=Target()), "errors": {"400: [/too] long": 1}}
    print_summary(s, "[/a title]")
    shown = capsys.readouterr().out
    assert "1 failed" in shown and "400: [/too] long" in shown and "[/a title]" in shown


def test_the_highest_point_lies_inside_the_figure() -> None:
    rows = [record(), record(first_s=11.001, finished_s=13.5)]
    first, after = latency_figure(rows, Target()).axes
    assert first.get_ylim() == (0.0, pytest.approx(1.06 * 1.001))
    assert after.get_ylim()[1] > 1000 * max(r.tpot_s or 0.0 for r in rows)
