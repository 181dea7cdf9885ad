"""Structured output through the whole server: whatever a random network wants, the answer has the form asked for."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.cpu.served import Served, served

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "count", "parts"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "climate")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--model-path", "nano", "--arena-gib", "0.1") as running:
        yield running


def ask(server: Served, number: int = 0, **fields: Any) -> Any:
    extra = {"thinking": {"type": "disabled"}, "max_tokens": 900, "seed": number, **fields.pop("extra_body", {})}
    return server.client.chat.completions.create(
        model="nano", messages=[{"role": "user", "content": f"Go {number}"}], extra_body=extra, **fields
    )


def check(value: Any) -> None:
    assert set(value) == {"name", "size", "count", "parts"}
    assert len(value["name"]) <= 6 and value["size"] in ("small", "large") and 0 <= value["count"] <= 99
    assert len(value["parts"]) <= 3 and all(isinstance(part, bool) for part in value["parts"])


def test_answers_match_their_schema(server: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}

    def one(number: int) -> Any:
        return ask(server, number, response_format=form).choices[0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for choice in pool.map(one, range(8)):
            assert choice.finish_reason == "stop"
            check(json.loads(choice.message.content))


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(server: Served, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "climate"}}
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False}
    if stream:
        pieces = [c.choices[0] for c in ask(server, 1, stream=True, **fields)]
        calls = [piece for choice in pieces for piece in choice.delta.tool_calls or ()]
        name, arguments = calls[0].function.name, "".join(c.function.arguments for c in calls)
        finish = pieces[-1].finish_reason
    else:
        choice = ask(server, 1, **fields).choices[0]
        (call,) = choice.message.tool_calls
        name, arguments, finish = call.function.name, call.function.arguments, choice.finish_reason
    assert (name, finish) == ("climate", "tool_calls")
    found = json.loads(arguments)
    assert found["unit"] in ("C", "F") and 1 <= found["days"] <= 9


def test_regular_expressions_everywhere(server: Served) -> None:
    pattern = "[ab]{3}-[0-9]{2}"
    assert re.fullmatch(pattern, ask(server, extra_body={"regex": pattern}).choices[0].message.content)
    got = server.client.completions.create(model="nano", prompt="x", max_tokens=50, extra_body={"regex": pattern})
    assert re.fullmatch(pattern, got.choices[0].text)
    params = {"regex": pattern, "max_new_tokens": 50}
    native = httpx.post(f"{server.url}/generate", json={"text": "x", "sampling_params": params}, timeout=60).json()
    assert re.fullmatch(pattern, native["text"])
    params = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 900}
    native = httpx.post(f"{server.url}/generate", json={"text": "x", "sampling_params": params}, timeout=60).json()
    check(json.loads(native["text"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        {"extra_body": {"regex": "(?=a)b"}},
        {"extra_body": {"ebnf": "no grammar"}},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_what_cannot_be_enforced_is_refused(server: Served, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(server, **fields)
