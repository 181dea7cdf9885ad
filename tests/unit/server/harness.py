"""A real HTTP server over an engine that answers from a script, in one process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import uvicorn

import k3stack
from k3stack.chat.tokenizer import Tokenizer, load_tokenizer
from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.config.options import EngineOptions, ServeOptions
from k3stack.engine.messages import Output, Submit, Times
from k3stack.errors import Unavailable, UserError
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.server.app import build_app
from k3stack.server.service import Service

MODEL = Path(k3stack.__file__).parent / "models" / "data" / "random"
GEOMETRY: ModelGeometry = load_geometry(MODEL)
TOKENIZER: Tokenizer = load_tokenizer(MODEL, GEOMETRY)

Reply = Callable[[Submit, int], Sequence[int]]


def turn(text: str) -> list[int]:
    """Ids of a scripted output; control tokens are written by name, and ``TC RO RC MC`` stand for whole tags."""
    tags = {
        "TC": "<|close|>think<|sep|>",
        "RO": "<|open|>response<|sep|>",
        "RC": "<|close|>response<|sep|>",
        "TO": "<|open|>tools<|sep|>",
        "TZ": "<|close|>tools<|sep|>",
        "MC": "<|close|>message<|sep|><|end_of_msg|>",
    }
    for short, tag in tags.items():
        text = text.replace(f"[{short}]", tag)
    return TOKENIZER.encode_marked(text)


def call(name: str, index: int = 1, **arguments: str) -> str:
    """A tool call as the model writes it, with string arguments."""
    body = "".join(
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{body}<|close|>call<|sep|>'


class FakeEngine:
    """Gives ``reply(submit, choice)`` one token at a time, and does to requests what a test says."""

    def __init__(self, reply: Reply, *, delay: float = 0.0, end: Output | None = None) -> None:
        self.reply, self.delay, self.end = reply, delay, end
        self.submits: list[Submit] = []
        self.aborted: set[str] = set()
        self.flushed = 0
        self.healthy, self.state = True, "up"
        self.why_not_healthy: str | None = None
        self.info: dict[str, Any] = {"context": GEOMETRY.context}
        self._open: set[str] = set()

    def open_requests(self) -> tuple[str, ...]:
        return tuple(self._open)

    async def start(self) -> None:
        return None

    async def generate(self, submit: Submit) -> AsyncGenerator[Output, None]:
        if not self.healthy:
            raise Unavailable("the engine is gone")
        if submit.rid in self._open:
            raise UserError("already open", param="rid")
        self.submits.append(submit)
        self._open.add(submit.rid)
        try:
            if self.end is not None:
                yield self.end
                return
            for choice in range(submit.sampling.n):
                async for output in self._choice(submit, choice):
                    yield output
        finally:
            self._open.discard(submit.rid)

    async def _choice(self, submit: Submit, choice: int) -> AsyncGenerator[Output, None]:
        ids = list(self.reply(submit, choice))
        limit = submit.sampling.max_tokens or len(ids)
        began = time.monotonic()
        for number, token in enumerate(ids[:limit], start=1):
            await asyncio.sleep(self.delay)
            if submit.rid in self.aborted:
                yield self._last(submit, choice, number - 1, "abort", began)
                return
            logprobs = (TokenLogprobs(token, -0.5, (token, 7), (-0.5, float("-inf"))),)
            output = Output(
                rid=submit.rid,
                choice=choice,
                token_ids=(token,),
                logprobs=logprobs if submit.sampling.logprobs else (),
            )
            if number == min(limit, len(ids)):
                yield output
                yield self._last(submit, choice, number, "stop" if number == len(ids) else "length", began)
            else:
                yield output

    def _last(self, submit: Submit, choice: int, count: int, reason: Any, began: float) -> Output:
        return Output(
            rid=submit.rid,
            choice=choice,
            finish_reason=reason,
            prompt_tokens=len(submit.prompt_ids),
            cached_tokens=min(5, len(submit.prompt_ids)),
            output_tokens=count,
            times=Times(began, began, began, time.monotonic()),
        )

    async def abort(self, rid: str) -> None:
        self.aborted.add(rid)

    async def stats(self) -> dict[str, Any]:
        return {
            "memory": {"blocks_free": 7, "opens": 4, "hits": 1, "pages_running": 2, "page_tokens": 64},
            "scheduler": {"decoding": len(self._open), "waiting": 3},
        }

    async def flush(self) -> bool:
        self.flushed += 1
        return not self._open

    async def drain(self) -> None:
        return None

    async def close(self) -> None:
        self.healthy = False


class Live:
    """The application under uvicorn in a thread; ``client`` is OpenAI's own."""

    def __init__(self, engine: FakeEngine, **options: Any) -> None:
        options.setdefault("disable_request_log", True)
        self.engine = engine
        self.service = Service(
            engine,
            TOKENIZER,
            GEOMETRY,
            EngineOptions(model_path="tiny"),
            ServeOptions(served_model_name="tiny", **options),
        )
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(build_app(self.service), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.loop: asyncio.AbstractEventLoop

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.service.start()
        await self._server.serve(sockets=[self._listener])

    def __enter__(self) -> Live:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


def saying(text: str) -> FakeEngine:
    """An engine whose every answer is ``text``."""
    ids = turn(text)
    return FakeEngine(lambda submit, choice: ids)
