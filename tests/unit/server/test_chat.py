"""/v1/chat/completions with OpenAI's client: answers whole and streamed, tools, usage, errors, disconnects."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from k3stack.engine.messages import Output
from tests.unit.server.harness import TOKENIZER, FakeEngine, Live, call, saying, turn

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}},
]
ANSWER = "hmm, ü[TC][RO]Hello → you[RC][MC]"
CALLS = f"so[TC][RO]Wait[RC][TO]{call('add', a='1', b='x&y')}{call('sub', 2)}[TZ][MC]"


def collect(stream: Any) -> dict[str, Any]:
    """A stream's deltas put together by hand, as a client does."""
    got: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None, "ids": set()}
    for chunk in stream:
        got["ids"].add(chunk.id)
        got["usage"] = chunk.usage or got["usage"]
        for choice in chunk.choices:
            delta = choice.delta
            got["content"] += delta.content or ""
            got["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            for piece in delta.tool_calls or ():
                entry = got["calls"].setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                entry["id"] += piece.id or ""
                entry["name"] += piece.function.name or ""
                entry["arguments"] += piece.function.arguments or ""
            got["finish"] = choice.finish_reason or got["finish"]
    return got


def test_a_whole_answer() -> None:
    with Live(saying(ANSWER)) as live:
        got = live.client.chat.completions.create(model="tiny", messages=HI)
    message = got.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello → you", "hmm, ü")  # type: ignore[attr-defined]
    assert message.reasoning == message.reasoning_content  # type: ignore[attr-defined]
    assert got.choices[0].finish_reason == "stop"
    assert message.tool_calls is None
    assert got.usage is not None and got.usage.prompt_tokens == len(live.engine.submits[0].prompt_ids)
    assert got.usage.completion_tokens == len(turn(ANSWER))
    assert got.usage.completion_tokens_details.reasoning_tokens == len(turn("hmm, ü[TC]"))  # type: ignore[union-attr]
    assert got.usage.prompt_tokens_details.cached_tokens == 5  # type: ignore[union-attr]


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    with Live(saying(ANSWER)) as live:
        stream = live.client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        got = collect(stream)
    assert (got["content"], got["reasoning"], got["finish"]) == ("Hello → you", "hmm, ü", "stop")
    assert len(got["ids"]) == 1
    assert got["usage"].completion_tokens == len(turn(ANSWER))


def test_frames_look_as_clients_expect() -> None:
    with Live(saying(ANSWER)) as live:
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    decoded = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert decoded[0]["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    assert decoded[-2]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert decoded[-1]["choices"] == [] and decoded[-1]["usage"]["total_tokens"] > 0
    assert all("usage" not in frame for frame in decoded[:-1])
    assert {frame["object"] for frame in decoded} == {"chat.completion.chunk"}
    assert not any("<|" in frame for frame in frames)


def test_tool_calls_whole() -> None:
    history = [
        *HI,
        {
            "role": "assistant",
            "tool_calls": [{"id": "add:3", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "add:3", "content": "4"},
    ]
    with Live(saying(CALLS)) as live:
        got = live.client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    calls = got.choices[0].message.tool_calls
    assert calls is not None and got.choices[0].finish_reason == "tool_calls"
    # Numbered behind every id of the history, so that a trimmed conversation cannot repeat one.
    assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls] == [  # type: ignore[union-attr]
        ("add:4", "add", {"a": "1", "b": "x&y"}),
        ("sub:5", "sub", {}),
    ]
    assert got.choices[0].message.content == "Wait"


def test_tool_calls_stream_their_arguments_as_they_come() -> None:
    with Live(saying(CALLS)) as live:
        stream = live.client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True)
        pieces = []
        for chunk in stream:
            for piece in chunk.choices[0].delta.tool_calls or ():
                pieces.append((piece.index, piece.id, piece.function.arguments))  # type: ignore[union-attr]
            finish = chunk.choices[0].finish_reason
    assert finish == "tool_calls"
    first = [p for p in pieces if p[0] == 0]
    assert first[0] == (0, "add:0", "")
    assert all(id is None for _, id, _ in first[1:])
    assert len(first) > 4
    assert json.loads("".join(p[2] for p in first)) == {"a": "1", "b": "x&y"}
    assert json.loads("".join(p[2] for p in pieces if p[0] == 1)) == {}


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_that_nobody_asked_for_are_dropped(extra: dict[str, Any]) -> None:
    with Live(saying(CALLS)) as live:
        got = live.client.chat.completions.create(model="tiny", messages=HI, **extra)
        streamed = collect(live.client.chat.completions.create(model="tiny", messages=HI, stream=True, **extra))
    assert got.choices[0].message.tool_calls is None
    assert (got.choices[0].finish_reason, got.choices[0].message.content) == ("stop", "Wait")
    assert (streamed["calls"], streamed["finish"], streamed["content"]) == ({}, "stop", "Wait")


def test_several_choices() -> None:
    texts = ["a[TC][RO]one[RC][MC]", "b[TC][RO]two[RC][MC]"]
    engine = FakeEngine(lambda submit, choice: turn(texts[choice]))
    with Live(engine) as live:
        whole = live.client.chat.completions.create(model="tiny", messages=HI, n=2)
        streamed: dict[int, str] = {}
        for chunk in live.client.chat.completions.create(model="tiny", messages=HI, n=2, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [c.message.content for c in whole.choices] == ["one", "two"]
    assert streamed == {0: "one", 1: "two"}
    assert whole.usage is not None and whole.usage.completion_tokens == sum(len(turn(t)) for t in texts)
    assert whole.usage.prompt_tokens == len(engine.submits[0].prompt_ids)


def test_length_and_thinking_cut_short() -> None:
    with Live(saying(ANSWER)) as live:
        got = live.client.chat.completions.create(model="tiny", messages=HI, max_tokens=4)
    assert got.choices[0].finish_reason == "length"
    assert (got.choices[0].message.content, got.choices[0].message.reasoning_content) == ("", "hmm,")  # type: ignore[attr-defined]


def test_thinking_can_be_switched_off() -> None:
    with Live(saying("Hello[RC][MC]")) as live:
        got = live.client.chat.completions.create(
            model="tiny", messages=HI, extra_body={"thinking": {"type": "disabled"}}
        )
    assert got.choices[0].message.content == "Hello"
    assert not live.engine.submits[0].thinking


def test_logprobs_cover_every_token() -> None:
    with Live(saying(ANSWER)) as live:
        got = live.client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
        streamed = 0
        for chunk in live.client.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True):
            found = chunk.choices[0].logprobs
            streamed += len(found.content or ()) if found is not None else 0
    content = got.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and len(content) == streamed == len(turn(ANSWER))
    assert content[0].token == "h" and content[0].bytes == [104]
    assert content[0].top_logprobs[1].logprob == -9999.0


def test_sampling_fields_reach_the_engine() -> None:
    with Live(saying(ANSWER)) as live:
        live.client.chat.completions.create(
            model="tiny",
            messages=HI,
            temperature=0.5,
            seed=7,
            stop=["x", "y"],
            max_completion_tokens=9,
            logit_bias={"5": -1},
            extra_body={"top_k": 3, "min_p": 0.1, "priority": 2, "ignore_eos": True, "stop_token_ids": [9]},
        )
        live.client.chat.completions.create(model="tiny", messages=HI)
    first, second = live.engine.submits
    params = first.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.95, 3, 0.1)
    assert (params.seed, params.stop, params.max_tokens, params.stop_token_ids) == (7, ("x", "y"), 9, (9,))
    assert (params.logit_bias, params.ignore_eos, first.priority) == ({5: -1.0}, True, 2)
    assert first.stop_scope == "content"
    assert second.sampling.max_tokens == live.service.limits.context - len(second.prompt_ids)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"temperature": 200}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"n": 1000}, "n"),
        ({"stop": ["a"] * 2 + [str(i) for i in range(30)]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"thinkin": True}}, "chat_template_kwargs.thinkin"),
        ({"functions": []}, "functions"),
        ({"temprature": 1}, "temprature"),
        ({"store": True}, "store"),
        ({"stream_options": {"what": 1}}, "stream_options.what"),
        ({"separate_reasoning": False}, "separate_reasoning"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], param: str) -> None:
    with Live(saying(ANSWER)) as live:
        answer = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": HI, **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[-1] in error["message"] or param.split(".")[0] in error["message"]


