"""/v1/chat/completions: from the body to a prompt, and from the outputs to an answer in one piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from k3stack.chat.calls import ToolCallIds
from k3stack.chat.grammar import build_grammar
from k3stack.chat.parser import OutputParser
from k3stack.chat.prompt import declared_tools, encode, is_continued, render, starts_in_think
from k3stack.chat.settings import OutputGrammar, ToolChoice, parse_response_format, parse_tool_choice
from k3stack.engine.messages import Submit
from k3stack.server import translate
from k3stack.server.body import read_body
from k3stack.server.chat_job import ChatChoice, ChatJob, WholeAnswer
from k3stack.server.chat_stream import frames
from k3stack.server.fields import CHAT_RULES, ChatRequest, SamplingFields, decode
from k3stack.server.http_errors import json_response
from k3stack.server.records import Record
from k3stack.server.service import Service
from k3stack.server.sse import open_stream, unless_gone
from k3stack.server.usage import chat_logprobs, usage

LONG_PROMPT_CHARS = 20_000
"""Longer conversations are tokenized in a thread, so that other streams go on meanwhile."""


async def handle(service: Service, request: Request) -> Response:
    """The endpoint."""
    service.check_available()
    body = await read_body(request, service.options)
    job = await prepare(service, body, request.headers.get("x-request-id"))
    if job.request.stream:
        return await open_stream(service, job.record, [job.submit.rid], frames(service, job), request.receive)
    answer = await unless_gone(request.receive, _whole(service, job))
    return (
        Response(status_code=499) if answer is None else json_response(answer, headers={"x-request-id": job.record.rid})
    )


async def prepare(service: Service, body: bytes, header_id: str | None) -> ChatJob:
    """Decode, check, render and tokenize. Raises UserError naming the field."""
    request = decode(body, ChatRequest, CHAT_RULES)
    translate.check_model(request.model, service.names)
    if len(body) > LONG_PROMPT_CHARS:
        return await asyncio.to_thread(prepare_request, service, request, header_id)
    return prepare_request(service, request, header_id)


def prepare_request(
    service: Service, request: ChatRequest, header_id: str | None, *, endpoint: str = "chat", prefix: str = "chatcmpl-"
) -> ChatJob:
    """Check, render and tokenize a decoded request. ``prefix`` begins a fresh id."""
    thinking = translate.thinking(request)
    segments = render(
        request.messages,
        tools=request.tools,
        thinking=thinking.on,
        reasoning_effort=thinking.effort if thinking.on else None,
        tool_choice=request.tool_choice,
        response_format=request.response_format,
        continue_final=request.continue_final_message,
    )
    declared = declared_tools(request.messages, request.tools)
    choice = parse_tool_choice(request.tool_choice, declared)
    ids = tuple(encode(segments, service.tokenizer))
    asked, limit_field = translate.output_limit(request)
    rid = translate.request_id(request.rid, header_id, service.engine.open_requests(), prefix)
    params = translate.sampling(
        request,
        service.limits,
        max_tokens=translate.room(len(ids), asked, service.limits, limit_field, "messages"),
        temperature=service.defaults.temperature,
        top_p=service.defaults.top_p,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
    )
    in_think = starts_in_think(segments)
    most_calls = None if request.parallel_tool_calls else 1
    if not declared or choice.mode == "none":
        most_calls = 0
    call_ids = ToolCallIds(request.messages)
    choices = [
        ChatChoice(
            OutputParser(
                service.tokenizer,
                in_think,
                max_calls=most_calls,
                force_content=translate.force_content(request),
            ),
            call_ids,
        )
        for _ in range(params.n)
    ]
    submit = Submit(
        rid=rid,
        prompt_ids=ids,
        sampling=params,
        priority=request.priority,
        stop_scope="content",
        thinking=in_think,
        grammar=_grammar(service, request, choice, all_tools(request), in_think),
        # A call comes in one piece; what is thought before it is streamed.
        whole=not request.stream or (choice.forced and not in_think),
        first_token_target_s=request.target_ttft_s,
        token_target_s=translate.seconds(request.target_tpot_ms),
    )
    record = Record(
        rid, endpoint, request.stream, prompt_tokens=len(ids), labels=labels(request), target=service.target(request)
    )
    return ChatJob(request, submit, record, service.model, int(time.time()), choices)


def _grammar(
    service: Service, request: ChatRequest, choice: ToolChoice, tools: Sequence[Mapping[str, Any]], in_think: bool
) -> OutputGrammar | None:
    """What the answer must match; None where it is free."""
    return build_grammar(
        service.tokenizer,
        in_think=in_think,
        tools=tools,
        choice=choice,
        form=parse_response_format(request.response_format),
        parallel=request.parallel_tool_calls,
        regex=request.regex,
        ebnf=request.ebnf,
        prefix=_continued_ids(service, request),
    )


def _continued_ids(service: Service, request: ChatRequest) -> tuple[int, ...]:
    """Ids of the answer that the request brings along, where it goes on with its last message."""
    if not is_continued(request.messages, request.continue_final_message):
        return ()
    content = request.messages[-1].get("content") or ()
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return tuple(token for part in parts for token in service.tokenizer.encode_text(part))


def all_tools(request: ChatRequest) -> list[Mapping[str, Any]]:
    """The tools of the request and those that system messages add."""
    found: list[Mapping[str, Any]] = list(request.tools or ())
    for message in request.messages:
        found += message.get("tools") or ()
    return found


def labels(request: SamplingFields) -> dict[str, Any]:
    """Fields that only name things; they go to the request log."""
    names = ("user", "metadata", "safety_identifier", "prompt_cache_key")
    return {name: value for name in names if (value := getattr(request, name)) is not None}


async def _whole(service: Service, job: ChatJob) -> dict[str, Any]:
    """The answer in one piece, made of the same deltas that a stream would send."""
    answers = [WholeAnswer(choice) for choice in job.choices]
    async with service.track(job.record):
        async for output in service.run(job.submit, job.record):
            answers[output.choice].add(output)
            if output.finish_reason is not None:
                job.record.reasoning_tokens += job.choices[output.choice].parser.reasoning_tokens
    choices = []
    for index, (choice, answer) in enumerate(zip(job.choices, answers, strict=True)):
        entry = {"index": index, "message": answer.message(), "finish_reason": choice.finish_reason}
        if job.request.logprobs:
            entry["logprobs"] = chat_logprobs(choice.logprobs, service.tokenizer)
        choices.append(entry)
    return {
        "id": job.record.rid,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "usage": usage(job.record),
    }
