"""Signals, drain, and the death of the engine process, with real processes and a scripted engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from k3stack.engine.messages import Output, Submit
from k3stack.server import service
from tests.unit.server.harness import FakeEngine, Live
from tests.unit.server.scripted_server import STEPS

ROOT = Path(__file__).parents[3]
BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


class Process:
    """A server process and its address."""

    def __init__(self, *options: str) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.server.scripted_server", *options],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server did not start"

    def health(self) -> tuple[int, str]:
        answer = httpx.get(f"{self.url}/health")
        return answer.status_code, answer.json()["status"]


@contextmanager
def server(*options: str) -> Iterator[Process]:
    running = Process(*options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()


def read(running: Process, after_frames: int, then: Callable[[], Any]) -> list[str]:
    """Read a stream to its end and do ``then`` in its middle; returns its frames."""
    frames = []
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=BODY, timeout=30) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                frames.append(line)
            if len(frames) == after_frames:
                then()
                after_frames = -1
    return frames


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_lets_streams_finish_and_takes_nothing_new() -> None:
    with server() as running:
        seen = {}

        def stop() -> None:
            running.process.send_signal(signal.SIGTERM)
            wait_for(lambda: running.health()[0] == 503)
            seen["health"] = running.health()
            refused = httpx.post(f"{running.url}/v1/chat/completions", json=BODY)
            seen["new"] = (refused.status_code, "retry-after" in refused.headers)

        frames = read(running, 20, stop)
        assert seen == {"health": (503, "draining"), "new": (503, True)}
        assert frames[-1] == "data: [DONE]"
        assert sum('"content":"x"' in frame for frame in frames) == STEPS
        assert running.process.wait(10) == 0


def test_what_outlasts_the_drain_is_cut_with_an_error() -> None:
    with server("--drain-timeout", "0.2") as running:
        frames = read(running, 20, lambda: running.process.send_signal(signal.SIGTERM))
        assert len(frames) < STEPS
        error = json.loads(frames[-1].removeprefix("data: "))["error"]
        assert "stopped before the answer was complete" in error["message"]
        assert running.process.wait(10) == 3


class DeepInAStep(FakeEngine):
    """An engine in the middle of a step that outlasts everything: it hears no abort."""

    async def generate(self, submit: Submit) -> AsyncGenerator[Output, None]:
        self.closed = asyncio.Event()
        await self.closed.wait()
        yield self._last(submit, 0, 0, "abort", time.monotonic())

    async def close(self) -> None:
        self.closed.set()


def test_a_cut_does_not_wait_for_the_engines_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CUT_S", 0.05)
    with (
        Live(DeepInAStep(lambda submit, choice: ()), drain_timeout=0.05) as live,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        asked = pool.submit(httpx.post, f"{live.url}/v1/chat/completions", json=BODY, timeout=30)
        wait_for(lambda: live.service.open == 1)
        assert not asyncio.run_coroutine_threadsafe(live.service.drain(), live.loop).result(10)
        answer = asked.result(10)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0


def test_a_second_signal_ends_at_once() -> None:
    with server() as running:

        def twice() -> None:
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            running.process.send_signal(signal.SIGTERM)

        try:
            frames = read(running, 20, twice)
        except httpx.HTTPError:
            frames = []
        assert "data: [DONE]" not in frames
        assert not any('"finish_reason":"' in frame for frame in frames)
        assert running.process.wait(10) == 3
        assert len(frames) < STEPS


def engines(running: Process) -> list[psutil.Process]:
    """The engine processes that are there: one, or none for a moment after a death."""
    found = []
    for child in psutil.Process(running.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_a_dead_engine_ends_streams_with_an_error_and_comes_back() -> None:
    """And dies again before it is back: the server is unhealthy all the while, refuses, and then serves."""
    with server() as running:
        seen: list[int] = []

        def kill() -> None:
            wait_for(lambda: any(e.pid not in seen for e in engines(running)))
            (engine,) = [e for e in engines(running) if e.pid not in seen]
            seen.append(engine.pid)
            engine.kill()

        frames = read(running, 20, kill)
        assert "error" in json.loads(frames[-1].removeprefix("data: "))
        kill()
        assert running.health()[0] == 503
        refused = httpx.post(f"{running.url}/v1/chat/completions", json=BODY)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        wait_for(lambda: running.health()[0] == 200)
        assert [e.pid in seen for e in engines(running)] == [False]
        assert read(running, -1, lambda: None)[-1] == "data: [DONE]"


def test_an_engine_that_keeps_dying_ends_the_server() -> None:
    with server("--max-restarts", "0") as running:
        (engine,) = engines(running)
        engine.kill()
        assert running.process.wait(15) == 3
