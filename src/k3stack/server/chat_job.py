"""One chat request on its way: what was asked, and for each choice the parser and what it has found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from k3stack.chat.calls import ToolCallIds
from k3stack.chat.deltas import Collector, Content, Delta, ToolCallEnd, ToolCallStart
from k3stack.chat.parser import OutputParser
from k3stack.engine.messages import Output, Submit
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.server.fields import ChatRequest
from k3stack.server.records import Record


@dataclass(slots=True)
class ChatChoice:
    """One choice: its parser, its calls, and log-probabilities that have not been given out."""

    parser: OutputParser
    call_ids: ToolCallIds
    names: dict[int, str] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    """Indices of the calls that have ended well."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = "stop"

    def feed(self, output: Output) -> list[Delta]:
        """The deltas of one output; with the last one ``finish_reason`` is set."""
        deltas = self.parser.feed(output.token_ids) if output.token_ids else []
        if output.tail:
            deltas.append(Content(output.tail))
        if output.finish_reason is not None:
            deltas += self.parser.finish(output.finish_reason)
            self.finish_reason = self.parser.finish_reason
        if output.logprobs:
            self.logprobs += output.logprobs
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                self.names[delta.index] = delta.name
            elif isinstance(delta, ToolCallEnd):
                self.complete.append(delta.index)
        return deltas

    def call_id(self, index: int) -> str:
        """Id of the call with that index in this answer."""
        return self.call_ids.id(index, self.names[index])


@dataclass(slots=True)
class ChatJob:
    """A checked chat request, ready for the engine."""

    request: ChatRequest
    submit: Submit
    record: Record
    model: str
    created: int
    choices: list[ChatChoice]


class WholeAnswer:
    """The deltas of one choice, added up to a message."""

    def __init__(self, choice: ChatChoice) -> None:
        self._choice = choice
        self._collector = Collector()

    def add(self, output: Output) -> None:
        """Take one output."""
        self._collector.add(self._choice.feed(output))

    def message(self) -> dict[str, Any]:
        """The assistant message; members without content are left out, save ``content`` itself."""
        parsed = self._collector.result(self._choice.finish_reason)
        message = parsed.to_message([self._choice.call_id(index) for index in self._choice.complete])
        if (reasoning := message.get("reasoning_content")) is not None:
            message["reasoning"] = reasoning  # by the name that vLLM gives it
        for index, call in enumerate(message.get("tool_calls", ())):
            call["index"] = index
        return message
