"""The load client: asyncio against any OpenAI-compatible chat server, with its own lag measured.

Times are taken where bytes arrive. An event that carries reasoning, content or a tool call counts as output; the
number of tokens is the server's ``usage`` where it sends one, else the number of such events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from k3stack.errors import UserError
from k3stack.workload.records import End, Record
from k3stack.workload.sessions import Session, Workload
from k3stack.workload.text import TextMaker


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
_ENDS: dict[str, End] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "abort": "abort"}

PREPARED_TOKENS = 50_000_000
"""Prompts made before the start, in tokens (of four characters or so); further ones are made when they are due."""

START_APART_S = 0.001
"""Between the first requests of a closed loop: sent at one instant they would wait for each other in the client."""


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to send. ``ignore_eos`` asks for answers of exactly the drawn length (an extension that SGLang,
    vLLM and k3stack take); without it the server may stop earlier."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float | None = None
    timeout_s: float = 1800.0
    keep_token_times: bool = False
    extra_body: dict[str, Any] = msgspec.field(default_factory=dict)


class Lag(msgspec.Struct, frozen=True):
    """How late the client's own event loop was, in seconds, and its share of one core."""

    p50_s: float
    p99_s: float
    max_s: float
    cpu_share: float
    late_sends_p99_s: float


class RunResult(msgspec.Struct, frozen=True):
    records: list[Record]
    lag: Lag
    elapsed_s: float


