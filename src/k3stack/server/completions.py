"""/v1/completions: text or ids in, text out; prompts may come in a list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from k3stack.chat.grammar import build_text_grammar
from k3stack.chat.settings import parse_response_format
from k3stack.chat.tokenizer import Detokenizer
from k3stack.engine.messages import Output, Submit
from k3stack.errors import UserError
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.server import translate
from k3stack.server.body import read_body
from k3stack.server.chat import LONG_PROMPT_CHARS, labels
from k3stack.server.fields import COMPLETION_RULES, CompletionRequest, decode
from k3stack.server.http_errors import json_response
from k3stack.server.many import run_many
from k3stack.server.records import Record
from k3stack.server.service import Service
from k3stack.server.sse import DONE, open_stream, unless_gone
from k3stack.server.usage import completion_logprobs, usage

MOST_PROMPTS = 256
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class TextChoice:
    """One choice of one prompt."""

    detokenizer: Detokenizer
    prompt_ids: tuple[int, ...]
    prompt_text: str | None
    """Given back before the answer where ``echo`` asks for it."""
    scored: list[TokenLogprobs | None] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0
    """Characters given out so far."""

    def feed(self, output: Output) -> str:
        """Text that an output adds."""
        text: str = self.prompt_text or ""
        self.prompt_text = None
        text += self.detokenizer.feed(output.token_ids)
        text += output.tail
        if output.finish_reason is not None:
            text += self.detokenizer.finish()
        self.scored += output.scored
        self.logprobs += output.logprobs
        return text


@dataclass(slots=True)
class CompletionJob:
    """A checked request: one submit a prompt; choice ``i * n + k`` is choice k of prompt i."""

    request: CompletionRequest
    submits: list[Submit]
    record: Record
    created: int
    choices: list[TextChoice]


async def handle(service: Service, request: Request) -> Response:
    """The endpoint."""
    service.check_available()
    body = await read_body(request, service.options)
    decoded = decode(body, CompletionRequest, COMPLETION_RULES)
    translate.check_model(decoded.model, service.names)
    header_id = request.headers.get("x-request-id")
    if len(body) > LONG_PROMPT_CHARS:
        job = await asyncio.to_thread(prepare, service, decoded, header_id)
    else:
        job = prepare(service, decoded, header_id)
    if decoded.stream:
        return await open_stream(
            service, job.record, [s.rid for s in job.submits], frames(service, job), request.receive
        )
    answer = await unless_gone(request.receive, _whole(service, job))
    return (
        Response(status_code=499) if answer is None else json_response(answer, headers={"x-request-id": job.record.rid})
    )


def prepare(service: Service, request: CompletionRequest, header_id: str | None) -> CompletionJob:
    """Check and tokenize. Raises UserError naming the field."""
    prompts = _prompts(service, request)
    rid = translate.request_id(request.rid, header_id, service.engine.open_requests(), "cmpl-")
    wanted = request.logprobs
    if wanted is not None and not 0 <= wanted <= 20:
        raise UserError(f"logprobs is {wanted}; it must be from 0 to 20", param="logprobs")
    grammar = build_text_grammar(parse_response_format(request.response_format), request.regex, request.ebnf)
    submits, choices = [], []
    for number, (ids, text) in enumerate(prompts):
        params = translate.sampling(
            request,
            service.limits,
            max_tokens=translate.room(len(ids), request.max_tokens, service.limits, "max_tokens", "prompt"),
            temperature=service.defaults.temperature,
            top_p=service.defaults.top_p,
            logprobs=wanted is not None,
            top_logprobs=wanted or 0,
        )
        if request.echo and wanted is not None:
            params = msgspec.structs.replace(params, prompt_logprobs_from=0)
        own = rid if len(prompts) == 1 else f"{rid}-{number}"
        submits.append(
            Submit(
                rid=own,
                prompt_ids=ids,
                sampling=params,
                priority=request.priority,
                grammar=grammar,
                whole=not request.stream,
                first_token_target_s=request.target_ttft_s,
                token_target_s=translate.seconds(request.target_tpot_ms),
            )
        )
        for _ in range(request.n):
            shown = Detokenizer(service.tokenizer, show_control=not request.skip_special_tokens)
            choices.append(TextChoice(shown, ids, text if request.echo else None))
    if len(choices) > MOST_PROMPTS:
        raise UserError(f"prompts times n are {len(choices)}; at most {MOST_PROMPTS} a request", param="prompt")
    record = Record(
        rid,
        "completions",
        request.stream,
        prompt_tokens=sum(len(submit.prompt_ids) for submit in submits),
        labels=labels(request),
        target=service.target(request),
    )
    return CompletionJob(request, submits, record, int(time.time()), choices)


def _prompts(service: Service, request: CompletionRequest) -> list[tuple[tuple[int, ...], str]]:
    """Ids and text of each prompt."""
    items = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if len({type(item) for item in items}) > 1:
        raise UserError("prompt mixes texts, ids and lists of ids; it must be of one kind", param="prompt")
    one_prompt = [item for item in items if isinstance(item, int)]
    several = [one_prompt] if one_prompt else [item for item in items if not isinstance(item, int)]
    found = []
    for one in several:
        if isinstance(one, str):
            found.append((tuple(service.tokenizer.encode_text(one)), one))
        else:
            ids = translate.token_ids(one, service.limits.vocab, "prompt")
            found.append((ids, service.tokenizer.decode(ids) if request.echo else ""))
    if not found:
        raise UserError("prompt is an empty list", param="prompt")
    if len(found) > MOST_PROMPTS:
        raise UserError(f"prompt has {len(found)} entries; at most {MOST_PROMPTS}", param="prompt")
    return found


async def _outputs(service: Service, job: CompletionJob) -> AsyncIterator[tuple[int, Output]]:
    """Outputs of all prompts with the number of their choice, as they come."""
    async for number, output in run_many(service, job.submits, job.record):
        yield number * job.request.n + output.choice, output


def _reason(output: Output) -> str:
    return output.finish_reason or "stop"


async def _whole(service: Service, job: CompletionJob) -> dict[str, Any]:
    texts = [""] * len(job.choices)
    ends = ["stop"] * len(job.choices)
    async with service.track(job.record):
        async for number, output in _outputs(service, job):
            texts[number] += job.choices[number].feed(output)
            if output.finish_reason is not None:
                ends[number] = _reason(output)
    choices = []
    for index, choice in enumerate(job.choices):
        entry: dict[str, Any] = {"index": index, "text": texts[index], "finish_reason": ends[index]}
        if job.request.logprobs is not None:
            entry["logprobs"] = _logprobs(service, choice)
        choices.append(entry)
    return {
        "id": job.record.rid,
        "object": "text_completion",
        "created": job.created,
        "model": service.model,
        "choices": choices,
        "usage": usage(job.record),
    }


def _logprobs(service: Service, choice: TextChoice) -> dict[str, Any]:
    """Log-probabilities since the last call, those of an echoed prompt first."""
    items = [*choice.scored, *choice.logprobs]
    tokens = [choice.prompt_ids[i] if i < len(choice.scored) else 0 for i in range(len(items))]
    found = completion_logprobs(items, service.tokenizer, choice.offset, tokens)
    choice.offset += sum(len(text) for text in found["tokens"])
    choice.scored.clear()
    choice.logprobs.clear()
    return found


async def frames(service: Service, job: CompletionJob) -> AsyncIterator[bytes]:
    """Frames of the answer: text as it comes, the reason with the last text of a choice, usage where asked for."""
    head = b'data: {"id":%s,"object":"text_completion","created":%d,"model":%s' % (
        _json(job.record.rid),
        job.created,
        _json(service.model),
    )
    options = job.request.stream_options
    async with service.track(job.record):
        async for number, output in _outputs(service, job):
            choice = job.choices[number]
            text = choice.feed(output)
            if not text and output.finish_reason is None:
                continue
            frame = head + b',"choices":[{"index":%d,"text":%s' % (number, _json(text))
            if job.request.logprobs is not None:
                frame += b',"logprobs":' + _json(_logprobs(service, choice))
            reason = b"null" if output.finish_reason is None else _json(_reason(output))
            frame += b',"finish_reason":' + reason + b"}]"
            if options is not None and options.continuous_usage_stats:
                frame += b',"usage":' + _json(usage(job.record))
            yield frame + b"}\n\n"
    last = b""
    if options is not None and options.include_usage:
        last = head + b',"choices":[],"usage":' + _json(usage(job.record)) + b"}\n\n"
    yield last + DONE
