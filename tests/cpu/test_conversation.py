"""Ten turns with a tool and preserved thinking through the clients that people use; each finds the last in the cache.

What the model says is its own affair: a call is forced in every turn. A turn is some hundred tokens, ten of them take
half a minute on a slow core, which is why both clients talk to the server at the same time.
"""

from __future__ import annotations

import concurrent.futures
import json
from dataclasses import dataclass, field
from typing import Any

import anthropic

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


@dataclass
class Talk:
    """What a client saw: counts of each turn's tokens, and how often the model thought and called."""

    prompts: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    thoughts: int = 0
    calls: int = 0

    def turn(self, prompt: int, cached: int, output: int) -> None:
        self.prompts.append(prompt)
        self.cached.append(cached)
        self.outputs.append(output)


def through_openais_client(server: Served) -> Talk:
    tool = {"name": "get_weather", "description": "Get the current weather for a city.", "parameters": PARAMETERS}
    tools: list[Any] = [{"type": "function", "function": tool}]
    messages: list[Any] = []
    talk = Talk()
    for city in CITIES:
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        got = server.client.chat.completions.create(
            model="nano", messages=messages, tools=tools, tool_choice=NAMED, max_tokens=LIMIT, temperature=0,
        )  # fmt: skip
        assert got.usage is not None and got.usage.prompt_tokens_details is not None
        talk.turn(
            got.usage.prompt_tokens, got.usage.prompt_tokens_details.cached_tokens or 0, got.usage.completion_tokens
        )
        message = got.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        talk.thoughts += bool(getattr(message, "reasoning_content", None))
        for call in message.tool_calls or ():
            assert set(json.loads(call.function.arguments)) == {"city"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
            talk.calls += 1
    return talk


def through_anthropics_client(server: Served) -> Talk:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "description": "Get the current weather for a city.", "input_schema": PARAMETERS}
    tools: list[Any] = [tool]
    messages: list[Any] = []
    talk = Talk()
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
        talk.turn(got.usage.input_tokens + reused, reused, got.usage.output_tokens)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in got.content]})
        for block in got.content:
            talk.thoughts += block.type == "thinking"
            if block.type == "tool_use":
                assert set(block.input) == {"city"}
                talk.calls += 1
    return talk


def check(talk: Talk) -> None:
    """From the second request on, all of the one before is cached but for less than a page, its answer included."""
    assert len(talk.prompts) == len(CITIES) and talk.thoughts and talk.calls
    for i in range(1, len(CITIES)):
        before = talk.prompts[i - 1] + talk.outputs[i - 1]
        assert talk.prompts[i] > talk.prompts[i - 1]
        assert before - PAGE < talk.cached[i] < talk.prompts[i], (i, talk)


def test_ten_turns_with_a_tool() -> None:
    with (
        served("--model-path", "nano", "--arena-gib", "0.2") as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        talks = [pool.submit(talk, server) for talk in (through_openais_client, through_anthropics_client)]
        for talk in talks:
            check(talk.result())
