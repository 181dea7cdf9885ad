"""/v1/messages: the same chats in Anthropic's form, whole and as a stream of events, and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from k3stack.chat.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from k3stack.engine.messages import Output
from k3stack.errors import Unavailable, UserError
from k3stack.server import translate
from k3stack.server.body import read_body
from k3stack.server.chat import LONG_PROMPT_CHARS, prepare_request
from k3stack.server.chat_job import ChatChoice, ChatJob, WholeAnswer
from k3stack.server.fields import decode
from k3stack.server.http_errors import anthropic_error, json_response
from k3stack.server.messages_convert import MESSAGES_RULES, MessagesRequest, to_chat
from k3stack.server.records import Record
from k3stack.server.service import Service
from k3stack.server.sse import open_stream, unless_gone

_json = msgspec.json.Encoder().encode


async def handle(service: Service, request: Request) -> Response:
    """The endpoint."""
    service.check_available()
    job = await _job(service, request)
    if job.request.stream:
        return await open_stream(
            service, job.record, [job.submit.rid], frames(service, job), request.receive, anthropic_frame
        )
    answer = await unless_gone(request.receive, _whole(service, job))
    return Response(status_code=499) if answer is None else json_response(answer)


async def count_tokens(service: Service, request: Request) -> Response:
    """Tokens of the prompt that a request would become."""
    job = await _job(service, request, counting=True)
    return json_response({"input_tokens": len(job.submit.prompt_ids)})


async def _job(service: Service, request: Request, *, counting: bool = False) -> ChatJob:
    body = await read_body(request, service.options)
    decoded = decode(body, MessagesRequest, MESSAGES_RULES)
    translate.check_model(decoded.model, service.names)
    if decoded.max_tokens is None and not counting:
        raise UserError("max_tokens is missing", param="max_tokens")
    if counting:
        decoded.max_tokens = None
    header_id = request.headers.get("x-request-id")

    def make() -> ChatJob:
        return prepare_request(service, to_chat(decoded), header_id, endpoint="messages", prefix="msg_")

    return await asyncio.to_thread(make) if len(body) > LONG_PROMPT_CHARS else make()


def usage(record: Record) -> dict[str, Any]:
    """Counts in Anthropic's words: ``input_tokens`` leaves out what was read from the cache."""
    cached = min(record.cached_tokens, record.prompt_tokens)
    return {
        "input_tokens": record.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": record.output_tokens,
    }


@dataclass(slots=True)
class Ending:
    """Why an answer ended, in Anthropic's words."""

    stop_reason: str = "end_turn"
    stop_sequence: str | None = None

    def take(self, choice: ChatChoice, output: Output) -> None:
        """Note the last output."""
        if choice.finish_reason == "tool_calls":
            self.stop_reason = "tool_use"
        elif choice.finish_reason == "length":
            self.stop_reason = "max_tokens"
        elif choice.finish_reason == "abort":
            raise Unavailable("the request was aborted")
        elif isinstance(output.matched_stop, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", output.matched_stop


def _tool_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


async def _whole(service: Service, job: ChatJob) -> dict[str, Any]:
    choice, ending = job.choices[0], Ending()
    answer = WholeAnswer(choice)
    async with service.track(job.record):
        async for output in service.run(job.submit, job.record):
            answer.add(output)
            if output.finish_reason is not None:
                job.record.reasoning_tokens = choice.parser.reasoning_tokens
                ending.take(choice, output)
    message = answer.message()
    content: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = msgspec.Raw(function["arguments"].encode())
        content.append({"type": "tool_use", "id": _tool_id(), "name": function["name"], "input": arguments})
    return {
        "id": job.record.rid,
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": content,
        "stop_reason": ending.stop_reason,
        "stop_sequence": ending.stop_sequence,
        "usage": usage(job.record),
    }


def frame(kind: str, body: dict[str, Any]) -> bytes:
    """One event with its name."""
    return b"event: " + kind.encode() + b"\ndata: " + _json({"type": kind, **body}) + b"\n\n"


def anthropic_frame(error: dict[str, Any], status: int) -> bytes:
    """The event of a stream that breaks off."""
    return b"event: error\ndata: " + _json(anthropic_error(error["message"], status)) + b"\n\n"


@dataclass(slots=True)
class Blocks:
    """Opens and closes content blocks as deltas come: one at a time, numbered from 0."""

    index: int = -1
    kind: str | None = None
    _prefix: bytes = field(default=b"")

    def feed(self, delta: Delta) -> bytes:
        """Events of one delta."""
        if isinstance(delta, Content):
            return self._piece("text", {"type": "text", "text": ""}, b'"text_delta","text":', delta.text)
        if isinstance(delta, Reasoning):
            thought = {"type": "thinking", "thinking": "", "signature": ""}
            return self._piece("thinking", thought, b'"thinking_delta","thinking":', delta.text)
        if isinstance(delta, ToolCallStart):
            block: dict[str, Any] = {"type": "tool_use", "id": _tool_id(), "name": delta.name, "input": {}}
            return self._open("tool_use", block, b'"input_json_delta","partial_json":')
        if isinstance(delta, ToolCallArguments):
            return self._prefix + _json(delta.text) + b"}}\n\n"
        return self.close()

    def _piece(self, kind: str, block: dict[str, Any], head: bytes, text: str) -> bytes:
        opened = b"" if self.kind == kind else self._open(kind, block, head)
        return opened + self._prefix + _json(text) + b"}}\n\n"

    def _open(self, kind: str, block: dict[str, Any], head: bytes) -> bytes:
        closed = self.close()
        self.index += 1
        self.kind = kind
        self._prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":' % self.index
            + head
        )
        return closed + frame("content_block_start", {"index": self.index, "content_block": block})

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self.kind is None:
            return b""
        self.kind = None
        return frame("content_block_stop", {"index": self.index})


async def frames(service: Service, job: ChatJob) -> AsyncIterator[bytes]:
    """Every event of the answer."""
    choice, ending, blocks = job.choices[0], Ending(), Blocks()
    start: dict[str, Any] = {
        "id": job.record.rid,
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(job.record),
    }
    pending = frame("message_start", {"message": start})
    async with service.track(job.record):
        async for output in service.run(job.submit, job.record):
            for delta in choice.feed(output):
                pending += blocks.feed(delta)
            if output.finish_reason is not None:
                job.record.reasoning_tokens = choice.parser.reasoning_tokens
                ending.take(choice, output)
            if pending:
                yield pending
                pending = b""
    last = {"stop_reason": ending.stop_reason, "stop_sequence": ending.stop_sequence}
    yield (
        pending
        + blocks.close()
        + frame("message_delta", {"delta": last, "usage": usage(job.record)})
        + frame("message_stop", {})
    )