def test_what_routers_and_sdks_add_is_taken() -> None:
    extra = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "service_tier": "auto",
        "store": False,
        "metadata": {"a": "b"},
        "user": "me",
        "stop": None,
        "tools": None,
    }
    with Live(saying(ANSWER)) as live:
        answer = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": HI, **extra})
    assert answer.status_code == 200, answer.text


def test_other_errors_have_openais_form() -> None:
    with Live(saying(ANSWER), max_body_mib=0.001) as live:
        url = f"{live.url}/v1/chat/completions"
        assert httpx.post(url, content=b"{").json()["error"]["message"].startswith("the body is not valid JSON")
        assert httpx.post(url, content=b"[1]").status_code == 400
        assert httpx.post(url, content=b'{"messages": [{"role":"user","content":"' + b"x" * 2000).status_code == 413
        assert httpx.post(url, json={"messages": HI, "model": "other"}).status_code == 404
        assert httpx.get(f"{live.url}/v1/nothing").json()["error"]["type"] == "not_found_error"
        assert httpx.get(url).status_code == 405
        with pytest.raises(openai.NotFoundError):
            live.client.models.retrieve("other")
        assert live.client.models.list().data[0].id == "tiny"


@pytest.mark.parametrize(
    ("refusal", "status"), [("queue_full", 429), ("draining", 503), ("too_long", 400), ("invalid", 400)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_rejection_is_a_status_not_a_stream(refusal: str, status: int, stream: bool) -> None:
    end = Output(rid="r", finish_reason="rejected", message="no room", refusal=refusal)
    with Live(FakeEngine(lambda s, c: [], end=end)) as live:
        answer = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": HI, "stream": stream})
    assert answer.status_code == status
    assert "no room" in answer.json()["error"]["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_an_error_in_mid_stream_is_an_event_and_no_end() -> None:
    engine = saying(ANSWER)

    async def broken(submit: Any, choice: int) -> Any:
        yield Output(rid=submit.rid, token_ids=tuple(turn("hmm")))
        yield Output(rid=submit.rid, finish_reason="error", message="a step failed")

    engine._choice = broken  # type: ignore[method-assign]
    with Live(engine) as live:
        text = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": HI, "stream": True}).text
        assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["message"] == "a step failed"
        assert "[DONE]" not in text
        with pytest.raises(openai.APIError, match="a step failed"):
            list(live.client.chat.completions.create(model="tiny", messages=HI, stream=True))
        answer = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": HI})
        assert answer.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    endless = TOKENIZER.encode_text("thinking and thinking " * 200)
    engine = FakeEngine(lambda s, c: endless, delay=0.005)
    with Live(engine) as live:
        with httpx.Client() as client:
            body = {"messages": HI, "stream": stream}
            try:
                with client.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=0.3) as answer:
                    for number, _ in enumerate(answer.iter_lines()):
                        if number > 3:
                            break
            except httpx.ReadTimeout:
                pass
        deadline = time.monotonic() + 5
        while (engine.open_requests() or live.service.open) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.open_requests() == ()
        assert live.service.open == 0
        metrics = httpx.get(f"{live.url}/metrics").text
    assert 'k3_requests_total{end="disconnect",endpoint="chat"} 1.0' in metrics
    assert "k3_requests_in_flight 0.0" in metrics
    assert 'k3_arena_blocks{kind="free"} 7.0' in metrics


def test_sixteen_streams_at_once_do_not_mix() -> None:
    def reply(submit: Any, choice: int) -> list[int]:
        number = TOKENIZER.decode(submit.prompt_ids).split("number ")[1].split("<")[0]
        return turn(f"{number}[TC][RO]{number * 20}[RC][MC]")

    with Live(FakeEngine(reply, delay=0.001)) as live:
        streams = [
            live.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": f"number {i:03d}"}], stream=True
            )
            for i in range(16)
        ]
        answers = [collect(stream) for stream in streams]
    assert [a["content"] for a in answers] == [f"{i:03d}" * 20 for i in range(16)]
    assert len({next(iter(a["ids"])) for a in answers}) == 16
