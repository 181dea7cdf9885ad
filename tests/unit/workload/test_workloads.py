"""Synthetic workloads have the stated means and are the same for the same seed; traces are read or refused by line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3stack.errors import UserError
from k3stack.workload import synthetic
from k3stack.workload.choose import WorkloadSpec, build_workload
from k3stack.workload.lengths import arrival_times, lognormal, truncated_exponential
from k3stack.workload.records import Record, read_records, write_records
from k3stack.workload.text import TextMaker
from k3stack.workload.traces import read_trace


@pytest.mark.parametrize("mean", [40, 120, 230, 264, 400, 500])
def test_truncated_exponential_mean(mean: int) -> None:
    x = truncated_exponential(np.random.default_rng(1), 40_000, mean, 16, 512)
    assert x.min() >= 16 and x.max() <= 512
    assert abs(x.mean() - mean) < 0.015 * mean + 1


def test_lognormal_mean_and_bounds() -> None:
    x = lognormal(np.random.default_rng(2), 40_000, 8_400, 0.7, 256, 65_536)
    assert abs(x.mean() - 8_400) < 100
    assert x.min() >= 256 and x.max() <= 65_536


@pytest.mark.parametrize(("kind", "cv2"), [("poisson", 1.0), ("bursty", 4.0)])
def test_arrivals_have_rate_and_spread(kind: str, cv2: float) -> None:
    times = arrival_times(np.random.default_rng(3), 5.0, 4_000.0, kind)  # type: ignore[arg-type]
    gaps = np.diff(times)
    assert abs(len(times) / 4_000 - 5.0) < 0.25
    assert abs(gaps.var() / gaps.mean() ** 2 - cv2) < 0.35 * cv2


def test_fresh_is_seeded_and_a_third_are_tool_calls() -> None:
    a = synthetic.fresh(rate=2.0, duration_s=2_000, seed=7)
    assert a == synthetic.fresh(rate=2.0, duration_s=2_000, seed=7)
    assert a != synthetic.fresh(rate=2.0, duration_s=2_000, seed=8)
    turns = [s.turns[0] for s in a.sessions]
    assert abs(np.mean([t.new_tokens for t in turns]) - 8_400) < 300
    assert abs(np.mean([t.output_tokens for t in turns]) - 264) < 12
    assert abs(np.mean([t.tool_call for t in turns]) - 1 / 3) < 0.04


def test_long_sessions_grow_by_prompts_and_answers() -> None:
    s = synthetic.long(concurrency=4, seed=1).sessions[0]
    for k in range(1, len(s.turns)):
        grown = s.prompt_tokens(k) - s.prompt_tokens(k - 1)
        assert grown == s.turns[k - 1].output_tokens + s.turns[k].new_tokens
    assert 60_000 < s.prompt_tokens(0) < 200_000


def test_interference_has_streams_and_one_prompt_a_second() -> None:
    w = synthetic.interference()
    assert sum(s.stream for s in w.sessions) == 16
    prompts = [s for s in w.sessions if not s.stream]
    assert len(prompts) == 24 and w.window_s == (20.0, 44.0)
    assert {s.turns[0].output_tokens for s in prompts} == {1}


@pytest.mark.parametrize(
    ("spec", "needle"),
    [
        (WorkloadSpec(name="fresh"), "either --rate"),
        (WorkloadSpec(name="fresh", rate=1.0, concurrency=2), "either --rate"),
        (WorkloadSpec(name="fresh", rate=-1.0), "above 0"),
        (WorkloadSpec(name="fresh", rate=1.0, turns=3), "--turns does not apply"),
        (WorkloadSpec(name="no-such-file.jsonl"), "no such trace file"),
    ],
)
def test_wrong_specs_are_refused(spec: WorkloadSpec, needle: str) -> None:
    with pytest.raises(UserError, match=needle):
        build_workload(spec)


def test_message_log_becomes_turns(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    call = {"id": "a:0", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s" * 400},
        {"role": "user", "content": "u" * 40},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r" * 80, "tool_call_id": "a:0"},
        {"role": "assistant", "content": "done " * 20},
    ]
    log.write_text(json.dumps({"messages": messages, "timestamp": 12.5}) + "\n")
    (session,) = read_trace(log).sessions
    assert [t.tool_call for t in session.turns] == [True, False]
    assert session.turns[0].new_tokens == 110 and session.turns[1].output_tokens == 25
    assert session.turns[1].messages is not None and len(session.turns[1].messages) == 4


def test_parquet_message_log(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 8}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    (session,) = read_trace(tmp_path / "log.parquet").sessions
    assert (session.turns[0].new_tokens, session.turns[0].output_tokens) == (10, 2)


def test_messages_and_tools_as_strings_of_json(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x" * 40}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "more"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    rows = [{"messages": json.dumps(messages), "tools": json.dumps(tools), "created_at": "2025-05-01T00:00:00"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    first, second = read_trace(tmp_path / "log.parquet").sessions[0].turns
    assert first.tools == tuple(tools) and not first.tool_call
    assert second.messages is not None and second.messages[1] == {"role": "assistant"}


def test_a_batch_file_is_read_by_its_bodies(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 77}
    (tmp_path / "b.jsonl").write_text(json.dumps({"custom_id": "a", "method": "POST", "body": body}) + "\n")
    (turn,) = read_trace(tmp_path / "b.jsonl").sessions[0].turns
    assert (turn.new_tokens, turn.output_tokens) == (10, 77)


def test_times_with_and_without_a_zone(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = ["2024-05-10 00:00:00.0099307,5,6", "2024-05-10 00:00:01+00:00,5,6", "2024-05-10 02:00:02.5+02:00,5,6"]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    assert [round(s.arrival_s, 3) for s in read_trace(file).sessions] == [0.0, 0.99, 2.49]


def test_blocks_that_are_shared_are_the_same_words() -> None:
    text = TextMaker(seed=3, tokens_per_word=2.0)
    one, two = (text.from_blocks(blocks, 512, 1_200).split() for blocks in ((7, 8, 9), (7, 8, 11)))
    assert len(one) == len(two) == 600
    assert one[:512] == two[:512] and one[512:] != two[512:]


def test_other_formats(tmp_path: Path) -> None:
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 2000, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}\n')
    assert read_trace(mooncake).sessions[0].turns[0].blocks == (1, 2)
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:01:51.1600000,374,44\n"
        "2023-11-16 18:01:53.6600000,100,2\n"
    )
    sessions = read_trace(azure, time_scale=2.0).sessions
    assert sessions[1].arrival_s == pytest.approx(1.25)
    sharegpt = tmp_path / "s.json"
    sharegpt.write_text(
        json.dumps([{"conversations": [{"from": "human", "value": "abcd"}, {"from": "gpt", "value": "efgh" * 4}]}])
    )
    (turn,) = read_trace(sharegpt).sessions[0].turns
    assert (turn.new_tokens, turn.output_tokens) == (1, 4)


@pytest.mark.parametrize(
    ("name", "text", "needle"),
    [
        ("x.jsonl", '{"messages": [}\n', "line 1 is not JSON"),
        ("x.jsonl", '{"prompt": "a"}\n', "line 1: it has the fields prompt"),
        ("x.jsonl", '{"messages": "hi"}\n', "line 1: messages is a string that is not JSON"),
        ("x.txt", "hello", "unknown trace format"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n", "line 2"),
        (
            "x.jsonl",
            '{"messages": [{"role": "user", "content": "x"}], "timestamp": "soon"}',
            "line 1: timestamp is .soon.",
        ),
        ("x.jsonl", '{"messages": [{"content": "x"}]}', r"messages\[0\] has no 'role'; it has content"),
        ("x.jsonl", '{"messages": [{"role": "user", "content": "x"}], "max_tokens": "lots"}', "max_tokens is 'lots'"),
        ("x.jsonl", '{"messages": "[1"}', "messages is a string that is not JSON"),
        (
            "x.jsonl",
            '{"input_length": 5, "output_length": 2}\n{"input_length": 5}',
            "line 2: the field 'output_length'",
        ),
        ("x.jsonl", '{"input_length": 5, "output_length": -2}', "output_length is -2; it must be at least 0"),
        ("x.jsonl", '{"input_length": 5, "output_length": 2, "hash_ids": "a"}', "hash_ids is 'a'"),
        ("x.json", '[{"conversations": [}]', "not JSON .*column 21"),
        ("x.json", '[{"conversations": [{"from": "gpt"}]}]', r"entry 1: conversations\[0\] has no text in 'value'"),
        ("x.json", "[3]", "entry 1 is int, not an object"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,a,2\n", "line 2: ContextTokens is 'a'"),
        ("x.csv", "TIMESTAMP,ContextTokens\n2024-01-01,1\n", "line 2: the field 'GeneratedTokens' is missing"),
        ("x.jsonl", "", "the file is empty"),
        ("x.parquet", "hello", "not readable as parquet"),
    ],
)
def test_broken_traces_name_the_place(tmp_path: Path, name: str, text: str, needle: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UserError, match=needle):
        read_trace(file)


def test_records_round_trip_and_replay(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    rows = [
        Record(rid="0.0", session=0, turn=0, arrival_s=1.0, first_s=1.5, finished_s=2.0, prompt_tokens=100,
               output_tokens=20, end="stop"),
        Record(rid="0.1", session=0, turn=1, arrival_s=5.0, first_s=5.1, finished_s=6.0, prompt_tokens=150,
               output_tokens=10, end="length"),
    ]  # fmt: skip
    write_records(file, rows, {"engine": "k3"})
    back, meta = read_records(file)
    assert back == rows and meta["engine"] == "k3"
    (session,) = read_trace(file).sessions
    assert [t.new_tokens for t in session.turns] == [100, 30]
    assert session.turns[1].think_s == pytest.approx(3.0)
    file.write_text('{"k3stack_records": 1}\n{"rid": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        read_records(file)
