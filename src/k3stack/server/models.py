"""What is served and how it is: /v1/models, /health, /metrics."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from k3stack.server.http_errors import NotFound, json_response
from k3stack.server.service import Service

_STARTED = int(time.time())


def _entry(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": _STARTED,
        "owned_by": "k3stack",
        "root": service.engine_options.model_path,
        "parent": None,
        "max_model_len": service.limits.context,
    }


async def list_models(service: Service, request: Request) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_entry(service)]})


async def one_model(service: Service, request: Request) -> Response:
    """The model by name, or 404."""
    name = request.path_params["name"]
    if name not in service.names:
        raise NotFound(f"there is no model {name!r} here; {service.model!r} is served", param="model")
    return json_response(_entry(service))


async def health(service: Service, request: Request) -> Response:
    """200 while requests are taken; 503 with the reason while starting, draining, or without an engine."""
    why = service.unavailable()
    if why is None:
        return json_response({"status": "ready"})
    status = service.phase if service.phase != "ready" else "broken"
    return json_response({"status": status, "reason": why}, 503)


async def metrics(service: Service, request: Request) -> Response:
    """The exposition in Prometheus' text format."""
    return Response(service.metrics.render(await service.stats()), headers={"content-type": CONTENT_TYPE_LATEST})
