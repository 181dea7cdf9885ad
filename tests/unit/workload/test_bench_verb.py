"""`k3 bench` from the command line against the stub: figures, records, comparison, exit status."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k3stack.cli import main
from k3stack.workload import client
from k3stack.workload.records import Record
from tests.unit.workload.stub_server import StubServer


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub server in a thread of its own."""
    server, up, stop = StubServer(first_s=0.05, gap_s=0.002), threading.Event(), threading.Event()

    async def serve() -> None:
        async with server:
            up.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert up.wait(10)
    yield server
    stop.set()
    thread.join()


def test_json_figures_and_exit_status(stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, html, png = tmp_path / "r.jsonl", tmp_path / "r.html", tmp_path / "png"
    common = ["bench", "--base-url", stub.base_url, "--concurrency", "4", "--requests", "8", "--input-len", "100"]
    common += ["--output-len", "16", "--ttft", "20"]  # a starved machine may be late; the limit on lag goes with it
    argv = [*common, "--records", str(records), "--html", str(html), "--png", str(png), "--json"]
    assert main(argv) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == 8 and summary["share_within_target"] == 1.0
    assert 0.05 <= summary["ttft_s"]["p50"] < 10
    assert len(records.read_text().splitlines()) == 9
    assert "data:image/png;base64" in html.read_text() and "http" not in html.read_text().replace(stub.base_url, "")
    assert {p.name for p in png.iterdir()} == {"latency.png", "distributions.png"}
    assert main([*common, "--tpot", "0.001"]) == 1
    capsys.readouterr()
    assert main(["bench", "--compare", str(records), str(records), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["change"] for r in rows} <= {"+0.0 points", "+0.0 %", "-"}


def test_a_client_that_was_the_bottleneck_reports_nothing(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = client._take_usage

    def slow(usage: Any, record: Record) -> None:
        time.sleep(0.3)
        seen(usage, record)

    monkeypatch.setattr(client, "_take_usage", slow)
    argv = ["bench", "--base-url", stub.base_url, "--concurrency", "4", "--requests", "8", "--input-len", "100"]
    assert main([*argv, "--output-len", "16", "--json"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and "the load client was the bottleneck" in said.err


@pytest.mark.parametrize(
    ("argv", "needle"),
    [
        (["bench"], "--base-url is missing"),
        (["bench", "--base-url", "http://127.0.0.1:9"], "--rate"),
        (["bench", "--base-url", "http://127.0.0.1:9", "--rate", "1", "--duration", "3"], "is the server up"),
        (["bench", "--bese-url", "x"], "--base-url"),
        (["bench", "--base-url", "http://127.0.0.1:9", "--rate", "1", "--records", "/nowhere/x"], "there is no folder"),
        (["bench", "--base-url", "http://127.0.0.1:9", "--rate", "1", "--html", "/"], "is a folder"),
        (["bench", "--base-url", "http://127.0.0.1:9", "--rate", "1", "--png", "/dev/null"], "a folder is wanted"),
        (["simulate", "--compare", "rack-a,rack-b", "--rate", "1", "--records", "x"], "leave --compare out"),
        (["simulate", "--compare", "rack-a,rack-b", "--rate", "1", "--html", "x"], "needs --sustained"),
        (["bench", "--compare", "/nowhere/a", "/nowhere/b"], "/nowhere/a: No such file"),
        (["bench", "--compare", "a", "b", "--html", "x"], "--html would change nothing beside --compare"),
        (["bench", "--compare", "a", "b", "--rate", "2"], "--rate would change nothing beside --compare"),
        (
            ["bench", "--compare", "a", "b", "--base-url", "http://127.0.0.1:1"],
            "--base-url would change nothing beside",
        ),
        (["simulate", "--scenario", "rack-a", "--rate", "1", "--html", "/nowhere/x"], "there is no folder"),
        (["simulate", "--scenario", "rack-a", "--rate", "2", "--duration", "5", "--records", "/dev/full"], "No space"),
    ],
)
def test_wrong_use_exits_2(argv: list[str], needle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert needle in capsys.readouterr().err
