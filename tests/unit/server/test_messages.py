"""/v1/messages with Anthropic's client: answers, streams, tools, thinking, errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from k3stack.engine.messages import Output
from tests.unit.server.harness import TOKENIZER, FakeEngine, Live, call, saying, turn

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]
THINK: Any = {"type": "enabled", "budget_tokens": 2048}
ANSWER = "hmm, ü[TC][RO]Hello → you[RC][MC]"
CALLS = f"so[TC][RO]Wait[RC][TO]{call('add', a='1', b='x')}{call('add', 2)}[TZ][MC]"


def client(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def test_a_whole_answer_with_thinking() -> None:
    with Live(saying(ANSWER)) as live:
        got = client(live).messages.create(model="tiny", messages=HI, max_tokens=100, thinking=THINK, system="Be brief")
    thinking, text = got.content
    assert thinking.type == "thinking" and thinking.thinking == "hmm, ü"
    assert text.type == "text" and text.text == "Hello → you"
    assert got.stop_reason == "end_turn"
    prompt = live.engine.submits[0].prompt_ids
    assert (got.usage.cache_read_input_tokens, got.usage.input_tokens) == (5, len(prompt) - 5)
    assert got.usage.output_tokens == len(turn(ANSWER))
    shown = TOKENIZER.decode(prompt)
    assert 'role="system"<|sep|>Be brief<|close|>' in shown and "thinking-effort" in shown


def test_without_the_field_it_does_not_think() -> None:
    with Live(saying("Hello[RC][MC]")) as live:
        got = client(live).messages.create(model="tiny", messages=HI, max_tokens=100)
    assert [block.type for block in got.content] == ["text"]
    assert not live.engine.submits[0].thinking


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    with Live(saying(CALLS)) as live:
        ask: Any = {"model": "tiny", "messages": HI, "max_tokens": 300, "thinking": THINK, "tools": TOOLS}
        whole = client(live).messages.create(**ask)
        with client(live).messages.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    simple = [[block.model_dump(exclude={"id"}) for block in message.content] for message in (whole, streamed)]
    assert simple[0] == simple[1]
    assert whole.content[2].input == {"a": "1", "b": "x"}  # type: ignore[union-attr]
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds.count("input_json") > 3


def test_events_have_their_order() -> None:
    with Live(saying(ANSWER)) as live:
        body = {"messages": HI, "max_tokens": 50, "stream": True, "thinking": {"type": "adaptive"}}
        text = httpx.post(f"{live.url}/v1/messages", json=body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event")]
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [d["type"] for d in data] == names
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert [d["index"] for d in data if d["type"] == "content_block_start"] == [0, 1]
    assert "<|" not in text


def test_a_conversation_with_tools_becomes_the_chat_that_it_means() -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "2+2?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Need add.", "signature": ""},
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"x": 2}},
                {"type": "tool_use", "id": "toolu_2", "name": "sub", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "no"}]},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    chat = [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Need add.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":2}'}},
                {"id": "b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Error: 4"},
        {"role": "tool", "tool_call_id": "b", "content": "no"},
        {"role": "user", "content": "And?"},
    ]
    with Live(saying(ANSWER)) as live:
        count = client(live).messages.count_tokens(model="tiny", messages=messages, tools=TOOLS, thinking=THINK)
        client(live).messages.create(model="tiny", messages=messages, tools=TOOLS, thinking=THINK, max_tokens=9)
        function = {"name": "add", "description": "adds", "parameters": TOOLS[0]["input_schema"]}
        live.client.chat.completions.create(
            model="tiny",
            messages=chat,
            tools=[{"type": "function", "function": function}],
            reasoning_effort="low",
        )
    ours, theirs = live.engine.submits
    assert ours.prompt_ids == theirs.prompt_ids
    assert count.input_tokens == len(ours.prompt_ids)


def test_stops_and_choices() -> None:
    with Live(saying(CALLS)) as live:
        cut = client(live).messages.create(model="tiny", messages=HI, max_tokens=2, thinking=THINK)
        assert (cut.stop_reason, [block.type for block in cut.content]) == ("max_tokens", ["thinking"])
        choice: Any = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
        client(live).messages.create(
            model="tiny", messages=HI, max_tokens=9, tools=TOOLS, tool_choice=choice, stop_sequences=["x"]
        )
        assert live.engine.submits[1].sampling.stop == ("x",)
        assert live.engine.submits[1].grammar is not None
    end = Output(rid="r", finish_reason="stop", matched_stop="END")
    with Live(FakeEngine(lambda s, c: [], end=end)) as live:
        got = client(live).messages.create(model="tiny", messages=HI, max_tokens=9, stop_sequences=["END"])
        assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", "END")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"format": {}}}, "output_config.format"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"top_p": 7}, "top_p"),
    ],
)
def test_errors_have_anthropics_form(change: dict[str, Any], says: str) -> None:
    with Live(saying(ANSWER)) as live:
        answer = httpx.post(f"{live.url}/v1/messages", json={"messages": HI, "max_tokens": 9, **change})
        assert answer.status_code == 400
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert says in body["error"]["message"]


def test_other_statuses_and_broken_streams() -> None:
    engine = saying(ANSWER)
    with Live(engine, api_key=("k",)) as live:
        with pytest.raises(anthropic.AuthenticationError):
            client(live).messages.create(model="tiny", messages=HI, max_tokens=9)
        with pytest.raises(anthropic.NotFoundError):
            anthropic.Anthropic(base_url=live.url, api_key="k").messages.create(
                model="other", messages=HI, max_tokens=9
            )

    async def broken(submit: Any, choice: int) -> Any:
        yield Output(rid=submit.rid, token_ids=tuple(turn("hmm")))
        yield Output(rid=submit.rid, finish_reason="error", message="a step failed")

    engine._choice = broken  # type: ignore[method-assign]
    with Live(engine) as live, pytest.raises(anthropic.APIError, match="a step failed"):
        list(client(live).messages.create(model="tiny", messages=HI, max_tokens=9, stream=True, thinking=THINK))
