"""The state machine behind both parsers: marks and text in, deltas out, constant work for each.

    THINK ... close think -> BETWEEN -> open response -> RESPONSE ... close response -> BETWEEN
    -> open tools -> TOOLS -> open call -> CALL -> open argument -> STRING or VALUE -> ... -> close message -> DONE

A mark ``open`` or ``close`` begins a head, which ends at ``sep``, or at the next mark where the model left ``sep`` out.
Models do not always keep to the format; ``docs/chat-format.md`` lists what becomes of each deviation. Two rules
cover most: a tag that can only follow an omitted one implies it, and a call counts only once its own close has come.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum

from k3stack.chat.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallEnd,
    ToolCallStart,
)
from k3stack.chat.jsontext import dumps, escape, loads, quote
from k3stack.chat.segments import unescape_attribute

MARK_OPEN, MARK_CLOSE, MARK_SEP, MARK_END = range(4)

MAX_HEAD = 1024
"""Characters of a tag's head. A longer one is no tag: it is given out as the text that it must have been."""

_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


class State(IntEnum):
    THINK = 0
    RESPONSE = 1
    BETWEEN = 2
    """Between two blocks of the message. Blanks here are dropped, other text is content."""
    TOOLS = 3
    CALL = 4
    STRING = 5
    """Inside a string argument: passed on as it comes."""
    VALUE = 6
    """Inside a ``json`` block or an argument of another type: kept until its close, then converted."""
    NO_VALUE = 7
    """Inside an argument without a key: dropped."""
    SKIP = 8
    """Inside a call that does not count: dropped up to its close."""
    DONE = 9
    """After the message. Only generations that ignore its end come here with text; it is content."""


_IN_CALL = (State.CALL, State.STRING, State.VALUE, State.NO_VALUE)
_IN_VALUE = (State.STRING, State.VALUE, State.NO_VALUE)
_OUTSIDE = (State.THINK, State.RESPONSE, State.BETWEEN)


