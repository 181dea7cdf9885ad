"""The page at / and the data it draws."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import k3stack
from k3stack.errors import UserError
from k3stack.scheduler import Target
from k3stack.server.http_errors import json_response
from k3stack.server.records import Record
from k3stack.server.service import Service

MOST_STREAMS = 200
"""So many of the running streams are listed, the oldest first."""


@functools.cache
def _page() -> tuple[bytes, str]:
    """The page, and a policy under which it runs its own script and nothing else."""
    text = (resources.files("k3stack.server") / "dashboard.html").read_text()
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


async def page(service: Service, request: Request) -> Response:
    """The page itself; it holds no data, and asks for a key where the server wants one."""
    body, policy = _page()
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return Response(body, headers=headers, media_type="text/html; charset=utf-8")


async def data(service: Service, request: Request) -> Response:
    """What the page draws: samples after number ``since``, and the streams that run now."""
    since = request.query_params.get("since", "0")
    if not re.fullmatch(r"[0-9]{1,15}", since):
        raise UserError(f"since is {since!r}; it must be the `next` of an earlier answer", param="since")
    now = time.monotonic()
    target = service.metrics.target
    records = service.records()
    found = {
        "server": {
            "version": k3stack.__version__,
            "model": service.model,
            "context": service.limits.context,
            "phase": service.phase,
            "unavailable": service.unavailable(),
        },
        "target": {"first_s": target.first_s, "token_s": target.token_s},
        "samples": await service.history.since(int(since)),
        "streams": [_stream(record, target, now) for record in records[:MOST_STREAMS]],
        "open": len(records),
    }
    return json_response(found, headers={"cache-control": "no-store"})


def _stream(record: Record, usual: Target, now: float) -> dict[str, Any]:
    """One open request. Seconds count from its arrival; ``tokens`` are those of its longest choice, ``target`` is one
    that it brought along."""
    own = None if record.target == usual else record.target
    return {
        "rid": record.rid,
        "endpoint": record.endpoint,
        "target": None if own is None else {"first_s": own.first_s, "token_s": own.token_s},
        "stream": record.stream,
        "age_s": round(now - record.began, 4),
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.tokens_of_longest_choice,
        "first_token_s": None if record.first_token_s is None else round(record.first_token_s, 4),
    }