class LoadClient:
    """Runs a workload against a server and returns one record a request."""

    def __init__(self, options: ClientOptions, text: TextMaker) -> None:
        self._options = options
        self._text = text
        self._t0 = 0.0
        self._records: list[Record] = []
        self._http: aiohttp.ClientSession | None = None
        self._model = options.model
        self._prepared: dict[tuple[int, int], str] = {}

    async def run(self, workload: Workload, on_progress: Callable[[Record], None] | None = None) -> RunResult:
        """Send all sessions; returns when each request has ended in one way or another."""
        self._records = []
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self._options.timeout_s)
        connector = aiohttp.TCPConnector(limit=0, force_close=False, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**18) as http:
            self._http = http
            self._model = self._model or await self._first_model()
            await self._text.calibrate(self._count_prompt)
            self._prepare(workload)
            watcher = _LagWatcher()
            watcher.start()
            cpu, self._t0 = time.process_time(), time.perf_counter()
            await self._drive(workload, on_progress)
            elapsed = time.perf_counter() - self._t0
            lag = await watcher.stop((time.process_time() - cpu) / max(elapsed, 1e-9), self._records)
        return RunResult(self._records, lag, elapsed)

    def _prepare(self, workload: Workload) -> None:
        """Make the prompts before the clock starts: words take their time, and nothing else could run meanwhile."""
        left = PREPARED_TOKENS
        self._prepared = {}
        for s in workload.sessions:
            for k, turn in enumerate(s.turns):
                left -= turn.new_tokens
                if left < 0:
                    return
                if turn.messages is None:
                    self._prepared[s.sid, k] = self._new_text(s, k)

    def _prompt(self, s: Session, k: int) -> str:
        prepared = self._prepared.pop((s.sid, k), None)
        return self._new_text(s, k) if prepared is None else prepared

    def _new_text(self, s: Session, k: int) -> str:
        turn = s.turns[k]
        if turn.blocks is not None:
            return self._text.from_blocks(turn.blocks, turn.block_tokens, turn.new_tokens)
        return self._text.make(s.sid, k, turn.new_tokens)

    async def _drive(self, workload: Workload, on_progress: Callable[[Record], None] | None) -> None:
        async with asyncio.TaskGroup() as group:
            if workload.concurrency is None:
                for s in workload.sessions:
                    group.create_task(self._session(s, s.arrival_s, on_progress))
                return
            waiting = iter(workload.sessions)

            async def worker(number: int) -> None:
                await asyncio.sleep(number * START_APART_S)
                for s in waiting:
                    await self._session(s, self._now(), on_progress)

            for number in range(workload.concurrency):
                group.create_task(worker(number))

    def _now(self) -> float:
        return time.perf_counter() - self._t0

    async def _session(self, s: Session, due: float, on_progress: Callable[[Record], None] | None) -> None:
        history: list[dict[str, Any]] = []
        for k, turn in enumerate(s.turns):
            if due > self._now():
                await asyncio.sleep(due - self._now())
            if turn.messages is not None:
                messages = list(turn.messages)
            else:
                messages = [*history, {"role": "user", "content": self._prompt(s, k)}]
            record = Record(
                rid=f"{s.sid}.{k}",
                session=s.sid,
                turn=k,
                arrival_s=due,
                asked_tokens=turn.output_tokens,
                tool_call=turn.tool_call,
                stream=s.stream,
                priority=turn.priority,
                prompt_tokens=s.prompt_tokens(k),
                token_s=[] if s.stream or self._options.keep_token_times else None,
            )
            self._records.append(record)
            body = self._body(messages, turn.output_tokens, turn.tools, turn.priority)
            answer = await self._request(body, record)
            if on_progress is not None:
                on_progress(record)
            if not record.ok:
                return
            history = [*messages, answer]
            if k + 1 < len(s.turns):
                due = self._now() + s.turns[k + 1].think_s

    def _body(
        self, messages: list[dict[str, Any]], output: int, tools: tuple[dict[str, Any], ...] | None, priority: int
    ) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": output,
        }
        if self._options.temperature is not None:
            body["temperature"] = self._options.temperature
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        if tools:
            body["tools"] = list(tools)
        if priority:
            body["priority"] = priority
        body.update(self._options.extra_body)
        return msgspec.json.encode(body)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._options.api_key:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        return headers

    async def _request(self, body: bytes, record: Record) -> dict[str, Any]:
        assert self._http is not None
        url = self._options.base_url.rstrip("/") + "/v1/chat/completions"
        record.sent_s = self._now()
        answer = _Answer()
        try:
            async with self._http.post(url, data=body, headers=self._headers()) as response:
                if response.status != 200:
                    record.end = "rejected" if response.status in (429, 503) else "error"
                    record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return {}
                await self._read(response, record, answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            record.end, record.error = "error", f"{type(e).__name__}: {e}"
        record.finished_s = self._now() if record.finished_s is None else record.finished_s
        return answer.message()

    async def _read(self, response: aiohttp.ClientResponse, record: Record, answer: _Answer) -> None:
        rest, last, events = b"", None, 0
        async for data in response.content.iter_any():
            now = self._now()
            rest += data
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    continue
                chunk = _decode(payload)
                if chunk.error is not None:
                    record.end, record.error = "error", str(chunk.error)[:300]
                    continue
                if chunk.usage is not None:
                    _take_usage(chunk.usage, record)
                for choice in chunk.choices:
                    if answer.take(choice):
                        events += 1
                        last = _token(record, now, last)
                    if choice.finish_reason is not None and record.end == "unfinished":
                        record.end = _ENDS.get(choice.finish_reason, "error")
                        if record.end == "error":
                            record.error = f"finish_reason {choice.finish_reason!r}"
                        record.finished_s = now
        if record.output_tokens == 0:
            record.output_tokens = events
        record.tool_call = record.tool_call or bool(answer.calls)
        if record.end == "unfinished":
            record.end, record.error = "error", "the stream ended without a finish_reason"

    async def _first_model(self) -> str:
        assert self._http is not None
        url = self._options.base_url.rstrip("/") + "/v1/models"
        try:
            async with self._http.get(url, headers=self._headers()) as response:
                text = await response.text()
                if response.status != 200:
                    raise UserError(f"{url}: HTTP {response.status}: {text[:200]}", param="base-url")
                return str(msgspec.json.decode(text)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise UserError(
                f"{url}: no answer ({type(e).__name__}: {e}); is the server up?", param="base-url"
            ) from None
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise UserError(f"{url}: not an OpenAI-compatible list of models", param="base-url") from None

    async def _count_prompt(self, text: str) -> int:
        """Prompt tokens of one user message, as the server counts them (one token is generated)."""
        record = Record(rid="calibration", session=-1, turn=0, arrival_s=0.0)
        await self._request(self._body([{"role": "user", "content": text}], 1, None, 0), record)
        if not record.ok:
            raise UserError(f"the calibration request failed: {record.error}", param="base-url")
        return record.prompt_tokens


def _token(record: Record, now: float, last: float | None) -> float:
    if record.first_s is None:
        record.first_s = now
    elif last is not None and now - last > record.longest_gap_s:
        record.longest_gap_s = now - last
    if record.token_s is not None:
        record.token_s.append(now)
    return now


def _take_usage(usage: _Usage, record: Record) -> None:
    record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
    record.output_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details or {}
    record.cached_tokens = int(details.get("cached_tokens") or 0)


class _Answer:
    """Puts an answer together again, so that the next turn can carry it (reasoning and calls included)."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}

    def take(self, choice: _Choice) -> bool:
        """True when the choice carried output."""
        delta, seen = choice.delta, False
        if delta.content:
            self.content.append(delta.content)
            seen = True
        if delta.reasoning_content or delta.reasoning:
            self.reasoning.append(delta.reasoning_content or delta.reasoning or "")
            seen = True
        for call in delta.tool_calls or ():
            entry = self.calls.setdefault(
                call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            entry["id"] = call.id or entry["id"]
            if call.function is not None:
                entry["function"]["name"] += call.function.name or ""
                entry["function"]["arguments"] += call.function.arguments or ""
            seen = True
        return seen

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [self.calls[i] for i in sorted(self.calls)]
        return message


class _LagWatcher:
    """Sleeps 5 ms at a time and notes how late it woke: the time that an arriving token had to wait as well."""

    PERIOD_S = 0.005

    def __init__(self) -> None:
        self._late: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self._late.append(max(0.0, time.perf_counter() - due))

    async def stop(self, cpu_share: float, records: list[Record]) -> Lag:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        late = sorted(self._late) or [0.0]
        sends = sorted(max(0.0, r.sent_s - r.arrival_s) for r in records if r.sent_s is not None) or [0.0]
        return Lag(_quantile(late, 0.5), _quantile(late, 0.99), late[-1], cpu_share, _quantile(sends, 0.99))


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[int(q * (len(ordered) - 1))]
