"""The load client against a stub of exact timing."""

from __future__ import annotations

import asyncio

import pytest

from k3stack.errors import NotNow, UserError
from k3stack.workload.bench import check_lag
from k3stack.workload.client import ClientOptions, Lag, LoadClient, RunResult
from k3stack.workload.sessions import Session, Turn, Workload
from k3stack.workload.target import Target
from k3stack.workload.text import TextMaker
from tests.unit.workload.stub_server import StubServer


def workload(n: int, tokens: int = 8, turns: int = 1, concurrency: int | None = None, gap: float = 0.02) -> Workload:
    turn = Turn(new_tokens=200, output_tokens=tokens)
    return Workload(
        name="t",
        sessions=tuple(Session(sid=i, arrival_s=i * gap, turns=(turn,) * turns) for i in range(n)),
        concurrency=concurrency,
    )


async def drive(stub: StubServer, w: Workload) -> RunResult:
    async with stub:
        return await LoadClient(ClientOptions(base_url=stub.base_url), TextMaker()).run(w)


def test_times_and_counts() -> None:
    stub = StubServer(first_s=0.1, gap_s=0.02)
    result = asyncio.run(drive(stub, workload(5)))
    assert len(result.records) == 5
    for r in result.records:
        assert r.end == "length" and r.output_tokens == 8 and r.cached_tokens == 4
        assert r.ttft_s == pytest.approx(0.1, abs=0.04)
        assert r.tpot_s == pytest.approx(0.02, abs=0.004)
        assert abs(r.prompt_tokens - 200) <= 3  # calibrated from two requests
    assert stub.seen[-1]["ignore_eos"] is True and stub.seen[-1]["stream_options"] == {"include_usage": True}


def test_an_answer_ends_with_its_last_token_seen_or_not() -> None:
    result = asyncio.run(drive(StubServer(first_s=0.02, gap_s=0.04, silent_after=2), workload(2)))
    for r in result.records:
        assert r.output_tokens == 8 and r.first_s is not None and r.finished_s is not None
        assert r.finished_s - r.first_s > 6 * 0.04  # two visible tokens would be 0.04


def test_sessions_carry_the_whole_answer_back() -> None:
    stub = StubServer(first_s=0.0, gap_s=0.0)
    asyncio.run(drive(stub, workload(1, turns=3)))
    last = stub.seen[-1]["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1] == {"role": "assistant", "content": "y " * 4, "reasoning_content": "x " * 4}


def test_closed_loop_keeps_the_concurrency() -> None:
    result = asyncio.run(drive(StubServer(first_s=0.05, gap_s=0.0), workload(9, concurrency=3)))
    starts = sorted(r.arrival_s for r in result.records)
    assert starts[2] < 0.03 < starts[3] and result.elapsed_s > 0.14


def test_refusals_and_cut_streams_are_recorded() -> None:
    result = asyncio.run(drive(StubServer(fail_every=4), workload(8)))
    ends = [r.end for r in result.records]
    assert ends.count("rejected") == 2 and ends.count("length") == 6  # two calibration requests come first
    result = asyncio.run(drive(StubServer(cut_every=4), workload(8)))
    cut = [r for r in result.records if r.end == "error"]
    assert len(cut) == 2 and "without a finish_reason" in str(cut[0].error)


def test_no_server_is_a_clear_error() -> None:
    client = LoadClient(ClientOptions(base_url="http://127.0.0.1:9"), TextMaker())
    with pytest.raises(UserError, match="is the server up"):
        asyncio.run(client.run(workload(1)))


def test_a_late_client_refuses_to_report() -> None:
    fine = Lag(p50_s=0.0005, p99_s=0.004, max_s=0.02, cpu_share=0.3, late_sends_p99_s=0.002)
    check_lag(fine, Target())
    with pytest.raises(NotNow, match="bottleneck"):
        check_lag(Lag(0.01, 0.3, 0.5, 1.0, 0.01), Target())
    with pytest.raises(NotNow, match="late"):
        check_lag(Lag(0.001, 0.004, 0.5, 1.0, 0.9), Target())


def test_the_lag_watcher_sees_a_blocked_loop() -> None:
    async def run() -> Lag:
        stub = StubServer(first_s=0.2, gap_s=0.0)
        async with stub:
            client = LoadClient(ClientOptions(base_url=stub.base_url), TextMaker())

            async def block() -> None:
                for _ in range(40):
                    await asyncio.sleep(0.001)
                    sum(range(3_000_000))

            task = asyncio.create_task(block())
            result = await client.run(workload(2))
            task.cancel()
            return result.lag

    assert asyncio.run(run()).p99_s > 0.02
