"""The output parser: public malformed outputs, the behaviour table, any cut gives the same result."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3stack.chat import (
    Collector,
    Content,
    OutputParser,
    Parsed,
    Reasoning,
    StreamingTextParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallEnd,
    ToolCallStart,
    encode,
    parse_ids,
    parse_output,
    render,
)
from k3stack.chat.machine import MAX_HEAD
from k3stack.chat.prompt import NO_EFFORT

from .conftest import DATA

CASES = [c for c in json.loads((DATA / "parser_cases.json").read_text())["cases"] if "expect_parsed" in c]

TC, RO, RC = "<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>"
TO, TZ, MC = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|close|>message<|sep|>"
THINK, END = "<|open|>think<|sep|>", "<|end_of_msg|>"
AZ, CZ = "<|close|>argument<|sep|>", "<|close|>call<|sep|>"


def arg(key: str, text: str, kind: str | None = "string") -> str:
    typed = f' type="{kind}"' if kind else ""
    return f'<|open|>argument key="{key}"{typed}<|sep|>{text}{AZ}'


def call(name: str, *args: str) -> str:
    return f"{begin(name)}{''.join(args)}{CZ}"


def begin(name: str) -> str:
    return f'<|open|>call tool="{name}" index="1"<|sep|>'


def value(key: str, kind: str = "string") -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>'


def turn(*parts: str) -> str:
    """An output that thinks "r" and has one tools block."""
    return f"r{TC}{TO}{''.join(parts)}{TZ}{MC}"


NAMELESS = f'<|open|>call index="1"<|sep|>{arg("a", "1")}{CZ}'
KEYLESS = f'<|open|>argument type="string"<|sep|>x{AZ}'
JSON_BLOCK = '<|open|>json type="object"<|sep|>{"a": [1]}<|close|>json<|sep|>'
NO_JSON = "<|open|>json<|sep|>oops<|close|>json<|sep|>"


def stream_text(pieces: Sequence[str], **options: Any) -> Parsed:
    parser, collector = StreamingTextParser(**options), Collector()
    for piece in pieces:
        collector.add(parser.feed(piece))
    collector.add(parser.finish())
    return collector.result(parser.finish_reason)


def stream_ids(pieces: Sequence[Sequence[int]], tokenizer: Tokenizer, **options: Any) -> Parsed:
    parser, collector = OutputParser(tokenizer, **options), Collector()
    for piece in pieces:
        collector.add(parser.feed(piece))
    collector.add(parser.finish())
    return collector.result(parser.finish_reason)


def chunks(whole: Any, size: int) -> list[Any]:
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def summary(parsed: Parsed) -> tuple[str, str, list[tuple[str, Any]]]:
    return parsed.reasoning, parsed.content, [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls]


# -- public cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_public_case(case: dict[str, Any], tokenizer: Tokenizer) -> None:
    text = case["model_output"]
    whole = parse_output(text)
    shown = {
        "reasoning": whole.reasoning,
        "content": whole.content,
        "tool_calls": [{"name": c.name, "arguments": json.loads(c.arguments)} for c in whole.tool_calls],
        "finish_reason": whole.finish_reason,
    }
    assert shown == case["expect_parsed"]
    for i in range(len(text) + 1):
        assert stream_text([text[:i], text[i:]]) == whole
    ids = tokenizer.encode_marked(text)
    assert parse_ids(ids, tokenizer) == whole
    for i in range(len(ids) + 1):
        assert stream_ids([ids[:i], ids[i:]], tokenizer) == whole
    for size in (1, 2, 3, 7):
        assert stream_text(chunks(text, size)) == whole
        assert stream_ids(chunks(ids, size), tokenizer) == whole


# -- the behaviour table ------------------------------------------------------------------------------------------

TABLE: list[tuple[str, str, tuple[str, str, list[tuple[str, Any]]]]] = [
    ("well-formed", f"hmm{TC}{RO}Hi{RC}{MC}", ("hmm", "Hi", [])),
    ("no think close, tools", f"hmm{TO}{call('f')}{TZ}{MC}", ("hmm", "", [("f", {})])),
    ("no think close, response", f"hmm{RO}Hi{RC}{MC}", ("hmm", "Hi", [])),
    ("think skipped", f"Answer{RC}{MC}", ("", "Answer", [])),
    ("think skipped, tools", f"prose{RC}{TO}{call('f')}{TZ}{MC}", ("", "prose", [("f", {})])),
    ("no separator", f"hmm<|close|>think{RO}Hi{RC}{MC}", ("hmm", "Hi", [])),
    ("no response close", f"r{TC}{RO}Hello{MC}", ("r", "Hello", [])),
    ("unnamed close of the answer", f"r{TC}{RO}hi<|close|><|sep|>{MC}", ("r", "hi", [])),
    ("unnamed close, nothing else", f"hi<|close|><|sep|>{MC}", ("", "hi", [])),
    ("unnamed close of thinking", f"r<|close|><|sep|>{RO}hi{RC}{MC}", ("r", "hi", [])),
    ("cut in thinking", "hmm still", ("hmm still", "", [])),
    ("cut in the think close", "hmm<|close|>think", ("hmm", "", [])),
    ("cut in an argument", f"r{TC}{RO}x{RC}{TO}{begin('f')}{value('a')}par", ("r", "x", [])),
    (
        "call after the tools close",
        f"r{TC}{RO}x{RC}{TO}{call('f')}{TZ}{call('g', arg('a', '1'))}{MC}",
        ("r", "x", [("f", {})]),
    ),
    ("two tools blocks", f"r{TC}{RO}{RC}{TO}{call('f')}{TZ}{TO}{call('g')}{TZ}{MC}", ("r", "", [("f", {}), ("g", {})])),
    ("duplicate key", turn(call("f", arg("a", "1"), arg("a", "2"))), ("r", "", [("f", {"a": "2"})])),
    ("json block", turn(call("f", JSON_BLOCK)), ("r", "", [("f", {"a": [1]})])),
    ("json block without json", turn(call("f", NO_JSON)), ("r", "", [("f", {"json": "oops"})])),
    (
        "NaN",
        turn(call("f", arg("a", "NaN", "number"), arg("b", "1e999", "number"))),
        ("r", "", [("f", {"a": "NaN", "b": "1e999"})]),
    ),
    ("bad json", turn(call("f", arg("a", "{oops", "object"))), ("r", "", [("f", {"a": "{oops"})])),
    ("no tool name", turn(NAMELESS, call("g")), ("r", "", [("g", {})])),
    ("unknown type", turn(call("f", arg("a", "3", "integer"))), ("r", "", [("f", {"a": 3})])),
    ("no type", turn(call("f", arg("a", "3", None))), ("r", "", [("f", {"a": "3"})])),
    (
        "escapes in attributes only",
        turn(call("f&amp;g", arg("a&quot;", "&amp;"))),
        ("r", "", [("f&g", {'a"': "&amp;"})]),
    ),
    ("text after the response", f"r{TC}{RO}Hi{RC} trailing\n{MC}", ("r", "Hi trailing", [])),
    ("two responses", f"r{TC}{RO}A{RC}{RO}B{RC}{MC}", ("r", "AB", [])),
    ("thinking reopened", f"r{TC}{RO}A{RC}{THINK}s{TC}{RO}B{RC}{MC}", ("rs", "AB", [])),
    ("lone brackets", f"r{TC}{RO}a < b <| c <|open d{RC}{MC}", ("r", "a < b <| c <|open d", [])),
    ("blanks kept", f"r{TC}{RO}\n Hi \n{RC}{MC}", ("r", "\n Hi \n", [])),
    ("blanks between blocks", f"r{TC}\n\n{RO}Hi{RC}\n{TO}\n{call('f')}\n{TZ}{MC}", ("r", "Hi", [("f", {})])),
    ("blanks inside marks", f"r<|close|> think <|sep|><|open|> response <|sep|>Hi{RC}", ("r", "Hi", [])),
    (
        "types",
        turn(
            call(
                "f",
                arg("n", "1.50", "number"),
                arg("b", "true", "boolean"),
                arg("z", "null", "null"),
                arg("o", "{}", "object"),
            )
        ),
        ("r", "", [("f", {"n": 1.5, "b": True, "z": None, "o": {}})]),
    ),
    ("unfinished call, then tools close", turn(call("f"), begin("g"), arg("a", "1")), ("r", "", [("f", {})])),
    ("unfinished call, then another", turn(begin("g"), arg("a", "1"), call("f")), ("r", "", [("f", {})])),
    (
        "argument close left out",
        turn(call("f", value("a") + "x", arg("b", "y"))),
        ("r", "", [("f", {"a": "x", "b": "y"})]),
    ),
    ("call close ends the value", turn(begin("f"), value("a", "number"), "7", CZ), ("r", "", [("f", {"a": 7})])),
    ("argument without key", turn(call("f", KEYLESS, arg("b", "y"))), ("r", "", [("f", {"b": "y"})])),
    ("tools open left out", f"r{TC}{RO}x{RC}{call('f', arg('a', '1'))}{TZ}{MC}", ("r", "x", [("f", {"a": "1"})])),
    ("response inside tools", f"r{TC}{TO}{begin('f')}{RO}Hi{RC}{MC}", ("r", "Hi", [])),
    ("unknown tag", f'r{TC}{RO}a<|open|>table x="1"<|sep|>b<|close|>table<|sep|>c{RC}{MC}', ("r", "abc", [])),
    ("text after the message", f'r{TC}{RO}a{RC}{MC}{END}<|open|>message role="user"<|sep|>more', ("r", "amore", [])),
    ("end id only", f"r{TC}{RO}a{END}", ("r", "a", [])),
    ("separator alone", f"r{TC}{RO}a<|sep|>b{RC}{MC}", ("r", "ab", [])),
    ("end inside thinking", f"hmm{MC}", ("hmm", "", [])),
    ("empty", "", ("", "", [])),
]


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
@pytest.mark.parametrize(("name", "text", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_table(
    name: str, text: str, expected: tuple[str, str, list[tuple[str, Any]]], size: int, tokenizer: Tokenizer
) -> None:
    assert summary(stream_text(chunks(text, size))) == expected
    assert summary(stream_ids(chunks(tokenizer.encode_marked(text), size), tokenizer)) == expected


def test_typed_markers_are_text(tokenizer: Tokenizer) -> None:
    """Ordinary pieces that read like tags: in a string argument, in the answer, in thinking."""
    typed = f"a{AZ}{CZ}{TO}{MC}b"
    text = tokenizer.encode_text(typed)
    ids = [*text, *tokenizer.encode_marked(f"{TC}{RO}"), *text, *tokenizer.encode_marked(RC + TO)]
    head = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>'
    tail = f"{AZ}{CZ}{TZ}{MC}"
    ids += [*tokenizer.encode_marked(head), *text, *tokenizer.encode_marked(tail)]
    for size in (1, 3, len(ids)):
        parsed = stream_ids(chunks(ids, size), tokenizer)
        assert summary(parsed) == (typed, typed, [("f", {"a": typed})])


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (f"r{TC}{RO}a{RC}{MC}", None, "stop"),
        (f"r{TC}{TO}{call('f')}{TZ}{MC}", None, "tool_calls"),
        (f"r{TC}{TO}{call('f')}{TZ}", None, "length"),
        (f"r{TC}{TO}{call('f')}{TZ}", "stop", "tool_calls"),
        (f"r{TC}{TO}{call('f')}{TZ}", "length", "length"),
        (f"r{TC}{RO}a", "stop", "stop"),
        (f"r{TC}{RO}a", "abort", "abort"),
    ],
)
def test_finish_reason(text: str, reason: str | None, expected: str) -> None:
    parser = StreamingTextParser()
    parser.feed(text)
    parser.finish(reason)
    assert parser.finish_reason == expected


# -- streaming ----------------------------------------------------------------------------------------------------


def deltas(text: str, **options: Any) -> list[Any]:
    """Deltas of ``text`` fed character by character, text of equal kind joined."""
    parser = StreamingTextParser(**options)
    found = [d for c in text for d in parser.feed(c)] + parser.finish()
    joined: list[Any] = []
    for delta in found:
        last = joined[-1] if joined else None
        if type(last) is type(delta) and isinstance(delta, (Reasoning, Content)):
            joined[-1] = type(delta)(last.text + delta.text)
        elif isinstance(last, ToolCallArguments) and isinstance(delta, ToolCallArguments):
            joined[-1] = ToolCallArguments(delta.index, last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def test_order_of_deltas() -> None:
    first = call("f", arg("s", 'é"'), arg("n", "2", "number"))
    text = f"r{TC}{RO}Hi{RC}{TO}{first}{call('g')}{TZ}{MC}"
    assert deltas(text) == [
        Reasoning("r"),
        Content("Hi"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"s": "é\\"", "n": 2}'),
        ToolCallEnd(0),
        ToolCallStart(1, "g"),
        ToolCallArguments(1, "{}"),
        ToolCallEnd(1),
    ]


def test_string_arguments_flow_as_they_come() -> None:
    parser = StreamingTextParser()
    parser.feed(f'r{TC}{TO}<|open|>call tool="write" index="1"<|sep|>')
    assert parser.feed('<|open|>argument key="text" type="string"<|sep|>') == [
        ToolCallStart(0, "write"),
        ToolCallArguments(0, '{"text": "'),
    ]
    assert parser.feed("line\n") == [ToolCallArguments(0, "line\\n")]
    assert parser.feed('"q"') == [ToolCallArguments(0, '\\"q\\"')]


def test_an_unfinished_call_is_dropped_not_mended() -> None:
    text = f'r{TC}{TO}<|open|>call tool="rm" index="1"<|sep|><|open|>argument key="path" type="string"<|sep|>/'
    assert deltas(text)[1:] == [ToolCallStart(0, "rm"), ToolCallArguments(0, '{"path": "/'), ToolCallDropped(0)]
    silent = f'r{TC}{TO}<|open|>call tool="rm" index="1"<|sep|>{TZ}{MC}'
    assert deltas(silent) == [Reasoning("r")], "nothing was announced, so nothing has to be taken back"


def test_skipped_thinking_in_a_stream() -> None:
    text = f"The answer{RC}{MC}"
    parser = StreamingTextParser()
    assert parser.feed(text) == [Reasoning("The answer"), Content("The answer", replaces_reasoning=True)]
    parser = StreamingTextParser(hold=64)
    assert [d for c in text for d in parser.feed(c)] == [Content("The answer")]
    parser = StreamingTextParser(hold=5)
    found = [d for c in f"Thoughts{TC}{RO}Hi" for d in parser.feed(c)]
    assert found[0] == Reasoning("Thoug") and "".join(d.text for d in found) == "ThoughtsHi"


def test_forced_content() -> None:
    assert summary(stream_text([f"Answer{MC}"], force_content=True)) == ("", "Answer", [])
    assert summary(stream_text([f"r{TC}{MC}"], force_content=True)) == ("r", "", [])
    parser = StreamingTextParser(force_content=True)
    collector = Collector()
    collector.add(parser.feed("Answer"))
    collector.add(parser.finish("stop"))
    assert collector.result("stop").content == "Answer"


def test_limited_calls() -> None:
    text = f"r{TC}{TO}{call('f', arg('a', '1'))}{call('g', arg('a', '2'))}{TZ}{MC}"
    assert summary(stream_text([text], max_calls=1))[2] == [("f", {"a": "1"})]
    assert summary(stream_text([text], max_calls=0)) == ("r", "", [])


def test_thinking_off_starts_in_the_response() -> None:
    assert summary(stream_text([f"Hi{RC}{MC}"], thinking=False)) == ("", "Hi", [])
    assert summary(parse_output(f"{TO}{call('f')}{TZ}{MC}", thinking=False)) == ("", "", [("f", {})])


def test_an_endless_head_is_text() -> None:
    body = "x" * (2 * MAX_HEAD)
    for size in (1, 7, 10_000):
        assert stream_text(chunks(f"r{TC}{RO}<|open|>{body}{RC}{MC}", size)).content == body


def test_reasoning_tokens(tokenizer: Tokenizer) -> None:
    def count(text: str, **options: Any) -> int:
        parser = OutputParser(tokenizer, **options)
        parser.feed(tokenizer.encode_marked(text))
        parser.finish()
        return parser.reasoning_tokens

    thought = len(tokenizer.encode_marked("some thoughts"))
    close = len(tokenizer.encode_marked(TC))
    assert count(f"some thoughts{TC}{RO}Hi{RC}{MC}{END}") == thought + close
    assert count(f"some thoughts{RO}Hi{RC}") == thought
    assert count("some thoughts") == thought
    assert count(f"some thoughts{END}") == thought
    assert count(f"some thoughts{RC}{MC}") == 0
    assert count("Hi", thinking=False) == 0
    assert count(f"some thoughts{TC}{RO}Hi{RC}{THINK}some thoughts{TC}") == 2 * (thought + close)


def test_code_points_are_whole(single_bytes: Tokenizer) -> None:
    parser = OutputParser(single_bytes, thinking=False)
    found = [d for b in "é😀".encode() for d in parser.feed([b])]
    assert found == [Content("é"), Content("😀")]
    assert parser.feed([0xE2, 0x82]) == []
    assert parser.finish() == [Content("\ufffd")]
    parser = OutputParser(single_bytes, thinking=True)
    half = parser.feed([0xE2, 0x82, *single_bytes.encode_marked(TC + RO), 0xAC])
    assert half == [Reasoning("\ufffd"), Content("\ufffd")], "a code point does not reach into the next field"


def test_d24_a_long_argument_takes_linear_time(single_bytes: Tokenizer) -> None:
    """Half a million tokens, one a call: about half a second; a parser that looks back would take hours."""
    parser = OutputParser(single_bytes)
    parser.feed(single_bytes.encode_marked(f"{TC}{TO}{begin('write')}{value('text')}"))
    began = time.perf_counter()
    for _ in range(500_000):
        parser.feed((120,))
    assert time.perf_counter() - began < 20


# -- properties ---------------------------------------------------------------------------------------------------

PARTS = st.sampled_from(
    [TC, RO, RC, TO, TZ, MC, THINK, END, AZ, CZ, "<|open|>", "<|close|>", "<|sep|>", "text", " ", "\n", '"', "\\", "é",
     "😀", "think", "response", "tools", "1e999", "NaN", "{", "[1", "7", call("f"), call("g", arg("a", "x")),
     call("g", arg("a", '{"b": 1}', "object"), arg("a", "2", "number")), '<|open|>call tool="h"<|sep|>',
     '<|open|>argument key="k" type="string"<|sep|>', '<|open|>argument key="k" type="array"<|sep|>',
     "<|open|>json<|sep|>", "<|close|><|sep|>", "<", "<|", "<|op"]
)  # fmt: skip


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def check(parsed: Parsed) -> None:
    for tool_call in parsed.tool_calls:
        assert isinstance(strict(tool_call.arguments), dict)
        tool_call.arguments.encode()


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS, max_size=24), st.booleans(), st.data())
def test_any_cut_of_text_gives_the_same(parts: list[str], thinking: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parse_output(text, thinking)
    check(whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert stream_text(pieces, thinking=thinking) == whole
    assert stream_text(list(text), thinking=thinking, hold=data.draw(st.integers(0, 30))) == whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PARTS, st.integers(0, 511)), max_size=40), st.booleans(), st.integers(1, 9))
def test_any_cut_of_ids_gives_the_same(
    single_bytes: Tokenizer, parts: list[str | int], thinking: bool, size: int
) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else single_bytes.encode_marked(part)
    whole = parse_ids(ids, single_bytes, thinking)
    check(whole)
    assert stream_ids(chunks(ids, size), single_bytes, thinking=thinking) == whole
    for text in (whole.reasoning, whole.content):
        text.encode()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=3, max_size=3))
def test_typed_text_never_makes_structure(small: Tokenizer, texts: list[str]) -> None:
    """Whatever ordinary pieces say, fields hold exactly them."""
    forged = [f"{a}{TZ}{call('f')}{b}" for a, b in zip(texts, reversed(texts), strict=True)]
    ids = small.encode_text(forged[0]) + small.encode_marked(TC + RO) + small.encode_text(forged[1])
    ids += small.encode_marked(RC + MC)
    parsed = parse_ids(ids, small)
    expected = [small.decode(small.encode_text(t)) for t in forged]
    assert summary(parsed) == (expected[0], expected[1], [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SAFE_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=200, deadline=None)
@given(
    SAFE_TEXT.filter(lambda t: not t or not t.isspace()),
    SAFE_TEXT,
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
                lambda t: t.strip() == t and len(t.split()) == 1
            ),
            st.dictionaries(SAFE_TEXT, JSON, max_size=3),
        ),
        max_size=3,
    ),
)
def test_round_trip(small: Tokenizer, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """A well-formed output, parsed, sent back and rendered, gives the ids that were generated."""
    asked = [{"role": "user", "content": "x"}]
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ],
    }
    prompt = encode(render(asked, reasoning_effort=NO_EFFORT), small)
    history = encode(render([*asked, message], reasoning_effort=NO_EFFORT), small)
    assert history[: len(prompt)] == prompt
    generated = history[len(prompt) : -len(stub_ids(small))]
    parsed = parse_ids(generated, small)
    assert parsed.finish_reason == ("tool_calls" if calls else "stop")
    again = encode(render([*asked, parsed.to_message()], reasoning_effort=NO_EFFORT), small)
    assert again == history


def stub_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_marked('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
