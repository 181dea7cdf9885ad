"""Valid bodies for the API's endpoints, and random mutations of them, for ``fuzz_chat.py``.

A mutation changes the JSON tree (members dropped, renamed, doubled, replaced by odd values), the text in it (control
markers, surrogates, sheer length) or the bytes of the body (cut, flipped, not UTF-8).
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Json = Any

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Looks it up", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {"id": "get_weather:0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
USER = {"role": "user", "content": "Hello"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Rome?"}]},
    {"role": "assistant", "content": "", "reasoning_content": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "get_weather:0", "content": "rain"},
    {"role": "assistant", "content": "It rains.", "reasoning_content": "Easy."},
    {"role": "user", "content": "And tomorrow?", "name": "ann"},
]
SHAPES = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2, "x"]}, "maxItems": 3}}}

CHATS: list[Json] = [
    {"messages": [USER]},
    {"messages": CONVERSATION, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
    {"messages": [USER], "tools": TOOLS, "tool_choice": "required"},
    {"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
    {"messages": [USER], "response_format": {"type": "json_object"}, "thinking": False},
    {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SHAPES, "strict": True}},
    },
    {"messages": [USER], "logprobs": True, "top_logprobs": 3, "n": 2, "seed": 7},
    {"messages": [USER], "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True},
    {
        "messages": [USER], "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 2, "77": -100}, "stop": ["x", "yz"],
        "stop_token_ids": [3], "min_tokens": 2, "ignore_eos": True, "priority": 1,
    },
    {"messages": [USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True},
    {"messages": [USER], "reasoning_effort": "high", "chat_template_kwargs": {"thinking": True}, "metadata": {"k": ""}},
]  # fmt: skip
SEEDS: dict[str, list[Json]] = {
    "/v1/chat/completions": CHATS,
    "/v1/completions": [
        {"prompt": "Once upon"},
        {"prompt": ["a", "b"], "echo": True, "logprobs": 2},
        {"prompt": [1, 2, 3], "stop": "q", "n": 2, "seed": 1},
        {"prompt": [[1, 2], [3]], "stream_options": {"include_usage": True}, "stream": True},
    ],
    "/generate": [
        {"text": "Once upon", "sampling_params": {"temperature": 0.5, "stop": ["x"]}},
        {"input_ids": [[1, 2, 3], [4]], "sampling_params": [{"top_k": 3}, {"n": 2}], "return_logprob": True},
        {"text": ["a", "b"], "rid": ["r1", "r2"], "stream": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        {"text": "json:", "sampling_params": {"json_schema": json.dumps(SHAPES)}},
    ],
    "/v1/messages": [
        {"model": "default", "messages": [USER]},
        {
            "model": "default", "system": [{"type": "text", "text": "Be brief."}], "messages": [USER], "stream": True,
            "tools": [{"name": "get_weather", "description": "d", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        {
            "model": "default",
            "messages": [
                USER,
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "get_weather:0", "name": "get_weather", "input": {"city": "Rome"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "get_weather:0", "content": "rain"},
                ]},
            ],
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}], "stop_sequences": ["x"],
        },
    ],
    "/v1/messages/count_tokens": [{"model": "default", "messages": CONVERSATION[:2]}],
    "/tokenize": [{"prompt": "Hello"}, {"messages": CONVERSATION, "tools": TOOLS}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/abort_request": [{"rid": "nobody"}],
}  # fmt: skip
"""Bodies by endpoint. Those that generate get a small limit on their output from ``bounded``."""

LIMIT_FIELDS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/generate": "max_new_tokens",
}

MARKERS = [
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "[EOS]", "[EOT]", "<|open|>think<|sep|>",
    '<|open|>call tool="x" index="1"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>", "<|media_pad|>",
]  # fmt: skip
ODD_TEXTS = [
    "", " ", "\0", "a\0b", "\ud800", "\udfff\ud800", "é", "e\u0301", "😀" * 40, "\u202e", "\ufeff", "x" * 5_000,
    "{" * 300, '"', "\\", "\r\n\r\n", "../../etc/passwd", "%s%n", "${x}", "null", "NaN", "0", "-1", "1e999",
    "(a+)+$", "(?<=x)y", "[", "\\d{1,100000}", "root ::= root", "root ::= (", "$ref", "#/$defs/x", *MARKERS,
]  # fmt: skip
ODD_VALUES: list[Json] = [
    None, True, False, 0, -1, 1, 2, 17, 129, 10**6, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30,
    0.5, -0.0, 1e-300, 1e308, -1e308, 1.0, [], {}, [[]], [None], {"": None}, [1, "a", None, {}], {"type": "object"},
    {"$ref": "#"}, {"type": "string", "pattern": "(a+)+$"}, {"anyOf": []}, {"not": {}}, {"enum": []}, {"const": None},
    {"role": "user", "content": "x"}, {"role": "tool", "content": "x"}, {"role": "assistant"}, {"type": "image_url"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, *ODD_TEXTS,
]  # fmt: skip
FIELDS = (
    "messages model stream stream_options n temperature top_p top_k min_p stop stop_token_ids seed logit_bias logprobs "
    "top_logprobs tools tool_choice parallel_tool_calls response_format max_tokens max_completion_tokens min_tokens "
    "ignore_eos priority rid user metadata reasoning_effort thinking chat_template_kwargs continue_final_message regex "
    "ebnf echo prompt text input_ids sampling_params return_logprob logprob_start_len cache_salt bootstrap_room role "
    "content name tool_calls tool_call_id reasoning_content type function arguments parameters id index partial strict "
    "store service_tier modalities lora_path image_data system stop_sequences input_schema"
).split()


def nested(rng: random.Random) -> Json:
    """Something deep: lists, members or schemas in one another."""
    depth = rng.choice((30, 90, 200, 600))
    value: Json = rng.choice(ODD_VALUES[:20])
    kind = rng.randrange(3)
    for _ in range(depth):
        value = [value] if kind == 0 else {"a": value} if kind == 1 else {"type": "object", "properties": {"a": value}}
    return value


def odd(rng: random.Random) -> Json:
    """An odd value."""
    return nested(rng) if rng.random() < 0.05 else copy.deepcopy(rng.choice(ODD_VALUES))


def places(tree: Json, depth: int = 20) -> Iterator[tuple[Json, Any]]:
    """Every (container, key) of a tree, down to a depth."""
    if not depth:
        return
    found = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(found):
        yield tree, key
        yield from places(value, depth - 1)


def _replace(rng: random.Random, at: Json, key: Any) -> None:
    at[key] = odd(rng)


def _delete(rng: random.Random, at: Json, key: Any) -> None:
    del at[key]


def _double(rng: random.Random, at: Json, key: Any) -> None:
    if isinstance(at, list):
        at[key:key] = [copy.deepcopy(at[key])] * rng.choice((1, 1, 2, 40))
    else:
        at[rng.choice(FIELDS)] = copy.deepcopy(at[key])


def _rename(rng: random.Random, at: Json, key: Any) -> None:
    if isinstance(at, dict):
        at[rng.choice((key.upper(), key[:-1], key + "s", rng.choice(FIELDS), rng.choice(ODD_TEXTS)))] = at.pop(key)
    else:
        rng.shuffle(at)


def _insert(rng: random.Random, at: Json, key: Any) -> None:
    if isinstance(at, dict):
        at[rng.choice(FIELDS)] = odd(rng)
    else:
        at.insert(key, odd(rng))


def _retype(rng: random.Random, at: Json, key: Any) -> None:
    value = at[key]
    at[key] = rng.choice([[value], {"value": value}, str(value), json.dumps(value), bool(value)])


def _text(rng: random.Random, at: Json, key: Any) -> None:
    value = at[key]
    if not isinstance(value, str):
        at[key] = rng.choice(ODD_TEXTS)
        return
    cut = rng.randrange(len(value) + 1)
    at[key] = value[:cut] + rng.choice(ODD_TEXTS) + value[cut:]


def _number(rng: random.Random, at: Json, key: Any) -> None:
    value = at[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        at[key] = rng.choice([-value, value + 1, value * 1000, value / 3, value - 1, float(value)])
    else:
        at[key] = rng.choice([-1, 0, 1, 0.5, 2**31])


def _role(rng: random.Random, at: Json, key: Any) -> None:
    target = at[key] if isinstance(at[key], dict) else at
    if isinstance(target, dict):
        target["role"] = rng.choice(["system", "user", "assistant", "tool", "developer", "function", "", "User"])


CHANGES: tuple[Callable[[random.Random, Json, Any], None], ...] = (
    _replace, _replace, _delete, _double, _rename, _insert, _retype, _text, _text, _number, _role,
)  # fmt: skip


def mutate(rng: random.Random, body: Json) -> Json:
    """A changed copy of ``body``: none to three changes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        options = list(places(body))
        if not options:
            break
        at, key = rng.choice(options)
        rng.choice(CHANGES)(rng, at, key)
    return body