class Machine:
    """``text`` and ``mark`` append deltas to ``out``. ``position`` is the caller's count of tokens so far.

    ``hold``: characters of first reasoning that are kept back in case they turn out to be the answer (a skipped
    think), so that short answers are never streamed as reasoning; 0 streams at once.
    ``max_calls``: later calls are dropped (0: all of them). ``force_content``: an output that ends inside its first
    think block was the answer.
    """

    def __init__(
        self, thinking: bool, *, max_calls: int | None = None, hold: int = 0, force_content: bool = False
    ) -> None:
        self.state = State.THINK if thinking else State.RESPONSE
        self.position = 0
        self.calls = 0
        """Calls completed."""
        self._max_calls = max_calls
        self._hold = hold
        self._force = force_content
        self._head: list[str] | None = None
        self._head_opens = False
        self._head_size = 0
        self._head_at = 0
        self._may_be_answer = thinking
        self._early: list[str] = []
        self._reasoning_tokens = 0
        self._think_from: int | None = 0 if thinking else None
        self._blanks = ""
        self._tools_closed = False
        self._after_skip = State.BETWEEN
        self._index = -1
        self._name = ""
        self._started = False
        self._lead = "{"
        self._key: str | None = None
        self._value: list[str] = []
        self._opens: dict[str, Callable[[str, list[Delta]], None]] = {
            "think": self._open_think,
            "response": self._open_response,
            "tools": self._open_tools,
            "call": self._open_call,
            "argument": self._open_argument,
            "json": self._open_json,
        }
        self._closes: dict[str, Callable[[list[Delta]], None]] = {
            "think": self._close_think,
            "response": self._close_response,
            "tools": self._close_tools,
            "call": self._close_call,
            "argument": self._close_value,
            "json": self._close_value,
            "message": self._close_message,
        }

    @property
    def reasoning_tokens(self) -> int:
        """Tokens spent thinking, the three of the closing tag included; none if the answer took their place."""
        live = 0 if self._think_from is None else self.position - self._think_from
        return self._reasoning_tokens + live

    # -- input ---------------------------------------------------------------------------------------------------

    def text(self, text: str, out: list[Delta]) -> None:
        """Ordinary text, whole code points."""
        if self._head is not None:
            self._head.append(text)
            self._head_size += len(text)
            if self._head_size <= MAX_HEAD:
                return
            text = "".join(self._head)
            self._head = None
        state = self.state
        if state is State.THINK:
            self._reason(text, out)
        elif state is State.RESPONSE:
            if self._index < 0:
                out.append(Content(text))
        elif state is State.STRING:
            out.append(ToolCallArguments(self._index, escape(text)))
        elif state is State.VALUE:
            self._value.append(text)
        elif state in (State.BETWEEN, State.DONE) and self._index < 0:
            self._loose(text, out)

    def mark(self, mark: int, out: list[Delta]) -> None:
        """A control token: one of ``MARK_OPEN``, ``MARK_CLOSE``, ``MARK_SEP``, ``MARK_END``."""
        if self._head is not None:
            self._resolve(out)
        if mark == MARK_END:
            self._head_at = self.position - 1
            self._close_message(out)
        elif mark != MARK_SEP:
            self._head = []
            self._head_size = 0
            self._head_opens = mark == MARK_OPEN
            self._head_at = self.position - 1

    def end(self, out: list[Delta], *, stopped: bool) -> None:
        """No more input. ``stopped``: the model ended by itself, as opposed to being cut."""
        self._head = None
        if stopped:
            self._head_at = self.position
            self._close_message(out)
            return
        self._drop_call(out)
        if self._may_be_answer:
            self._believe_reasoning(out)

    # -- heads ---------------------------------------------------------------------------------------------------

    def _resolve(self, out: list[Delta]) -> None:
        head = "".join(self._head or ()).strip()
        self._head = None
        if self.state is State.DONE:
            return
        name, _, rest = head.partition(" ")
        if self._head_opens:
            opened = self._opens.get(name)
            if opened is not None:
                opened(rest, out)
            return
        closed = self._closes.get(name or self._innermost())
        if closed is None:
            return
        if not name and self.state is State.THINK and self._may_be_answer:
            # Which tag was meant is told by what follows: a response, or the message's end.
            self._leave_think(self.position)
            self.state = State.BETWEEN
            return
        closed(out)

    def _innermost(self) -> str:
        state = self.state
        if state is State.THINK:
            return "think"
        if state is State.RESPONSE:
            return "response"
        if state is State.TOOLS:
            return "tools"
        if state in _IN_VALUE:
            return "argument"
        return "call" if state in (State.CALL, State.SKIP) else "message"

    # -- thinking ------------------------------------------------------------------------------------------------

    def _reason(self, text: str, out: list[Delta]) -> None:
        if self._may_be_answer:
            self._early.append(text)
            if self._hold > 0:
                self._hold -= len(text)
                if self._hold > 0:
                    return
                text = "".join(self._early)
        out.append(Reasoning(text))

    def _believe_reasoning(self, out: list[Delta]) -> None:
        """What came first was reasoning indeed: send what is held back and forget it."""
        if self._may_be_answer:
            self._may_be_answer = False
            if self._hold > 0 and self._early:
                out.append(Reasoning("".join(self._early)))
            self._early.clear()

    def _was_answer(self, out: list[Delta]) -> None:
        """What came first was the answer: thinking was skipped."""
        self._may_be_answer = False
        text = "".join(self._early)
        self._early.clear()
        self._reasoning_tokens = 0
        self._think_from = None
        if text:
            out.append(Content(text, replaces_reasoning=self._hold <= 0))

    def _leave_think(self, position: int) -> None:
        if self._think_from is not None:
            self._reasoning_tokens += position - self._think_from
            self._think_from = None

    def _open_think(self, rest: str, out: list[Delta]) -> None:
        if self.state is State.THINK:
            return
        self._leave_tools(out)
        self._believe_reasoning(out)
        self._blanks = ""
        self.state = State.THINK
        self._think_from = self.position

    def _close_think(self, out: list[Delta]) -> None:
        if self.state is State.THINK:
            self._believe_reasoning(out)
            self._leave_think(self.position)
            self.state = State.BETWEEN

    # -- the answer ----------------------------------------------------------------------------------------------

    def _loose(self, text: str, out: list[Delta]) -> None:
        """Text outside of every block: content, without the blanks at the end of the stretch."""
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._believe_reasoning(out)
            out.append(Content(kept))

    def _open_response(self, rest: str, out: list[Delta]) -> None:
        if self.state is State.RESPONSE:
            return
        self._leave_for_block(out)
        self.state = State.RESPONSE

    def _close_response(self, out: list[Delta]) -> None:
        if self._may_be_answer and self.state in (State.THINK, State.BETWEEN):
            self._was_answer(out)
        elif self.state is State.THINK:
            self._leave_think(self._head_at)
        elif self.state is not State.RESPONSE:
            return
        self.state = State.BETWEEN

    def _leave_for_block(self, out: list[Delta]) -> None:
        """Another block begins: whatever was open ends here."""
        self._leave_tools(out)
        self._believe_reasoning(out)
        self._leave_think(self._head_at)
        self._blanks = ""

    # -- tools ---------------------------------------------------------------------------------------------------

    def _open_tools(self, rest: str, out: list[Delta]) -> None:
        self._leave_for_block(out)
        self.state = State.TOOLS

    def _close_tools(self, out: list[Delta]) -> None:
        if self.state in _OUTSIDE:
            return
        self._leave_tools(out)
        self.state = State.BETWEEN

    def _leave_tools(self, out: list[Delta]) -> None:
        self._drop_call(out)
        if self.state in (State.TOOLS, State.SKIP, *_IN_CALL):
            self._tools_closed = True

    def _open_call(self, rest: str, out: list[Delta]) -> None:
        self._drop_call(out)
        stray = self.state in _OUTSIDE and self._tools_closed
        name = unescape_attribute(dict(_ATTRIBUTE.findall(rest)).get("tool", ""))
        if self.state is not State.SKIP:
            self._after_skip = State.BETWEEN if stray else State.TOOLS
        if self.state in _OUTSIDE:
            self._leave_for_block(out)
        full = self._max_calls is not None and self.calls >= self._max_calls
        if stray or full or not name or (self.state is State.SKIP and self._after_skip is State.BETWEEN):
            self.state = State.SKIP
            return
        self.state = State.CALL
        self._name = name
        self._started = False
        self._lead = "{"

    def _close_call(self, out: list[Delta]) -> None:
        if self.state is State.SKIP:
            self.state = self._after_skip
        elif self.state in _IN_CALL:
            self._close_value(out)
            self._start(out)
            out.append(ToolCallArguments(self._index, "{}" if self._lead == "{" else "}"))
            out.append(ToolCallEnd(self._index))
            self.calls += 1
            self.state = State.TOOLS

    def _drop_call(self, out: list[Delta]) -> None:
        if self.state in _IN_CALL:
            if self._started:
                out.append(ToolCallDropped(self._index))
            self._value.clear()
            self.state = State.TOOLS

    def _start(self, out: list[Delta]) -> None:
        """Announce the call. Not before its first argument or its close: until then it may still come to nothing."""
        if not self._started:
            self._started = True
            self._index += 1
            out.append(ToolCallStart(self._index, self._name))

    # -- arguments -----------------------------------------------------------------------------------------------

    def _open_argument(self, rest: str, out: list[Delta]) -> None:
        self._close_value(out)
        if self.state is not State.CALL:
            return
        attributes = {key: unescape_attribute(value) for key, value in _ATTRIBUTE.findall(rest)}
        if "key" not in attributes:
            self.state = State.NO_VALUE
            return
        self._start(out)
        self._key = attributes["key"]
        if attributes.get("type", "string") == "string":
            self.state = State.STRING
            self._piece(out, self._key, '"')
        else:
            self.state = State.VALUE

    def _open_json(self, rest: str, out: list[Delta]) -> None:
        self._close_value(out)
        if self.state is State.CALL:
            self._start(out)
            self._key = None
            self.state = State.VALUE

    def _close_value(self, out: list[Delta]) -> None:
        if self.state is State.STRING:
            out.append(ToolCallArguments(self._index, '"'))
        elif self.state is State.VALUE:
            self._convert("".join(self._value), out)
            self._value.clear()
        elif self.state is not State.NO_VALUE:
            return
        self.state = State.CALL

    def _convert(self, text: str, out: list[Delta]) -> None:
        """A value as JSON; what is not strict JSON stays text, as a string."""
        try:
            value = loads(text)
        except ValueError:
            value = text
        if self._key is not None:
            self._piece(out, self._key, dumps(value))
        elif isinstance(value, dict):
            for key, part in value.items():
                self._piece(out, key, dumps(part))
        else:
            self._piece(out, "json", dumps(value))

    def _piece(self, out: list[Delta], key: str, begin: str) -> None:
        out.append(ToolCallArguments(self._index, f"{self._lead}{quote(key)}: {begin}"))
        self._lead = ", "

    # -- the end -------------------------------------------------------------------------------------------------

    def _close_message(self, out: list[Delta]) -> None:
        if self.state is State.DONE:
            return
        self._drop_call(out)
        if self._may_be_answer and (self._force or self.state is State.BETWEEN):
            self._was_answer(out)
        self._believe_reasoning(out)
        self._leave_think(self._head_at)
        self._blanks = ""
        self.state = State.DONE
