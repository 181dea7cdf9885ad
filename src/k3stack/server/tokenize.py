"""/tokenize and /detokenize: what a text or a conversation becomes, and back."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from k3stack.chat.prompt import encode, render
from k3stack.chat.tokenizer import Detokenizer
from k3stack.errors import UserError
from k3stack.server import translate
from k3stack.server.body import read_body
from k3stack.server.chat import LONG_PROMPT_CHARS
from k3stack.server.fields import decode
from k3stack.server.http_errors import json_response
from k3stack.server.native_fields import (
    DETOKENIZE_RULES,
    TOKENIZE_RULES,
    DetokenizeRequest,
    TokenizeRequest,
)
from k3stack.server.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """Ids of ``prompt`` (control tokens out of reach, as everywhere), or of the prompt that ``messages`` become."""
    body = await read_body(request, service.options)
    decoded = decode(body, TokenizeRequest, TOKENIZE_RULES)
    translate.check_model(decoded.model, service.names)
    if len(body) > LONG_PROMPT_CHARS:
        return json_response(await asyncio.to_thread(_tokenize, service, decoded))
    return json_response(_tokenize(service, decoded))


def _tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    if (request.prompt is None) == (request.messages is None):
        raise UserError("give either prompt or messages", param="prompt")
    if isinstance(request.prompt, list):
        several = [service.tokenizer.encode_text(text) for text in request.prompt]
        return {
            "tokens": several,
            "count": [len(ids) for ids in several],
            "max_model_len": service.limits.context,
        }
    if request.prompt is not None:
        ids = service.tokenizer.encode_text(request.prompt)
    else:
        thinking = translate.thinking(request)
        segments = render(
            request.messages or [],
            tools=request.tools,
            thinking=thinking.on,
            reasoning_effort=thinking.effort if thinking.on else None,
            tool_choice=request.tool_choice,
            response_format=request.response_format,
            continue_final=request.continue_final_message,
        )
        ids = encode(segments, service.tokenizer)
    found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.limits.context}
    if request.return_token_strs:
        found["token_strs"] = [service.tokenizer.decode((token,)) for token in ids]
    return found


async def detokenize(service: Service, request: Request) -> Response:
    """Text of ``tokens``; control tokens by name unless ``skip_special_tokens``."""
    body = await read_body(request, service.options)
    decoded = decode(body, DetokenizeRequest, DETOKENIZE_RULES)
    translate.check_model(decoded.model, service.names)
    flat = [item for item in decoded.tokens if isinstance(item, int)]
    if flat and len(flat) != len(decoded.tokens):
        raise UserError("tokens mixes ids and lists of ids", param="tokens")
    lists = [flat] if flat else [item for item in decoded.tokens if not isinstance(item, int)]
    texts = [_text(service, ids, decoded.skip_special_tokens) for ids in lists]
    answer = texts[0] if flat else texts if texts else ""
    return json_response({"prompt": answer, "text": answer})


def _text(service: Service, ids: list[int], skip: bool) -> str:
    detokenizer = Detokenizer(service.tokenizer, show_control=not skip)
    return detokenizer.feed(translate.token_ids(ids, service.limits.vocab, "tokens")) + detokenizer.finish()