def bounded(rng: random.Random, path: str, body: Json) -> Json:
    """``body`` with a small limit on its output (else a valid one could run to the end of the context) and, for some,
    streaming."""
    name = LIMIT_FIELDS.get(path)
    if name is None or not isinstance(body, dict):
        return body
    params = body.setdefault("sampling_params", {}) if path == "/generate" else body
    for each in params if isinstance(params, list) else [params]:
        if isinstance(each, dict):
            # Now and then none at all where an answer is short by itself, or an odd one.
            each[name] = rng.choice((1, 2, 4, 8, 16)) if rng.random() < 0.95 else rng.choice((0, -1, 2**31, "8", 1.5))
    if rng.random() < 0.4:
        body["stream"] = True
    return body


def as_bytes(rng: random.Random, body: Json) -> bytes:
    """The body as sent: mostly JSON, sometimes broken."""
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5, allow_nan=True).encode("utf-8", "surrogatepass")
    if rng.random() < 0.9 or not data:
        return data
    at = rng.randrange(len(data))
    broken = [
        data[:at],
        data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        data[:at] + b"\xff\xfe" + data[at:],
        data + b"}",
        b"\xef\xbb\xbf" + data,
        data.decode("utf-8", "replace").encode("utf-16"),
        b"[" * 100_000,
        b"",
        b'{"messages":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5_000 + b"}",
    ]
    return rng.choice(broken)


def request(rng: random.Random, paths: list[str]) -> tuple[str, bytes]:
    """A path and a body; chats come most often."""
    path = "/v1/chat/completions" if rng.random() < 0.6 else rng.choice(paths)
    return path, as_bytes(rng, bounded(rng, path, mutate(rng, rng.choice(SEEDS[path]))))
