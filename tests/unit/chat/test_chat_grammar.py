"""Grammars: what the masks let through is exactly the format, and every walk through them validates."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from k3stack.chat import Parsed, Tokenizer, encode, parse_ids, render
from k3stack.chat.formats import REGEXES
from k3stack.chat.grammar import PREFACE_CHARS, build_grammar
from k3stack.chat.masks import Grammars, GrammarSession
from k3stack.chat.prompt import NO_EFFORT
from k3stack.chat.schema import FORMATS
from k3stack.chat.segments import Segment, close_tag, open_tag
from k3stack.chat.settings import OutputGrammar, ResponseFormat, ToolChoice
from k3stack.chat.strict import whole_pattern
from k3stack.errors import BugError, UserError

REQUIRED, NONE, AUTO = ToolChoice("required"), ToolChoice("none"), ToolChoice("auto")
STRICT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$defs": {"element": {"enum": ["x", 1, True, None]}},
    "properties": {
        "城市": {"type": "string", "enum": ["Paris", 'a\n"b"', ""]},
        "$n": {"type": ["integer", "null"], "minimum": -3, "maximum": 40},
        "code": {"type": "string", "pattern": "^[a-c]{2,4}$", "format": "made-up"},
        "short": {"type": "string", "maxLength": 5, "minLength": 2},
        "any_of": {
            "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/element"}}, {"const": 5}, {"type": "string"}]
        },
        "flag": {"type": "boolean"},
        "nested": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
            "required": ["a"],
            "additionalProperties": False,
        },
        'a&"b': {},
    },
    "required": ["城市", "$n", "code", "short", "any_of"],
    "additionalProperties": {"type": "number"},
}
STRICT = {"type": "function", "function": {"name": "_set", "strict": True, "parameters": STRICT_SCHEMA}}
GOOD: dict[str, Any] = {"城市": "", "$n": 7, "code": "abc", "short": "12345", "any_of": 5}
FREE = {"type": "function", "function": {"name": 'get weather&"x', "parameters": {"type": "object"}}}
ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["red", "green"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FORM = ResponseFormat("json_schema", ANSWER)


@pytest.fixture(scope="module")
def grammars(small: Tokenizer) -> Grammars:
    return Grammars(small)


def allowed(session: GrammarSession, token: int) -> bool:
    mask = session.mask()
    return bool(mask[token >> 3] >> (token & 7) & 1)


def names(session: GrammarSession, tokenizer: Tokenizer) -> set[str]:
    """Control tokens that may come next."""
    found = [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i) and allowed(session, i)]
    return {tokenizer.decode([i]) for i in found}


def follow(session: GrammarSession, ids: list[int]) -> int:
    """How many of ``ids`` the masks let through; they are accepted."""
    for n, token in enumerate(ids):
        if not allowed(session, token):
            return n
        assert session.accept([token])
    return len(ids)


def output(message: dict[str, Any], tokenizer: Tokenizer, thinking: bool = True) -> list[int]:
    """The ids that would have generated ``message``."""
    asked = [{"role": "user", "content": "x"}]
    prompt = encode(render(asked, thinking=thinking, reasoning_effort=NO_EFFORT), tokenizer)
    history = render([*asked, {"role": "assistant", **message}], thinking=thinking, reasoning_effort=NO_EFFORT)
    stub = open_tag("message", (("role", "assistant"),)) + open_tag("think" if thinking else "response")
    return encode(history[: -len(stub)], tokenizer)[len(prompt) :]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def walk(grammars: Grammars, grammar: OutputGrammar, tokenizer: Tokenizer, seed: int, limit: int = 3000) -> list[int]:
    """A random output: any allowed token, with a liking for those that bring it to an end."""
    chance = random.Random(seed)
    session = grammars.session(grammar)
    likes = {tokenizer.control.close} | {tokenizer.encode_text(c)[0] for c in '"}],01'}
    ids: list[int] = []
    while not session.done:
        assert len(ids) < limit, tokenizer.decode(ids)[-200:]
        mask = int.from_bytes(session.mask(), "little")
        choices = [i for i in range(tokenizer.vocab_size) if mask >> i & 1]
        liked = [i for i in choices if i in likes]
        token = chance.choice(liked if liked and chance.random() < 0.6 else choices)
        assert session.accept([token])
        ids.append(token)
    assert names(session, tokenizer) == {"<|end_of_msg|>"}
    return [*ids, tokenizer.control.end_of_msg]


def retokenised(parsed: Parsed, tokenizer: Tokenizer, thinking: bool) -> str:
    return tokenizer.decode(output(parsed.to_message(), tokenizer, thinking))


# -- what is constrained ------------------------------------------------------------------------------------------


def test_nothing_to_constrain(small: Tokenizer) -> None:
    assert build_grammar(small, in_think=True) is None
    assert build_grammar(small, in_think=True, tools=[FREE]) is None
    assert build_grammar(small, in_think=True, choice=NONE) is None
    assert build_grammar(small, in_think=True, form=ResponseFormat("json_schema", ANSWER, strict=False)) is None


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"form": FORM}, {"content": '{"name": "Ünal 😀", "tags": ["red", "green"]}'}),
        ({"form": FORM}, {"content": '{\n  "name": "",\n  "tags": []\n}'}),
        ({"form": FORM, "tools": [FREE]}, {"content": '{"name":"a","tags":[]}'}),
        ({"form": FORM, "tools": [FREE]}, {"content": "", "tool_calls": [call('get weather&"x', {"k": "v"})]}),
        ({"form": ResponseFormat("json_object", {"type": "object"})}, {"content": '{"a": [1, {"b": null}]}'}),
        ({"regex": r"\d{4}-\d\d/[a-z]+"}, {"content": "2024-10/ab"}),
        ({"ebnf": 'root ::= "a" [0-9]+ ("x" | foo)\nfoo ::= "bar"\n'}, {"content": "a12bar"}),
        ({"tools": [FREE], "choice": NONE}, {"content": "any <|text|> at all\n"}),
        ({"tools": [FREE], "choice": REQUIRED}, {"content": "", "tool_calls": [call('get weather&"x', {})]}),
        (
            {"tools": [FREE], "choice": REQUIRED},
            {
                "content": "Let me see.",
                "tool_calls": [
                    call(
                        'get weather&"x', {'k "&': "</close>\n", "n": -1.5, "o": {"a": [1, "é"]}, "z": None, "b": True}
                    ),
                    call('get weather&"x', {"e": ""}),
                ],
            },
        ),
        ({"tools": [STRICT, FREE]}, {"content": "no call"}),
        (
            {"tools": [STRICT, FREE]},
            {
                "content": "two calls",
                "tool_calls": [
                    call(
                        "_set",
                        {**GOOD, "城市": 'a\n"b"', "any_of": ["x", 1, None], 'a&"b': "s", "more": 2.5},
                    ),
                    call('get weather&"x', {"anything": 1}),
                ],
            },
        ),
        (
            {"tools": [STRICT, FREE], "choice": ToolChoice("named", "_set"), "parallel": False},
            {
                "content": "",
                "tool_calls": [call("_set", {**GOOD, "$n": None, "flag": False, "nested": {"a": 1, "b": "ccc"}})],
            },
        ),
    ],
)
def test_well_formed_outputs_pass(
    setup: dict[str, Any], message: dict[str, Any], thinking: bool, small: Tokenizer, grammars: Grammars
) -> None:
    grammar = build_grammar(small, in_think=thinking, **setup)
    assert grammar is not None and grammar.thinking == thinking
    ids = output({"reasoning_content": "why <not>\n" if thinking else "", **message}, small, thinking)
    session = grammars.session(grammar)
    assert follow(session, ids) == len(ids), small.decode(ids[: follow(grammars.session(grammar), ids)])
    assert session.done


def test_well_formed_outputs_pass_with_the_real_ranks(real: Tokenizer) -> None:
    grammars = Grammars(real)
    message = {
        "content": "",
        "tool_calls": [call("_set", {"城市": "Paris", "$n": 7, "code": "abc", "short": "ab", "any_of": 5})],
    }
    grammar = build_grammar(real, in_think=True, tools=[STRICT, FREE], choice=REQUIRED)
    assert grammar is not None
    ids = output({"reasoning_content": "hm", **message}, real)
    session = grammars.session(grammar)
    assert follow(session, ids) == len(ids) and session.done
    assert len(session.mask()) == 163_840 // 8


# -- what is not let through --------------------------------------------------------------------------------------


def stuck(ids: list[int], session: GrammarSession, tokenizer: Tokenizer) -> str:
    """The text that was let through of ``ids``."""
    n = follow(session, ids)
    assert n < len(ids), "everything was let through"
    assert not session.accept([ids[n]]), "a token that the mask forbids is refused"
    return tokenizer.decode(ids[:n])


def test_thinking_is_text_and_its_close(small: Tokenizer, grammars: Grammars) -> None:
    grammar = build_grammar(small, in_think=True, form=FORM)
    assert grammar is not None
    session = grammars.session(grammar)
    assert names(session, small) == {"<|close|>"} and allowed(session, 65)
    assert len(session.mask()) == -(-small.vocab_size // 8)
    assert follow(session, small.encode_text("some <|open|> thoughts")) > 0
    close = encode(close_tag("think"), small)
    assert session.accept(close[:1])
    for token in close[1:]:
        assert [i for i in range(small.vocab_size) if allowed(session, i)] == [token]
        assert session.accept([token])
    assert names(session, small) == {"<|open|>"}
    assert follow(session, encode(open_tag("response"), small)) == len(encode(open_tag("response"), small))
    assert not names(session, small) and allowed(session, small.encode_text("{")[0])


def test_text_lets_through_nothing_but_its_close(small: Tokenizer, grammars: Grammars) -> None:
    grammar = build_grammar(small, in_think=False, tools=[FREE], choice=NONE)
    assert grammar is not None
    session = grammars.session(grammar)
    assert names(session, small) == {"<|close|>"}
    assert stuck(small.encode_marked("a<|open|>"), session, small) == "a"
    session = grammars.session(grammar)
    tools = output({"content": "a", "tool_calls": [call("f", {})]}, small, thinking=False)
    assert stuck(tools, session, small) == "a<|close|>response<|sep|>", "choice none: no tools block"


def test_a_forced_call_comes_soon(small: Tokenizer, grammars: Grammars) -> None:
    grammar = build_grammar(small, in_think=False, tools=[FREE], choice=REQUIRED)
    assert grammar is not None
    session = grammars.session(grammar)
    blanks = small.encode_text(" ")[:1] * (PREFACE_CHARS + 10)
    assert follow(session, blanks) <= PREFACE_CHARS
    assert names(session, small) == {"<|close|>"}
    plain = output({"content": "a"}, small, thinking=False)
    assert stuck(plain, grammars.session(grammar), small) == "a<|close|>response<|sep|>"


def test_one_call_where_they_may_not_be_parallel(small: Tokenizer, grammars: Grammars) -> None:
    two = [call('get weather&"x', {}), call('get weather&"x', {})]
    for choice in (REQUIRED, AUTO):
        grammar = build_grammar(small, in_think=False, tools=[FREE], choice=choice, parallel=False)
        assert grammar is not None
        ids = output({"content": "", "tool_calls": two}, small, thinking=False)
        let_through = stuck(ids, grammars.session(grammar), small)
        assert let_through.count("<|open|>call") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"$n": 1},
        {"城市": "London"},
        {"城市": "Paris", "$n": 41},
        {"城市": "Paris", "$n": 1.5},
        {"城市": "Paris", "$n": 1, "code": "abcab"},
        {"城市": "Paris", "$n": 1, "code": "ab", "short": "a"},
        {"城市": "Paris", "$n": 1, "code": "ab", "short": "abc", "any_of": ["y"]},
        {"城市": "Paris", "$n": 1, "code": "ab", "short": "abc", "any_of": 6},
        {"城市": "Paris", "$n": 1, "code": "ab", "short": "abc", "any_of": 5, "extra": "text"},
        {"城市": "Paris", "$n": 1, "code": "ab", "short": "abc", "any_of": 5, "flag": True, "$n ": 1, "城市 ": "x"},
        {"城市": "Paris", "$n": 1, "code": "ab", "short": "abc", "any_of": 5, "nested": {"b": "c"}},
        {"城市": "Paris", "$n": 1, "code": "ab", "short": "abc"},
    ],
)
def test_strict_arguments_hold(arguments: dict[str, Any], small: Tokenizer, grammars: Grammars) -> None:
    grammar = build_grammar(small, in_think=False, tools=[STRICT], choice=REQUIRED)
    assert grammar is not None
    ids = output({"content": "", "tool_calls": [call("_set", arguments)]}, small, thinking=False)
    assert "<|close|>call" not in stuck(ids, grammars.session(grammar), small).split("<|open|>call")[1] + "!"


def test_undeclared_and_other_tools_are_not_called(small: Tokenizer, grammars: Grammars) -> None:
    for setup in (
        {"choice": REQUIRED, "tools": [FREE]},
        {"choice": ToolChoice("named", "_set"), "tools": [STRICT, FREE]},
    ):
        grammar = build_grammar(small, in_think=False, **setup)  # type: ignore[arg-type]
        assert grammar is not None
        name = "foo" if setup["choice"] is REQUIRED else 'get weather&"x'
        ids = output({"content": "", "tool_calls": [call(name, {})]}, small, thinking=False)
        assert re.search(r'call tool="[^"]{0,4}$', stuck(ids, grammars.session(grammar), small))


# -- every walk is valid ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_walks_through_a_schema_validate(seed: int, small: Tokenizer, grammars: Grammars) -> None:
    grammar = build_grammar(small, in_think=seed % 2 == 0, form=FORM)
    assert grammar is not None
    parsed = parse_ids(walk(grammars, grammar, small, seed), small, seed % 2 == 0)
    jsonschema.validate(json.loads(parsed.content), ANSWER)
    assert parsed.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(24))
def test_walks_through_strict_tools_validate(seed: int, small: Tokenizer, grammars: Grammars) -> None:
    thinking = seed % 2 == 0
    grammar = build_grammar(small, in_think=thinking, tools=[STRICT, FREE], choice=REQUIRED, parallel=seed % 3 > 0)
    assert grammar is not None
    ids = walk(grammars, grammar, small, seed)
    parsed = parse_ids(ids, small, thinking)
    assert parsed.tool_calls and parsed.finish_reason == "tool_calls"
    for made in parsed.tool_calls:
        arguments = json.loads(made.arguments)
        if made.name == "_set":
            jsonschema.validate(arguments, STRICT_SCHEMA)
            assert len(json.loads(made.arguments, object_pairs_hook=list)) == len(arguments), "no key comes twice"
        else:
            assert made.name == 'get weather&"x' and isinstance(arguments, dict)


def test_the_session_starts_with_the_given_text(small: Tokenizer, grammars: Grammars) -> None:
    prefix = tuple(small.encode_text('{"name": "A'))
    grammar = build_grammar(small, in_think=False, form=FORM, prefix=prefix)
    assert grammar is not None
    rest = small.encode_text('nna", "tags": []}') + encode(close_tag("response"), small)
    assert follow(grammars.session(grammar), rest) == len(rest)
    wrong = build_grammar(small, in_think=False, form=FORM, prefix=tuple(small.encode_text("Sure")))
    assert wrong is not None
    with pytest.raises(UserError, match="does not begin"):
        grammars.session(wrong)


def test_sessions_do_not_touch_each_other(small: Tokenizer, grammars: Grammars) -> None:
    grammar = build_grammar(small, in_think=False, form=FORM)
    assert grammar is not None
    one, two = grammars.session(grammar), grammars.session(grammar)
    before = two.mask()
    one.accept(small.encode_text('{"name"'))
    assert two.mask() == before


# -- what cannot be enforced is refused by its path ---------------------------------------------------------------

SCHEMA_PATH = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, f"{SCHEMA_PATH}.properties.a"),
        ({"properties": {"a": {"items": {"pattern": "(?=x)", "type": "string"}}}}, f"{SCHEMA_PATH}.properties.a.items"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}, f"{SCHEMA_PATH}.anyOf[1]"),
        ({"$defs": {"a": {"if": {}}}, "$ref": "#/$defs/a"}, f"{SCHEMA_PATH}.$defs.a"),
        ({"$ref": "http://example.com/x"}, SCHEMA_PATH),
        ({"type": "nonsense"}, SCHEMA_PATH),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, SCHEMA_PATH),
        ({"properties": {"a": 5}}, f"{SCHEMA_PATH}.properties.a"),
        # llguidance panics on this one: it shortens the value for its message, in the middle of a character.
        ({"type": "array", "maxItems": "😀" * 40}, SCHEMA_PATH),
        ({"properties": {"a": {"properties": {f"p{i}": {} for i in range(401)}}}}, f"{SCHEMA_PATH}.properties.a"),
    ],
)
def test_schema_that_cannot_be_enforced(schema: dict[str, Any], path: str, small: Tokenizer) -> None:
    with pytest.raises(UserError) as e:
        build_grammar(small, in_think=True, form=ResponseFormat("json_schema", schema))
    assert e.value.param == path and path in str(e.value)


def test_as_many_optional_properties_as_are_accepted_work(small: Tokenizer, grammars: Grammars) -> None:
    names = [f"p{i}" for i in range(500)]
    schema = {"properties": {name: {"type": "string"} for name in names}, "required": names[:100], "type": "object"}
    grammar = build_grammar(small, in_think=False, form=ResponseFormat("json_schema", schema))
    assert grammar is not None
    session = grammars.session(grammar)
    for token in small.encode_text(json.dumps(dict.fromkeys([*names[:100], names[499]], ""), indent=1)):
        mask = session.mask()
        assert mask[token >> 3] >> (token & 7) & 1
        assert session.accept([token])


class PanicException(BaseException):
    """What a panic of a Rust library looks like."""


def test_a_panic_in_use_is_an_error_of_ours(small: Tokenizer, grammars: Grammars) -> None:
    class Broken:
        def is_stopped(self) -> bool:
            raise PanicException("index out of bounds\nbacktrace")

    session = GrammarSession(grammars, Broken(), thinking=False)  # type: ignore[arg-type]
    for use in (session.mask, lambda: session.accept([1])):
        with pytest.raises(BugError, match=r"llguidance panicked: index out of bounds$"):
            use()


def test_deep_schema_is_refused(small: Tokenizer) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UserError, match="nested 64 deep"):
        build_grammar(small, in_think=True, form=ResponseFormat("json_schema", schema))


@pytest.mark.parametrize(
    ("parameters", "below"),
    [
        ({"type": "array"}, ".type"),
        ({"type": "object", "minProperties": 2}, ".minProperties"),
        ({"type": "object", "properties": {"a": False}}, ".properties.a"),
        ({"type": "object", "properties": {"a": {"type": "string", "not": {}}}}, ".properties.a"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "a^b"}}}, ".properties.a"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, ".properties.a"),
        ({"type": "object", "properties": {"a": {"type": "date"}}}, ".properties.a"),
    ],
)
def test_strict_parameters_that_cannot_be_enforced(parameters: dict[str, Any], below: str, small: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    with pytest.raises(UserError) as e:
        build_grammar(small, in_think=True, tools=[FREE, tool], choice=REQUIRED)
    assert e.value.param is not None and e.value.param.startswith("tools[1].function.parameters")
    assert e.value.param.endswith(below)


def test_other_refusals(small: Tokenizer) -> None:
    for fields, param in [
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"ebnf": "root ::= nothing"}, "ebnf"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"regex": "a", "tools": [FREE], "choice": REQUIRED}, "tool_choice"),
    ]:
        with pytest.raises(UserError) as e:
            build_grammar(small, in_think=True, **fields)  # type: ignore[arg-type]
        assert e.value.param == param


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("^a$", "(a)"),
        ("a", "(?s:.)*(a)(?s:.)*"),
        ("^a|b$", "(a)(?s:.)*|(?s:.)*(b)"),
        (r"^a\$", r"(a\$)(?s:.)*"),
        ("^(a|b)[|^$]$", "((a|b)[|^$])"),
    ],
)
def test_patterns_cover_the_whole_text(pattern: str, whole: str) -> None:
    assert whole_pattern(pattern, "p") == whole


def test_anchors_inside_a_pattern_are_refused() -> None:
    with pytest.raises(UserError, match="only stand at its ends") as e:
        whole_pattern("(^a|b)$", "p")
    assert e.value.param == "p"


def test_harmless_keywords_are_accepted(small: Tokenizer, grammars: Grammars) -> None:
    schema = {
        "$id": "x", "$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"X": {"type": "integer"}},
        "title": "t", "description": "d", "type": "object", "required": ["a"],
        "properties": {"a": {"$ref": "#/definitions/X", "description": "d"}, "b": {"type": "string", "format": "hex"}},
    }  # fmt: skip
    grammar = build_grammar(small, in_think=False, form=ResponseFormat("json_schema", schema))
    assert grammar is not None
    ids = small.encode_text('{"a": 1, "b": "x"}')
    assert follow(grammars.session(grammar), ids) == len(ids)
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    strict = build_grammar(small, in_think=False, tools=[tool], choice=REQUIRED)
    assert strict is not None
    made = output({"content": "", "tool_calls": [call("f", {"a": 1, "b": "x"})]}, small, thinking=False)
    assert follow(grammars.session(strict), made) == len(made)


def test_segments_of_the_end(small: Tokenizer, grammars: Grammars) -> None:
    grammar = build_grammar(small, in_think=False, regex="ok")
    assert grammar is not None
    session = grammars.session(grammar)
    ids = small.encode_text("ok") + encode([*close_tag("response"), *close_tag("message")], small)
    assert follow(session, ids) == len(ids) and session.done
    end = encode([Segment("<|end_of_msg|>", True)], small)
    assert session.accept(end) and not session.accept([65])


# -- formats of texts outside JSON ---------------------------------------------------------------------------------

FORMAT_TEXTS = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31", "0001-01-01"], ["2023-02-29", "1900-02-29", "0000-01-01"]),
    "time": (["23:59:59Z", "00:00:00.123+05:30"], ["24:00:00Z", "12:00:00", "12:00Z"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z"]),
    "duration": (["P1Y2M3D", "PT5M", "P3W", "P1DT12H"], ["P", "PT", "P1Y3D", "1D"]),
    "email": (["a.b+c@example.org"], ["a@", "@x", "a..b@x", "a b@x"]),
    "hostname": (["example.org", "a", "x-1.y"], ["-a", "a-", "a..b", ""]),
    "ipv4": (["0.0.0.0", "255.1.20.3"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "1::", "2001:db8::ff:1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8",
         "1::3:4:5:6:7:8", "0:0:0:0:0:ffff:1.2.3.4"],
        [":", ":::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1::2::3", "12345::", "g::"],
    ),
    "uuid": (["12345678-90ab-cdef-1234-567890ABCDEF"], ["12345678-90ab-cdef-1234-567890abcde", "x"]),
    "uri": (["https://example.org:80/a/b?c=d#e", "mailto:a@b", "urn:a:b", "file:///x"], ["/a", "a b:c", "http://a b"]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(name: str) -> None:
    good, bad = FORMAT_TEXTS[name]
    for text in good:
        assert re.fullmatch(REGEXES[name], text), text
        assert jsonschema.Draft202012Validator.FORMAT_CHECKER.conforms(text, name), text
    for text in bad:
        assert not re.fullmatch(REGEXES[name], text), text


def test_string_arguments_keep_their_format(small: Tokenizer, grammars: Grammars) -> None:
    properties = {name: {"type": "string", "format": name, "maxLength": 60} for name in sorted(FORMATS)}
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    grammar = build_grammar(small, in_think=False, tools=[tool], choice=REQUIRED)
    assert grammar is not None
    validator = jsonschema.Draft202012Validator(
        parameters, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(3):
        parsed = parse_ids(walk(grammars, grammar, small, seed), small, False)
        assert parsed.tool_calls
        for call in parsed.tool_calls:
            validator.validate(json.loads(call.arguments))
