"""Targets: the server's, a request's own, and who met them."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.unit.server.harness import FakeEngine, Live, saying, turn

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def counted(live: Live) -> dict[str, float]:
    """``k3_target_requests_total`` by result."""
    found = {}
    for line in httpx.get(f"{live.url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("k3_target_"):
            found[name.removeprefix("k3_target_")] = float(value)
    return found


def test_targets_of_requests_reach_the_engine() -> None:
    with Live(saying("a[TC][RO]b[RC][MC]")) as live:
        own = {"target_ttft_s": 0.5, "target_tpot_ms": 12.5}
        for path, body in (
            ("/v1/chat/completions", ASK),
            ("/v1/completions", {"prompt": "x"}),
            ("/generate", {"text": "x"}),
        ):
            for extra in ({}, own):
                assert httpx.post(f"{live.url}{path}", json={**body, **extra}).status_code == 200
        targets = [(s.first_token_target_s, s.token_target_s) for s in live.engine.submits]
        assert targets == [(None, None), (0.5, 0.0125)] * 3


@pytest.mark.parametrize("field", ["target_ttft_s", "target_tpot_ms"])
@pytest.mark.parametrize("value", [0, -1, "1", 1e6])
def test_targets_that_are_none_are_refused(field: str, value: Any) -> None:
    with Live(saying("a[TC][RO]b[RC][MC]")) as live:
        answer = httpx.post(f"{live.url}/v1/chat/completions", json={**ASK, field: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_requests_are_held_to_their_targets() -> None:
    ids = turn("abcdef[TC][RO]b[RC][MC]")
    with Live(FakeEngine(lambda submit, choice: ids, delay=0.005)) as live:
        for extra in (
            {"target_ttft_s": 60, "target_tpot_ms": 60_000},
            {"target_ttft_s": 0.001},
            {"target_ttft_s": 60, "target_tpot_ms": 0.1},
            {"target_ttft_s": 60, "target_tpot_ms": 60_000, "stream": False},
            {"target_ttft_s": 0.001, "target_tpot_ms": 0.1, "stream": False},
        ):
            assert httpx.post(f"{live.url}/v1/chat/completions", json={**ASK, **extra}).status_code == 200
        found = counted(live)
    assert found == {
        'requests_total{result="met"}': 2,
        'requests_total{result="late_first_token"}': 1,
        'requests_total{result="slow"}': 2,
        'seconds{of="first_token"}': 2.0,
        'seconds{of="token"}': 0.025,
    }


def test_the_page_shows_a_stream_its_own_target() -> None:
    ids = turn("a[TC][RO]" + "x" * 400 + "[RC][MC]")
    with Live(FakeEngine(lambda submit, choice: ids, delay=0.01)) as live:
        chat = f"{live.url}/v1/chat/completions"
        own = {**ASK, "target_ttft_s": 7}
        with httpx.stream("POST", chat, json=ASK), httpx.stream("POST", chat, json=own):
            deadline = time.monotonic() + 10
            while len(streams := httpx.get(f"{live.url}/dashboard/data").json()["streams"]) < 2:
                assert time.monotonic() < deadline
        assert [s["target"] for s in streams] == [None, {"first_s": 7.0, "token_s": 0.025}]
