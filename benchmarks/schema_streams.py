"""Answers under random JSON schemas, many streams at a time: each must end by itself and validate.

    python benchmarks/schema_streams.py                                  starts a server on the built-in model
    python benchmarks/schema_streams.py --base-url http://127.0.0.1:30000 --requests 640 --concurrency 64

Half of the answers come by response_format, half as arguments of a forced strict tool; some think first. Prints a
summary as JSON with the server's step times; exit status 1 unless every answer was whole, ended in `stop` or
`tool_calls`, and validated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

Json = Any
WORDS = "red green blue small large north south first last state page block".split()
PATTERNS = ["^[a-f]{2,6}$", "^(yes|no){1,3}$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]{1,5}$"]
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def leaf(rng: random.Random) -> Json:
    """A schema without parts, all of whose values are short."""
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randrange(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 5},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"enum": rng.sample(WORDS, 3)},
            {"enum": [1, "one", None, True]},
            {"const": rng.choice(WORDS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 9, 5_000))},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 20, "multipleOf": 5},
            {"type": ["boolean", "null"]},
            {"type": "boolean"},
        ]
    )  # fmt: skip


def schema(rng: random.Random, depth: int = 3) -> Json:
    """A random schema whose values are all of bounded length."""
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return leaf(rng)
    if kind < 0.5:
        low = rng.randrange(3)
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind < 0.6:
        return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}
    return tuple_of(rng, depth) if kind < 0.65 else obj(rng, depth)


def tuple_of(rng: random.Random, depth: int) -> Json:
    """A list with a schema for each place."""
    parts = [schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def obj(rng: random.Random, depth: int) -> Json:
    """An object, some of whose members may be left out; now and then a part stands among the definitions."""
    names = rng.sample([*WORDS, 'quo"te', "größe", "$ref", "two words"], rng.randrange(1, 5))
    properties = {name: schema(rng, depth - 1) for name in names}
    found = {
        "type": "object",
        "properties": properties,
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }
    return found


def with_reference(rng: random.Random, depth: int) -> Json:
    """An object with a definition that is used twice."""
    whole = obj(rng, depth)
    whole["$defs"] = {"part": schema(rng, 1)}
    whole["properties"] |= {"left": {"$ref": "#/$defs/part"}, "right": {"$ref": "#/$defs/part"}}
    return whole


def request(rng: random.Random, number: int) -> tuple[dict[str, Any], Json]:
    """A streaming chat, and the schema that its answer must obey."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Describe item {number}."}], "stream": True, "seed": number,
        "temperature": rng.choice((0.0, 1.0)), "thinking": {"type": "disabled"},
    }  # fmt: skip
    wanted = with_reference(rng, 2) if rng.random() < 0.2 else obj(rng, 3)
    if rng.random() < 0.5:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "item", "schema": wanted}}
    else:
        tool = {"name": "describe", "description": "Takes it down", "strict": True, "parameters": wanted}
        body |= {"tools": [{"type": "function", "function": tool}], "parallel_tool_calls": False}
        body["tool_choice"] = (
            "required" if rng.random() < 0.5 else {"type": "function", "function": {"name": "describe"}}
        )
    return body, wanted


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str | None]:
    """The JSON text that was streamed, and the finish_reason."""
    text, finish, done = "", None, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return (await response.aread()).decode()[:500], str(response.status_code)
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                frame = json.loads(line[6:])
                if "error" in frame:
                    return str(frame["error"]), "error"
                choice = frame["choices"][0]
                finish = choice["finish_reason"] or finish
                if "response_format" in body:
                    text += choice["delta"].get("content") or ""
                else:
                    for call in choice["delta"].get("tool_calls") or ():
                        text += call["function"].get("arguments") or ""
    return text, finish if done else "cut"


def problem(text: str, finish: str | None, body: dict[str, Any], wanted: Json) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if finish != ("stop" if "response_format" in body else "tool_calls"):
        return f"ended in {finish}: {text[:300]}"
    try:
        jsonschema.Draft202012Validator(wanted, format_checker=CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as e:
        return f"{text[:300]}: {str(e)[:300]}"
    return None


async def run(base_url: str, requests: int, concurrency: int, seed: int) -> dict[str, Any]:
    """All answers, ``concurrency`` at a time."""
    numbers = iter(range(requests))
    wrong: list[dict[str, Any]] = []
    ends: Counter[str] = Counter()
    characters = 0
    limits = httpx.Limits(max_connections=concurrency)

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal characters
        for number in numbers:
            body, wanted = request(random.Random(f"{seed}-{number}"), number)
            text, finish = await answer(client, body)
            ends[str(finish)] += 1
            if ends.total() % 32 == 0:
                print(f"{ends.total()} answers after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            characters += len(text)
            if found := problem(text, finish, body, wanted):
                wrong.append({"number": number, "what": found, "schema": wanted})
                print(f"answer {number}: {found}", file=sys.stderr, flush=True)

    began = time.monotonic()
    async with httpx.AsyncClient(base_url=base_url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(concurrency)))
        steps = {
            name: float(value)
            for name, value in re.findall(r"^(k3_step_\S+) (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
        }
    return {
        "requests": requests, "concurrency": concurrency, "seed": seed, "seconds": round(time.monotonic() - began, 1),
        "ends": dict(ends), "characters": characters, "steps": steps, "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from benchmarks.fuzz_chat import serve

    process, url = (None, args.base_url) if args.base_url else serve("--arena-gib", "0.5", "--context-length", "4096")
    try:
        found = asyncio.run(run(url, args.requests, args.concurrency, args.seed))
    finally:
        if process is not None:
            process.terminate()
            process.wait(90)
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
