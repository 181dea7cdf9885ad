"""A server that is asked for more than it can do, and one that is told to stop meanwhile: every request gets an end."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cpu.served import Served, served

ROWS, QUEUE = 32, 700
PATH = "/v1/completions"


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def body(prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "random", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}


def held(server: Served) -> float:
    """What requests hold in the server and in the engine: all zero once none is left."""
    waiting = server.metric("k3_requests_in_flight") + server.metric("k3_queue")
    return waiting + server.metric("k3_arena_blocks", kind="running") + server.metric("k3_arena_pages", kind="running")


async def post(server: Served, sent: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers, body."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(sent).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        answer = await reader.read()
    finally:
        writer.close()
    first, _, rest = answer.partition(b"\r\n\r\n")
    lines = first.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, rest


def test_of_a_thousand_requests_those_past_the_bound_are_told_when_to_return_and_the_rest_complete() -> None:
    options = ["--max-running-requests", str(ROWS), "--max-queued-requests", str(QUEUE), "--arena-gib", "0.1"]

    async def load(server: Served) -> list[tuple[int, dict[str, str], bytes]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client, asyncio.TaskGroup() as group:
            # These hold every row until all others have been refused or queued, and then leave.
            streams = [client.stream("POST", PATH, json=body([i], 8_000, stream=True, n=16)) for i in range(ROWS // 16)]
            for stream in streams:
                answer = await stream.__aenter__()
                assert answer.status_code == 200
            tasks = [group.create_task(post(server, body([1 + i % 200, i // 200], 1))) for i in range(1_000)]
            while sum(task.done() for task in tasks) < 1_000 - QUEUE:
                await asyncio.sleep(0.05)
            waiting = await asyncio.to_thread(server.metric, "k3_queue", state="waiting")
            assert waiting == QUEUE
            for stream in streams:
                await stream.__aexit__(None, None, None)
        return [task.result() for task in tasks]

    with served("--model-path", "random", *options, "--disable-request-log") as server:
        answers = asyncio.run(load(server))
        assert Counter(status for status, _, _ in answers) == {200: QUEUE, 429: 1_000 - QUEUE}
        for status, headers, data in answers:
            answer = json.loads(data)
            if status == 429:
                assert int(headers["retry-after"]) > 0 and answer["error"]["type"] == "rate_limit_error"
            else:
                assert answer["usage"]["completion_tokens"] == 1
        wait_for(lambda: not held(server))


@pytest.mark.parametrize("patience", ["600", "0"])
def test_sigterm_while_long_prompts_are_computed(patience: str) -> None:
    """With time to drain all complete; without, those that have sent nothing are told 503. No answer looks whole."""
    options = ["--chunked-prefill-size", "64", "--max-running-requests", "2", "--arena-gib", "0.1"]
    prompts = [[i, *range(200)] * (10 if patience == "0" else 5) for i in range(4)]

    async def load(server: Served) -> list[tuple[int, dict[str, str], bytes]]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(post(server, body(prompt, 3, stream=i % 2 == 0))) for i, prompt in enumerate(prompts)
            ]
            while await asyncio.to_thread(server.metric, "k3_queue") < len(prompts):
                assert not any(task.done() for task in tasks)
            server.process.send_signal(signal.SIGTERM)
        return [task.result() for task in tasks]

    server = Served("--model-path", "random", *options, "--drain-timeout", patience)
    try:
        answers = asyncio.run(load(server))
        whole = [status == 200 and b'"finish_reason":"length"' in data for status, _, data in answers]
        if patience == "600":
            assert all(whole) and server.process.wait(120) == 0
        else:
            assert not any(whole) and server.process.wait(120) == 3
            for status, headers, data in answers:
                assert status == 503 and int(headers["retry-after"]) > 0
                assert "stopped before the answer" in json.loads(data)["error"]["message"]
    finally:
        server.process.kill()
        server.process.wait()
