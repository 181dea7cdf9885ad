"""The HTTP application: which path is answered by what, keys, and how errors look."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from k3stack.errors import K3Error
from k3stack.server import chat, completions, dashboard, generate, messages_api, models, native, tokenize
from k3stack.server.access import KeyGate
from k3stack.server.http_errors import error_body, error_object, error_response, json_response
from k3stack.server.schemas import openapi_of
from k3stack.server.service import Service
from k3stack.server.tracing import TraceParent

log = logging.getLogger("k3stack.server")

Handler = Callable[[Service, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler, str], ...] = (
    ("POST", "/v1/chat/completions", chat.handle, "A chat answer, whole or as a stream"),
    ("POST", "/v1/completions", completions.handle, "Text that goes on from a prompt"),
    ("POST", "/v1/messages", messages_api.handle, "A chat answer in Anthropic's form"),
    ("POST", "/v1/messages/count_tokens", messages_api.count_tokens, "Tokens of the prompt it would become"),
    ("POST", "/generate", generate.handle, "Text and ids with log-probabilities, in SGLang's form"),
    ("POST", "/tokenize", tokenize.tokenize, "Token ids of a text or a conversation"),
    ("POST", "/v1/tokenize", tokenize.tokenize, "The same"),
    ("POST", "/detokenize", tokenize.detokenize, "Text of token ids"),
    ("POST", "/v1/detokenize", tokenize.detokenize, "The same"),
    ("GET", "/model_info", native.model_info, "What is served, for routers"),
    ("GET", "/get_model_info", native.model_info, "The same, by its old name"),
    ("GET", "/server_info", native.server_info, "Every option, facts of the engine, its load"),
    ("GET", "/get_server_info", native.server_info, "The same, by its old name"),
    ("GET", "/get_load", native.get_load, "How busy the server is"),
    ("GET", "/v1/loads", native.loads, "The same with a timestamp and sums"),
    ("GET", "/flush_cache", native.flush_cache, "Drop cached prefixes that nothing uses"),
    ("POST", "/flush_cache", native.flush_cache, "Drop cached prefixes that nothing uses"),
    ("POST", "/abort_request", native.abort_request, "End a request by its id, or all"),
    ("GET", "/health_generate", native.health_generate, "200 when a token can be generated, else 503"),
    ("GET", "/v1/models", models.list_models, "The served model"),
    ("GET", "/v1/models/{name:path}", models.one_model, "The served model, by name"),
    ("GET", "/health", models.health, "200 while requests are taken, else 503"),
    ("GET", "/metrics", models.metrics, "Counters and gauges for Prometheus"),
    ("GET", "/", dashboard.page, "A page to look at: memory, queue, streams, times"),
    ("GET", "/dashboard/data", dashboard.data, "What that page draws"),
)


def build_app(service: Service) -> FastAPI:
    """The application of one server. Starting and stopping the engine is ``run``'s."""
    app = FastAPI(title="k3stack", docs_url=None, redoc_url=None)
    for method, path, handler, summary in ROUTES:
        app.add_api_route(
            path,
            _bound(service, handler),
            methods=[method],
            summary=summary,
            response_class=Response,
            openapi_extra=openapi_of(path, keyed=bool(service.options.api_key)),
            operation_id=f"{method.lower()}_{path}",
        )
    app.add_exception_handler(K3Error, _on_k3_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    if service.options.otlp_traces_endpoint:
        app.add_middleware(TraceParent)
    app.add_middleware(KeyGate, keys=service.options.api_key)
    if service.options.cors_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(service.options.cors_origin), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _bound(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    endpoint.__name__ = handler.__name__
    return endpoint


async def _on_k3_error(request: Request, error: Any) -> Response:
    if error.http_status >= 500 and error.http_status != 503:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    body = error_body(error_object(message, error.status_code), error.status_code, request.url.path)
    return json_response(body, error.status_code, headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = error_body(error_object("the server failed; its log says where", 500), 500, request.url.path)
    return json_response(body, 500)
