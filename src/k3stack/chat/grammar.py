"""Structured output: the grammar of what may follow a prompt, in llguidance's Lark dialect.

The constraint covers the visible half of the output. Thinking is free but for control tokens (``masks.py`` sees to it):

    answer   := response tools? <|close|>message<|sep|>          and then <|end_of_msg|>, which masks.py adds
    response := <|open|>response<|sep|> body <|close|>response<|sep|>
    body    := free text, a short free text before a forced call, or the response format

Tags are spelt as the exact tokens the model was trained on (each attribute piece on its own), so a constrained output
is tokenised like a free one and its text, sent back, gives the same ids. Free text is any text without control tokens:
an argument ends where its ``<|close|>`` token comes, whatever the text says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from k3stack.chat.guidance import problem_of
from k3stack.chat.schema import check, json_rule
from k3stack.chat.segments import Segment, close_tag, encode, open_tag
from k3stack.chat.settings import OutputGrammar, ResponseFormat, ToolChoice, tool_name
from k3stack.chat.strict import ARGUMENT_TYPES, StrictArguments, free_typed
from k3stack.chat.tokenizer import Tokenizer
from k3stack.errors import UserError

PREFACE_CHARS = 2_000
"""The most that is said before a forced call."""

_TERMINALS = (
    "TEXT: /(?s:.)+/",
    f"PREFACE: /(?s:.){{1,{PREFACE_CHARS}}}/",
    'KEY: /[^"]+/',
    "INDEX: /[1-9][0-9]{0,2}/",
)


def build_grammar(
    tokenizer: Tokenizer,
    *,
    in_think: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    choice: ToolChoice | None = None,
    form: ResponseFormat | None = None,
    parallel: bool = True,
    regex: str | None = None,
    ebnf: str | None = None,
    prefix: tuple[int, ...] = (),
) -> OutputGrammar | None:
    """The grammar of an output, or None where nothing constrains it.

    ``tools``: all declared tools, checked by ``render``; ``choice`` and ``form`` as the settings parsers return them.
    ``parallel`` false: one call at most. ``regex``, ``ebnf`` (GBNF, root ``root``): what the response must match.
    Nothing constrains parallel ``auto`` calls without a strict tool, a text response, a schema with ``strict`` false.
    Where calls are free and the response is constrained, it may stay empty in favour of calls.
    UserError names the field, for a schema the path in it.
    """
    choice = choice or ToolChoice("auto")
    constrained = _body(form or ResponseFormat("text"), regex, ebnf)
    if constrained and choice.forced:
        raise UserError("tool_choice forces a call: the response cannot be constrained as well", param="tool_choice")
    strict = [tool for tool in tools if tool["function"].get("strict") is True]
    named = [(i, tool) for i, tool in enumerate(tools) if choice.name is None or tool_name(tool) == choice.name]
    free = not tools or (choice.mode == "auto" and not strict and parallel)
    if free and not constrained:
        return None
    writer = _Writer(tokenizer)
    calls = writer.tools_block(named, parallel) if tools and choice.mode != "none" else None
    start = writer.answer(constrained, calls, choice.forced, in_response=not in_think)
    return OutputGrammar(writer.source(start), in_think, prefix)


def build_text_grammar(
    form: ResponseFormat | None = None, regex: str | None = None, ebnf: str | None = None
) -> OutputGrammar | None:
    """The grammar of an output that is bare text, without tags (completions of a raw prompt); None: it is free."""
    body = _body(form or ResponseFormat("text"), regex, ebnf)
    return OutputGrammar(f"start: {body.split(':', 1)[0]}\n{body}\n", thinking=False) if body else None


def _body(form: ResponseFormat, regex: str | None, ebnf: str | None) -> str | None:
    """The rule of a constrained response; None for free text."""
    asked = [("response_format", form.kind != "text"), ("regex", regex is not None), ("ebnf", ebnf is not None)]
    given = [name for name, there in asked if there]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot constrain the same response", param=given[-1])
    if regex is not None:
        return _checked("BODY: /" + llguidance.regex_to_lark(regex, "d") + "/", "BODY", "regex")
    if ebnf is not None:
        return _checked("body: " + _lark_of(ebnf), "body", "ebnf")
    if form.kind == "text" or not form.strict:
        return None
    check(form.schema, "response_format.json_schema.schema")
    return "body: " + json_rule(form.schema)


def _lark_of(ebnf: str) -> str:
    try:
        converted = gbnf_to_lark(ebnf)
    except Exception as e:  # noqa: BLE001  (the converter raises plain exceptions of many kinds)
        raise UserError(f"ebnf is not a GBNF grammar: {e}", param="ebnf") from None
    return "%lark {\n" + converted.replace("%llguidance {}", "") + "\n}"


def _checked(rule: str, name: str, param: str) -> str:
    problem = problem_of(f"start: {name}\n{rule}")
    if problem:
        raise UserError(f"{param} cannot be enforced: {problem.strip()}", param=param)
    return rule


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []

    def source(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules, *_TERMINALS)) + "\n"

    def fixed(self, segments: Sequence[Segment]) -> str:
        """Exactly these segments, token by token."""
        return " ".join(f"<[{i}]>" for i in encode(segments, self._tokenizer))

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def answer(self, body: str | None, calls: str | None, forced: bool, *, in_response: bool) -> str:
        """The whole answer. With calls that are free to come, a constrained response may be empty in favour of them."""
        opened = "" if in_response else self.fixed(open_tag("response"))
        closed = self.fixed(close_tag("response"))
        end = self.fixed(close_tag("message"))
        if body is not None:
            self._rules.append(body)
            said = f"{body.split(':', 1)[0]} {closed}"
            rest = f"({said} | {closed} {calls})" if calls else said
        elif forced:
            rest = f"PREFACE? {closed} {calls}"
        else:
            rest = f"TEXT? {closed}" + (f" {calls}?" if calls else "")
        return f"{opened} {rest} {end}"

    def tools_block(self, tools: Sequence[tuple[int, Mapping[str, Any]]], parallel: bool) -> str:
        """The tools block: calls of ``tools`` (with their places in the request), or just one."""
        index = "INDEX" if parallel else self.fixed([Segment("1")])
        calls = " | ".join(self._call(tool, number, index) for number, tool in tools)
        self.rule("call", calls)
        many = "call+" if parallel else "call"
        return self.rule("calls", f"{self.fixed(open_tag('tools'))} {many} {self.fixed(close_tag('tools'))}")

    def _call(self, tool: Mapping[str, Any], number: int, index: str) -> str:
        head = open_tag("call", (("tool", tool_name(tool)), ("index", "?")))
        before, after = head[:-3], head[-2:]
        function = tool["function"]
        if function.get("strict") is True:
            path = f"tools[{number}].function.parameters"
            arguments = StrictArguments(self.rule, self.fixed, f"t{number}").write(function.get("parameters"), path)
        else:
            arguments = f"{self._free_argument()}*"
        body = f"{self.fixed(before)} {index} {self.fixed(after)} {arguments} {self.fixed(close_tag('call'))}"
        return self.rule(f"call{number}", body)

    def _free_argument(self) -> str:
        """Any key with a value of any type."""
        if not any(rule.startswith("argument:") for rule in self._rules):
            head = open_tag("argument", (("key", "?"),))
            typed = " | ".join(free_typed(kind, self.fixed) for kind in ARGUMENT_TYPES)
            before, quote, closed = map(self.fixed, (head[:-3], head[-2:-1], close_tag("argument")))
            self.rule("argument", f"{before} KEY {quote} ({typed}) {closed}")
        return "argument"
