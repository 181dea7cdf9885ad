"""SGLang's endpoints around generation, and /tokenize."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from k3stack.engine.messages import Output
from tests.unit.server.harness import TOKENIZER, FakeEngine, Live, saying, turn


def get(live: Live, path: str) -> Any:
    answer = httpx.get(live.url + path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_facts_for_routers() -> None:
    with Live(saying("[TC]x[MC]"), api_key=("sesame",)) as live:
        live.client.api_key = "sesame"
        headers = {"authorization": "Bearer sesame"}
        for path in ("/server_info", "/get_server_info"):
            answer = httpx.get(live.url + path, headers=headers)
            info = answer.json()
            assert (info["served_model_name"], info["dp_size"], info["disaggregation_mode"]) == ("tiny", 1, "null")
            assert info["max_running_requests"] == 256 and info["internal_states"]
            assert "sesame" not in answer.text
        for path in ("/model_info", "/get_model_info"):
            info = httpx.get(live.url + path, headers=headers).json()
            assert (info["model_path"], info["is_generation"]) == ("tiny", True)
            assert info["preferred_sampling_params"] == {"temperature": 1.0, "top_p": 0.95}


def test_loads() -> None:
    with Live(saying("[TC]x[MC]")) as live:
        (load,) = get(live, "/get_load")
        assert (load["dp_rank"], load["num_waiting_reqs"], load["num_reqs"]) == (0, 3, 3)
        assert (load["num_used_tokens"], load["cache_hit_rate"]) == (128, 0.25)
        found = get(live, "/v1/loads?include=core,queues")
        assert found["loads"][0]["num_waiting_reqs"] == 3
        assert found["aggregate"]["total_waiting_reqs"] == 3


def test_flush_waits_for_running_requests() -> None:
    engine = FakeEngine(lambda s, c: turn("a" * 30), delay=0.01)
    with Live(engine) as live:
        assert httpx.post(f"{live.url}/flush_cache").status_code == 200
        with httpx.stream("POST", f"{live.url}/generate", json={"text": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert httpx.get(f"{live.url}/flush_cache").status_code == 400
            began = time.monotonic()
            assert httpx.get(f"{live.url}/flush_cache?timeout=10").status_code == 200
            assert time.monotonic() - began > 0.05
            list(lines)
        assert httpx.get(f"{live.url}/flush_cache?timeout=soon").status_code == 400


@pytest.mark.parametrize("body", [{"rid": "mine"}, {"abort_all": True}])
def test_abort(body: dict[str, Any]) -> None:
    engine = FakeEngine(lambda s, c: turn("a" * 500), delay=0.01)
    with Live(engine) as live:
        asked = {"text": ["x", "y"], "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 500}}
        with httpx.stream("POST", f"{live.url}/generate", json=asked, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert httpx.post(f"{live.url}/abort_request", json={"rid": "other"}).status_code == 200
            assert engine.aborted == set()
            assert httpx.post(f"{live.url}/abort_request", json=body).status_code == 200
            frames = [line for line in lines if line]
        assert frames[-1] == "data: [DONE]" and '"type":"abort"' in frames[-2]
        assert engine.open_requests() == ()
        assert httpx.post(f"{live.url}/abort_request", json={}).status_code == 400


def test_a_health_check_that_generates() -> None:
    with Live(saying("[TC]x[MC]")) as live:
        assert httpx.get(f"{live.url}/health_generate").status_code == 200
        assert len(live.engine.submits[0].prompt_ids) == 1
    with Live(FakeEngine(lambda s, c: [], end=Output(rid="x", finish_reason="error", message="broken"))) as live:
        answer = httpx.get(f"{live.url}/health_generate")
        assert (answer.status_code, answer.json()["reason"]) == (503, "broken")


def test_tokenize_and_back() -> None:
    with Live(saying("[TC]x[MC]")) as live:
        post = lambda path, **body: httpx.post(live.url + path, json=body)  # noqa: E731
        ids = TOKENIZER.encode_text("a<|open|>ü")
        found = post("/tokenize", prompt="a<|open|>ü", return_token_strs=True).json()
        assert (found["tokens"], found["count"], found["token_strs"][0]) == (ids, len(ids), "a")
        assert found["max_model_len"] == live.service.limits.context
        assert post("/v1/tokenize", prompt=["a", "bc"]).json()["count"] == [1, 2]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low"}
        tokens = post("/tokenize", **chat).json()["tokens"]
        post("/v1/chat/completions", **chat)
        assert tuple(tokens) == live.engine.submits[0].prompt_ids
        text = post("/detokenize", tokens=tokens).json()["prompt"]
        assert text.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>')
        assert text.endswith("<|open|>think<|sep|>")
        shown = post("/detokenize", tokens=[ids, ids], skip_special_tokens=True).json()["text"]
        assert shown == ["a<|open|>ü"] * 2
        for body in ({}, {"prompt": "a", "messages": []}, {"text": "a"}, {"messages": []}):
            assert post("/tokenize", **body).status_code == 400
        for tokens in ([99_999], [-1], [1, [2]], "x"):
            assert post("/detokenize", tokens=tokens).status_code == 400
