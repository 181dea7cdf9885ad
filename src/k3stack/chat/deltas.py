"""What the output parser says, piece by piece, and the whole that the pieces add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the model's thinking."""

    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the visible answer.

    ``replaces_reasoning``: the model skipped its thinking, and all that was given as reasoning so far was the answer;
    ``text`` is that answer once more. A stream sends it as content; a whole message leaves its reasoning empty.
    """

    text: str
    replaces_reasoning: bool = False


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """Call number ``index`` (from 0) of this output begins."""

    index: int
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the call's arguments; the pieces join to one strict JSON object once the call has ended."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete. Only now may it be carried out."""

    index: int


class ToolCallDropped(msgspec.Struct, frozen=True, gc=False):
    """The call was begun and never finished: its arguments stay cut, and it is none of the output's calls."""

    index: int


Delta = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallDropped


class ToolCall(msgspec.Struct, frozen=True):
    """``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class Parsed(msgspec.Struct, frozen=True):
    """A whole output. ``finish_reason``: stop, tool_calls (a finished output with calls) or length (cut)."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "tool_calls", "length"] | str

    def to_message(self, ids: Iterable[str] | None = None) -> dict[str, Any]:
        """The assistant message to show and to send back; ``ids`` are the calls' ids, in order.

        Rendered in the next prompt it gives the tokens that were generated, if those were well-formed.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            names = list(ids) if ids is not None else [f"{c.name}:{i}" for i, c in enumerate(self.tool_calls)]
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in zip(names, self.tool_calls, strict=True)
            ]
        return message


class Collector:
    """Adds deltas up to a ``Parsed``."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._open: dict[int, tuple[str, list[str]]] = {}
        self._calls: list[ToolCall] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, Content):
                if delta.replaces_reasoning:
                    self._reasoning.clear()
                self._content.append(delta.text)
            elif isinstance(delta, ToolCallStart):
                self._open[delta.index] = (delta.name, [])
            elif isinstance(delta, ToolCallArguments):
                self._open[delta.index][1].append(delta.text)
            else:
                name, parts = self._open.pop(delta.index)
                if isinstance(delta, ToolCallEnd):
                    self._calls.append(ToolCall(name, "".join(parts)))

    def result(self, finish_reason: str) -> Parsed:
        return Parsed("".join(self._reasoning), "".join(self._content), tuple(self._calls), finish_reason)
