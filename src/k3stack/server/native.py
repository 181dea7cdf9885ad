"""SGLang's endpoints around generation: facts of the server, load, cache, abort, and a health check that generates."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import k3stack
from k3stack.config.sampling import SamplingParams
from k3stack.engine.messages import Submit
from k3stack.errors import K3Error, UserError
from k3stack.server.body import read_body
from k3stack.server.fields import FieldRules, decode
from k3stack.server.http_errors import json_response
from k3stack.server.native_fields import AbortRequest
from k3stack.server.records import Record
from k3stack.server.service import Service
from k3stack.server.translate import fresh

PROBE_S = 30.0
"""A generation that has not come by then means that the server is not well."""
LONGEST_FLUSH_WAIT_S = 600.0


async def model_info(service: Service, request: Request) -> Response:
    """What is served, as routers ask for it."""
    options = service.engine_options
    return json_response({
        "model_path": options.model_path,
        "served_model_name": service.model,
        "tokenizer_path": options.tokenizer_path or options.model_path,
        "is_generation": True,
        "preferred_sampling_params": dataclasses.asdict(service.defaults),
        "weight_version": "default",
        "load_format": options.load_format,
        "reasoning_parser": "kimi_k3",
        "tool_call_parser": "kimi_k3",
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": service.geometry.family,
        "architectures": ["KimiK3ForConditionalGeneration"],
        "max_model_len": service.limits.context,
    })  # fmt: skip


async def server_info(service: Service, request: Request) -> Response:
    """Every resolved option, facts of the engine, and its numbers. Keys are not among them."""
    options = {**dataclasses.asdict(service.engine_options), **dataclasses.asdict(service.options)}
    for secret in ("api_key", "api_key_file"):
        options.pop(secret)
    info = service.engine.info
    stats = await service.stats()
    load = load_of(service, stats)
    tokens = _tokens_alone(info)
    return json_response({
        **options,
        "served_model_name": service.model,
        "tokenizer_path": options["tokenizer_path"] or options["model_path"],
        "dp_size": 1,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "load_balance_method": "round_robin",
        "context_length": service.limits.context,
        "max_total_num_tokens": tokens,
        "max_req_input_len": service.limits.context - 1,
        "status": service.phase,
        "version": k3stack.__version__,
        "engine_info": info,
        "internal_states": [
            {
                "effective_max_running_requests_per_dp": info.get("max_running"),
                "memory_usage": info.get("pools", {}).get("actual", {}),
                "load": load,
                **({"exchanges": stats["exchanges"]} if "exchanges" in stats else {}),
            }
        ],
    })  # fmt: skip


def _tokens_alone(info: Mapping[str, Any]) -> int:
    return int(info.get("pools", {}).get("actual", {}).get("tokens_alone", 0))


def load_of(service: Service, stats: Mapping[str, Any]) -> dict[str, Any]:
    """How busy the server is, in the words of SGLang's load reports."""
    scheduler, memory = stats.get("scheduler", {}), stats.get("memory", {})
    running = sum(scheduler.get(key, 0) for key in ("prefilling", "decoding", "finishing"))
    waiting = scheduler.get("waiting", 0)
    used = memory.get("pages_running", 0) * memory.get("page_tokens", 0)
    total = _tokens_alone(service.engine.info)
    opens = memory.get("opens", 0)
    return {
        "dp_rank": 0,
        "num_reqs": running + waiting,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_tokens": used,
        "num_used_tokens": used,
        "max_total_num_tokens": total,
        "token_usage": round(used / total, 6) if total else 0.0,
        "cache_hit_rate": round(memory.get("hits", 0) / opens, 6) if opens else 0.0,
        "max_running_requests": service.engine.info.get("max_running"),
    }


async def get_load(service: Service, request: Request) -> Response:
    """One entry a data-parallel rank: one."""
    return json_response([load_of(service, await service.stats())])


async def loads(service: Service, request: Request) -> Response:
    """The same with a timestamp and sums."""
    entry = load_of(service, await service.stats())
    names = ("num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens")
    return json_response({
        "timestamp": time.time(),
        "version": k3stack.__version__,
        "dp_rank_count": 1,
        "loads": [entry],
        "aggregate": {f"total_{name.removeprefix('num_')}": entry[name] for name in names},
    })  # fmt: skip


async def flush_cache(service: Service, request: Request) -> Response:
    """Drop what nothing uses. ``timeout`` waits that many seconds for running requests; 400 while any is left."""
    text = request.query_params.get("timeout", "0")
    try:
        timeout = float(text)
    except ValueError:
        raise UserError(f"timeout is {text!r}; it must be a number of seconds", param="timeout") from None
    if not 0 <= timeout <= LONGEST_FLUSH_WAIT_S:
        raise UserError(f"timeout is {text}; it must be from 0 to {LONGEST_FLUSH_WAIT_S:g}", param="timeout")
    service.check_available()
    deadline = time.monotonic() + timeout
    while not await service.engine.flush():
        if time.monotonic() >= deadline:
            raise UserError(f"requests are running ({service.open}): nothing was dropped; try ?timeout=SECONDS")
        await asyncio.sleep(0.05)
    return Response("Cache flushed.\n", media_type="text/plain")


async def abort_request(service: Service, request: Request) -> Response:
    """End a request by its id, or all of them. Ended and unknown ones are no error."""
    body = await read_body(request, service.options)
    asked = decode(body, AbortRequest, FieldRules({}, {}))
    if asked.rid is None and not asked.abort_all:
        raise UserError("give rid, or abort_all: true", param="rid")
    for rid in service.engine.open_requests():
        # One request of the API with several prompts has ids rid-0, rid-1 ... in the engine.
        own = asked.rid is not None and (rid == asked.rid or rid.rpartition("-")[0] == asked.rid)
        if asked.abort_all or own:
            await service.engine.abort(rid)
    return Response(status_code=200)


async def health_generate(service: Service, request: Request) -> Response:
    """200 when one token can be generated within ``PROBE_S`` seconds, else 503."""
    service.check_available()
    record = Record(fresh("probe-"), "health_generate", stream=False, prompt_tokens=1)
    probe = Submit(
        rid=record.rid,
        prompt_ids=tuple(service.tokenizer.encode_text("0")),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        priority=2**30,
    )
    try:
        async with asyncio.timeout(PROBE_S), service.track(record):
            async for _ in service.run(probe, record):
                pass
    except (TimeoutError, K3Error) as e:
        return json_response({"status": "unwell", "reason": str(e) or f"no token within {PROBE_S:g} s"}, 503)
    return json_response({"status": "ready"})
