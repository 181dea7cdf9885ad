"""A chat answer as it comes: frames of chat.completion.chunk, written by hand.

Order for each choice: one frame with the role, then reasoning, content and calls as the parser finds them, one frame
with an empty delta and the finish_reason; after all choices, where asked for, one with usage and no choices.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from k3stack.chat.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from k3stack.engine.messages import Output
from k3stack.server.chat_job import ChatChoice, ChatJob
from k3stack.server.service import Service
from k3stack.server.sse import DONE
from k3stack.server.usage import chat_logprobs, usage

_json = msgspec.json.Encoder().encode


class ChoiceFrames:
    """Writes the frames of one choice. ``head`` is what every frame of the stream begins with."""

    def __init__(self, head: bytes, index: int, job: ChatJob, service: Service) -> None:
        self._job = job
        self._choice: ChatChoice = job.choices[index]
        self._tokenizer = service.tokenizer
        self._open = head + b',"choices":[{"index":%d,"delta":' % index
        self._content = self._open + b'{"content":'
        self._reasoning = self._open + b'{"reasoning_content":'
        options = job.request.stream_options
        self._with_usage = options is not None and options.continuous_usage_stats
        self._plain = not (job.request.logprobs or self._with_usage)

    def role(self) -> bytes:
        """The first frame."""
        return self._open + b'{"role":"assistant","content":""}' + self._close(b"null", logprobs=False)

    def feed(self, output: Output) -> bytes:
        """Frames of one output, none or several."""
        found = b""
        for delta in self._choice.feed(output):
            found += self._frame(delta)
        if output.finish_reason is not None:
            self._job.record.reasoning_tokens += self._choice.parser.reasoning_tokens
            reason = _json(self._choice.finish_reason)
            found += self._open + b"{}" + self._close(reason)
        return found

    def _frame(self, delta: Delta) -> bytes:
        if isinstance(delta, Content):
            return self._content + _json(delta.text) + b"}" + self._close(b"null")
        if isinstance(delta, Reasoning):
            text = _json(delta.text)
            return self._reasoning + text + b',"reasoning":' + text + b"}" + self._close(b"null")
        if isinstance(delta, ToolCallStart):
            head = b'{"tool_calls":[{"index":%d,"id":%s,"type":"function","function":{"name":%s,"arguments":""}}]}' % (
                delta.index,
                _json(self._choice.call_id(delta.index)),
                _json(delta.name),
            )
            return self._open + head + self._close(b"null")
        if isinstance(delta, ToolCallArguments):
            piece = b'{"tool_calls":[{"index":%d,"function":{"arguments":%s}}]}' % (delta.index, _json(delta.text))
            return self._open + piece + self._close(b"null")
        return b""

    def _close(self, reason: bytes, *, logprobs: bool = True) -> bytes:
        """The end of a frame; log-probabilities of the tokens since the last frame go with it."""
        if self._plain:
            return b',"finish_reason":' + reason + b"}]}\n\n"
        found = b""
        if logprobs and self._choice.logprobs:
            found += b',"logprobs":' + _json(chat_logprobs(self._choice.logprobs, self._tokenizer))
            self._choice.logprobs.clear()
        found += b',"finish_reason":' + reason + b"}]"
        if self._with_usage:
            found += b',"usage":' + _json(usage(self._job.record))
        return found + b"}\n\n"


async def frames(service: Service, job: ChatJob) -> AsyncIterator[bytes]:
    """Every frame of the answer. Raises what ends the request before its first token or in its middle."""
    head = b'data: {"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s' % (
        _json(job.record.rid),
        job.created,
        _json(job.model),
    )
    writers = [ChoiceFrames(head, i, job, service) for i in range(len(job.choices))]
    pending = b"".join(writer.role() for writer in writers)
    async with service.track(job.record):
        async for output in service.run(job.submit, job.record):
            pending += writers[output.choice].feed(output)
            if pending:
                yield pending
                pending = b""
    options = job.request.stream_options
    if options is not None and options.include_usage:
        pending = head + b',"choices":[],"usage":' + _json(usage(job.record)) + b"}\n\n"
    yield pending + DONE
