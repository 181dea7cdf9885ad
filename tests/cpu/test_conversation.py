"""Ten turns with a tool and preserved thinking through the clients that people use; each finds the last in the cache.

What the model says is its own affair: a call is forced in every turn. A turn is some hundred tokens, which is why one
client's ten take seconds, and the other's are marked slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.cpu.served import Served, served

LIMIT = 160
"""Tokens of an answer. One that is cut in its thinking goes back as it is, as a client would send it."""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
CITIES = "Lisbon Oslo Rome Lima Paris Madrid Berlin Vienna Dublin Prague".split()
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
"""Unlike `required` it says nothing in the prompt, which so goes on word for word."""
RESULT = '{"temperature": 21, "sky": "clear"}'
PAGE = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--model-path", "nano", "--arena-gib", "0.2") as running:
        yield running


def check_reuse(prompts: list[int], cached: list[int], outputs: list[int]) -> None:
    """From the second request on, all of the one before is there but for less than a page, its answer included."""
    for i in range(1, len(prompts)):
        assert prompts[i] > prompts[i - 1]
        assert prompts[i - 1] - PAGE < cached[i] < prompts[i], (i, prompts, cached, outputs)


def test_ten_turns_with_openais_client(server: Served) -> None:
    tool = {"name": "get_weather", "description": "Get the current weather for a city.", "parameters": PARAMETERS}
    tools: list[Any] = [{"type": "function", "function": tool}]
    messages: list[Any] = []
    prompts, cached, outputs, calls, thought = [], [], [], 0, False
    for city in CITIES:
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        got = server.client.chat.completions.create(
            model="nano", messages=messages, tools=tools, tool_choice=NAMED, max_tokens=LIMIT, temperature=0,
        )  # fmt: skip
        assert got.usage is not None and got.usage.prompt_tokens_details is not None
        prompts.append(got.usage.prompt_tokens)
        cached.append(got.usage.prompt_tokens_details.cached_tokens or 0)
        outputs.append(got.usage.completion_tokens)
        message = got.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        thought = thought or bool(getattr(message, "reasoning_content", None))
        for call in message.tool_calls or ():
            assert set(json.loads(call.function.arguments)) == {"city"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
            calls += 1
    assert thought and calls
    check_reuse(prompts, cached, outputs)


@pytest.mark.slow
def test_ten_turns_with_anthropics_client(server: Served) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "description": "Get the current weather for a city.", "input_schema": PARAMETERS}
    tools: list[Any] = [tool]
    messages: list[Any] = []
    prompts, cached, outputs, calls, thought = [], [], [], 0, False
    for city in CITIES:
        results: list[Any] = []
        if messages:
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
                for block in messages[-1]["content"]
                if block["type"] == "tool_use"
            ]
        question = {"type": "text", "text": f"What is the weather in {city} now?"}
        messages.append({"role": "user", "content": [*results, question]})
        got = client.messages.create(
            model="nano", messages=messages, tools=tools, max_tokens=LIMIT, extra_body={"temperature": 0},
            tool_choice={"type": "tool", "name": "get_weather"}, thinking={"type": "adaptive"},
        )  # fmt: skip
        reused = got.usage.cache_read_input_tokens or 0
        prompts.append(got.usage.input_tokens + reused)
        cached.append(reused)
        outputs.append(got.usage.output_tokens)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in got.content]})
        for block in got.content:
            thought = thought or block.type == "thinking"
            if block.type == "tool_use":
                assert set(block.input) == {"city"}
                calls += 1
    assert thought and calls
    check_reuse(prompts, cached, outputs)
