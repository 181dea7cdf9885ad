"""Keys, health, CORS, and the request log."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.unit.server.harness import Live, saying

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def test_keys_are_asked_for_and_never_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with Live(saying("[TC]x[MC]"), api_key=("sesame", "second"), disable_request_log=False) as live:
        assert httpx.get(f"{live.url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}, {"x-api-key": ""}):
            answer = httpx.get(f"{live.url}/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            live.client.chat.completions.create(model="tiny", messages=HI)
        for headers in ({"authorization": "Bearer second"}, {"x-api-key": "sesame"}):
            assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == 200
            body = {"messages": HI}
            assert httpx.post(f"{live.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    shown = "".join(capfd.readouterr())
    assert "sesame" not in shown and "second" not in shown


def test_the_log_has_a_line_a_request_and_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    with Live(saying("secret thought[TC][RO]secret answer[RC][MC]"), disable_request_log=False) as live:
        live.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "secret question"}],
            user="me",
            extra_headers={"x-request-id": "trace-1"},
        )
        httpx.post(f"{live.url}/v1/completions", json={"prompt": "secret", "n": 99})
    logged = capfd.readouterr().err
    assert "secret" not in logged
    (line,) = [json.loads(text) for text in logged.splitlines() if text.startswith("{")]
    assert (line["rid"], line["end"], line["status"], line["user"]) == ("trace-1", "stop", 200, "me")
    assert line["output_tokens"] > line["reasoning_tokens"] > 0
    assert 0 <= line["first_token_s"] <= line["total_s"]


def test_health_says_why_nothing_is_taken() -> None:
    with Live(saying("[TC]x[MC]")) as live:
        assert httpx.get(f"{live.url}/health").json() == {"status": "ready"}
        live.service.phase = "draining"
        answer = httpx.get(f"{live.url}/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        answer = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": HI})
        assert answer.status_code == 503 and "draining" in answer.json()["error"]["message"]
        live.service.phase = "ready"
        live.engine.healthy, live.engine.why_not_healthy = False, "the engine process died"
        answer = httpx.get(f"{live.url}/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "broken")
        assert "died" in httpx.post(f"{live.url}/v1/chat/completions", json={"messages": HI}).text


def test_cors_is_off_unless_asked_for() -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with Live(saying("[TC]x[MC]")) as live:
        assert "access-control-allow-origin" not in httpx.options(f"{live.url}/v1/models", headers=headers).headers
    with Live(saying("[TC]x[MC]"), cors_origin=("https://page.example",), api_key=("k",)) as live:
        found = httpx.options(f"{live.url}/v1/models", headers=headers).headers
        assert found["access-control-allow-origin"] == "https://page.example"
        other = {**headers, "origin": "https://other.example"}
        assert "access-control-allow-origin" not in httpx.options(f"{live.url}/v1/models", headers=other).headers
