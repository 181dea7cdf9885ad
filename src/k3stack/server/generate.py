"""/generate, SGLang's native endpoint: text or ids in, text and ids out, with log-probabilities of prompt and output.

Requests and answers have SGLang's shape, so that its clients work. A log-probability is a triple: value, token id, and
its text or null.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from k3stack.chat.grammar import build_text_grammar
from k3stack.chat.settings import OutputGrammar, parse_response_format
from k3stack.chat.tokenizer import Detokenizer, Tokenizer
from k3stack.engine.messages import Output, Submit
from k3stack.errors import UserError
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.server import translate
from k3stack.server.body import read_body
from k3stack.server.chat import LONG_PROMPT_CHARS
from k3stack.server.fields import decode
from k3stack.server.http_errors import json_response
from k3stack.server.many import run_many
from k3stack.server.native_fields import GENERATE_RULES, GenerateRequest, NativeSampling, sampling_fields
from k3stack.server.records import Record
from k3stack.server.service import Service
from k3stack.server.sse import DONE, event, open_stream, unless_gone
from k3stack.server.usage import finite

MOST_PROMPTS = 1024
Triple = tuple[float | None, int, str | None]


@dataclass(slots=True)
class NativeChoice:
    """What one choice of one prompt has given so far."""

    number: int
    submit: Submit
    params: NativeSampling
    detokenizer: Detokenizer
    text: str = ""
    ids: list[int] = field(default_factory=list)
    scored: list[TokenLogprobs | None] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Output | None = None

    def feed(self, output: Output) -> None:
        """Take one output. With ``max_new_tokens`` 0 only the prompt is looked at."""
        self.scored += output.scored
        if self.params.max_new_tokens > 0:
            self.ids += output.token_ids
            self.logprobs += output.logprobs
            self.text += self.detokenizer.feed(output.token_ids) + output.tail
            if output.finish_reason is not None:
                self.text += self.detokenizer.finish()
        if output.finish_reason is not None:
            self.last = output


@dataclass(slots=True)
class GenerateJob:
    """A checked request. ``single``: the answer is an object, not a list."""

    request: GenerateRequest
    submits: list[Submit]
    choices: list[list[NativeChoice]]
    record: Record
    single: bool


async def handle(service: Service, request: Request) -> Response:
    """The endpoint."""
    service.check_available()
    body = await read_body(request, service.options)
    decoded = decode(body, GenerateRequest, GENERATE_RULES)
    header_id = request.headers.get("x-request-id")
    if len(body) > LONG_PROMPT_CHARS:
        job = await asyncio.to_thread(prepare, service, decoded, header_id)
    else:
        job = prepare(service, decoded, header_id)
    if decoded.stream:
        rids = [submit.rid for submit in job.submits]
        return await open_stream(service, job.record, rids, frames(service, job), request.receive)
    answer = await unless_gone(request.receive, _whole(service, job))
    return Response(status_code=499) if answer is None else json_response(answer)


def prepare(service: Service, request: GenerateRequest, header_id: str | None) -> GenerateJob:
    """Check and tokenize. Raises UserError naming the field."""
    prompts, single = _prompts(service, request)
    params = _params(request, len(prompts))
    rids = _rids(service, request, header_id, len(prompts))
    submits, choices = [], []
    for ids, native, rid in zip(prompts, params, rids, strict=True):
        submit = _submit(service, request, ids, native, rid)
        submits.append(submit)
        choices.append([
            NativeChoice(
                choice, submit, native, Detokenizer(service.tokenizer, show_control=not native.skip_special_tokens)
            )
            for choice in range(native.n)
        ])  # fmt: skip
    tokens = sum(map(len, prompts))
    record = Record(rids[0], "generate", request.stream, prompt_tokens=tokens, target=service.target(request))
    return GenerateJob(request, submits, choices, record, single and params[0].n == 1)


def _prompts(service: Service, request: GenerateRequest) -> tuple[list[tuple[int, ...]], bool]:
    """Ids of each prompt, and whether there is one that is no list."""
    if (request.text is None) == (request.input_ids is None):
        raise UserError("give either text or input_ids", param="text")
    if isinstance(request.text, str):
        return [tuple(service.tokenizer.encode_text(request.text))], True
    if request.text is not None:
        found = [tuple(service.tokenizer.encode_text(text)) for text in request.text]
    else:
        items = request.input_ids or []
        flat = [item for item in items if isinstance(item, int)]
        if flat and len(flat) == len(items):
            return [translate.token_ids(flat, service.limits.vocab, "input_ids")], True
        if flat:
            raise UserError("input_ids mixes ids and lists of ids", param="input_ids")
        lists = [item for item in items if not isinstance(item, int)]
        found = [translate.token_ids(one, service.limits.vocab, "input_ids") for one in lists]
    if not 0 < len(found) <= MOST_PROMPTS:
        param = "text" if request.text is not None else "input_ids"
        raise UserError(f"{param} has {len(found)} prompts; it must have from 1 to {MOST_PROMPTS}", param=param)
    return found, False


def _params(request: GenerateRequest, count: int) -> list[NativeSampling]:
    given = request.sampling_params
    if not isinstance(given, list):
        return [sampling_fields(given)] * count
    if len(given) != count:
        raise UserError(f"sampling_params has {len(given)} entries for {count} prompts", param="sampling_params")
    return [sampling_fields(one) for one in given]


def _rids(service: Service, request: GenerateRequest, header_id: str | None, count: int) -> list[str]:
    given = request.rid
    if isinstance(given, list):
        if len(given) != count or len(set(given)) != count:
            raise UserError(f"rid must have {count} different entries, one a prompt", param="rid")
        return [translate.request_id(one, None, (), "") for one in given]
    first = translate.request_id(given, header_id, service.engine.open_requests(), "gen-")
    return [first] if count == 1 else [f"{first}-{number}" for number in range(count)]


def _submit(
    service: Service, request: GenerateRequest, ids: tuple[int, ...], native: NativeSampling, rid: str
) -> Submit:
    asked = max(1, native.max_new_tokens)
    translate.room(len(ids), asked, service.limits, "sampling_params.max_new_tokens", "input_ids")
    start = request.logprob_start_len
    if not -1 <= start <= len(ids):
        raise UserError(
            f"logprob_start_len is {start}; it must be from -1 to the prompt's length, {len(ids)}",
            param="logprob_start_len",
        )
    params = translate.sampling(
        native,
        service.limits,
        max_tokens=asked,
        temperature=1.0,
        top_p=1.0,
        logprobs=request.return_logprob,
        top_logprobs=request.top_logprobs_num if request.return_logprob else 0,
    )
    if request.return_logprob and 0 <= start < len(ids):
        params = msgspec.structs.replace(params, prompt_logprobs_from=start)
    return Submit(
        rid=rid,
        prompt_ids=ids,
        sampling=params,
        priority=request.priority,
        grammar=_grammar(native),
        first_token_target_s=request.target_ttft_s,
        token_target_s=translate.seconds(request.target_tpot_ms),
    )


def _grammar(native: NativeSampling) -> OutputGrammar | None:
    form = None
    if native.json_schema is not None:
        try:
            schema = msgspec.json.decode(native.json_schema)
        except msgspec.DecodeError as e:
            param = "sampling_params.json_schema"
            raise UserError(f"{param} is not JSON: {e}", param=param) from None
        form = parse_response_format({"type": "json_schema", "json_schema": {"schema": schema}})
    return build_text_grammar(form, native.regex, native.ebnf)


async def _whole(service: Service, job: GenerateJob) -> Any:
    async with service.track(job.record):
        async for number, output in run_many(service, job.submits, job.record):
            job.choices[number][output.choice].feed(output)
    answers = [_answer(service, job, choice) for choices in job.choices for choice in choices]
    return answers[0] if job.single else answers


async def frames(service: Service, job: GenerateJob) -> AsyncIterator[bytes]:
    """Frames with all text and ids so far; log-probabilities come with the last frame of a choice."""
    index: dict[tuple[str, int], int] = {}
    for choices in job.choices:
        for choice in choices:
            index[choice.submit.rid, choice.number] = len(index)
    async with service.track(job.record):
        async for number, output in run_many(service, job.submits, job.record):
            choice = job.choices[number][output.choice]
            choice.feed(output)
            answer = _answer(service, job, choice)
            if not job.single:
                answer["index"] = index[choice.submit.rid, choice.number]
            yield event(answer)
    yield DONE


def _answer(service: Service, job: GenerateJob, choice: NativeChoice) -> dict[str, Any]:
    last = choice.last
    meta: dict[str, Any] = {
        "id": choice.submit.rid,
        "finish_reason": _finish(choice),
        "prompt_tokens": len(choice.submit.prompt_ids),
        "completion_tokens": len(choice.ids) if last is None or not choice.ids else last.output_tokens,
        "cached_tokens": 0 if last is None else last.cached_tokens,
        "weight_version": "default",
        "e2e_latency": time.monotonic() - job.record.began,
    }
    if job.request.return_logprob and last is not None:
        meta |= _logprobs(job.request, choice, service.tokenizer)
    return {"text": choice.text, "output_ids": choice.ids, "meta_info": meta}


def _finish(choice: NativeChoice) -> dict[str, Any] | None:
    last = choice.last
    if last is None:
        return None
    if last.finish_reason == "stop":
        return {"type": "stop", "matched": last.matched_stop}
    if last.finish_reason == "length":
        return {"type": "length", "length": choice.params.max_new_tokens}
    return {"type": "abort", "message": last.message or "aborted"}


def _logprobs(request: GenerateRequest, choice: NativeChoice, tokenizer: Tokenizer) -> dict[str, Any]:
    """SGLang's four lists. The prompt's begin at ``logprob_start_len``; nothing precedes position 0: null there."""

    def triple(logprob: float | None, token: int) -> Triple:
        text = tokenizer.decode((token,)) if request.return_text_in_logprobs else None
        return (None if logprob is None else finite(logprob), token, text)

    def tops(items: Sequence[TokenLogprobs | None]) -> list[list[Triple] | None]:
        return [
            None if item is None else [triple(v, t) for v, t in zip(item.top_logprobs, item.top_ids, strict=True)]
            for item in items
        ]

    prompt = choice.submit.prompt_ids
    start = len(prompt) - len(choice.scored)
    found: dict[str, Any] = {
        "input_token_logprobs": [
            triple(None if item is None else item.logprob, prompt[start + i]) for i, item in enumerate(choice.scored)
        ],
        "output_token_logprobs": [triple(item.logprob, item.token) for item in choice.logprobs],
    }
    if request.top_logprobs_num:
        found |= {"input_top_logprobs": tops(choice.scored), "output_top_logprobs": tops(choice.logprobs)}
    return found
