"""A stub chat server with exact timing: answers come at a set pace, so a client's measurements can be judged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web


class StubServer:
    """``first_s`` to the first token, then ``gap_s`` a token; ``fail_every``: each such request is refused.

    ``silent_after``: later tokens take their time and show nothing (control tokens, the end of a message).
    """

    def __init__(
        self,
        first_s: float = 0.05,
        gap_s: float = 0.01,
        fail_every: int = 0,
        cut_every: int = 0,
        silent_after: int | None = None,
    ) -> None:
        self.first_s, self.gap_s, self.fail_every, self.cut_every = first_s, gap_s, fail_every, cut_every
        self.silent_after = silent_after
        self.seen: list[dict[str, Any]] = []
        self.base_url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> StubServer:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.base_url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        number = len(self.seen)
        if self.fail_every and number % self.fail_every == 0:
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        n = body["max_tokens"]
        prompt = sum(len(str(m["content"]).split()) + 10 for m in body["messages"])
        loop = asyncio.get_running_loop()
        start = loop.time()
        for i in range(n):
            await asyncio.sleep(max(0.0, start + self.first_s + i * self.gap_s - loop.time()))
            if self.cut_every and number % self.cut_every == 0 and i == n // 2:
                return response
            if self.silent_after is not None and i >= self.silent_after:
                continue
            delta = {"reasoning_content": "x "} if i < n // 2 else {"content": "y "}
            await self._send(response, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        await self._send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": prompt, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 4}}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
