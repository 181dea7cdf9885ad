"""The engine process and its client, with the scripted core: no torch anywhere."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from k3stack.config.options import EngineOptions
from k3stack.config.sampling import SamplingParams
from k3stack.engine import messages as msg
from k3stack.engine.client import EngineClient
from k3stack.engine.process import EngineProcess
from k3stack.engine.scripted import Script
from k3stack.errors import Unavailable, UserError

OPTIONS = EngineOptions(model_path="nowhere", context_length=1000)


def with_client(body: Callable[[EngineClient], Awaitable[None]], script: Script, **kwargs: Any) -> None:
    async def run() -> None:
        client = EngineClient(OPTIONS, script=script, **kwargs)
        try:
            await client.start()
            await body(client)
        finally:
            await client.close()

    asyncio.run(run())


def submit(rid: str, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> msg.Submit:
    return msg.Submit(rid=rid, prompt_ids=prompt, sampling=SamplingParams(**sampling))


async def collect(client: EngineClient, request: msg.Submit) -> tuple[list[int], msg.Output]:
    ids: list[int] = []
    async for output in client.generate(request):
        ids += output.token_ids
    return ids, output


async def running(client: EngineClient, count: int) -> None:
    """Wait until so many choices run in the engine."""
    while (await client.stats())["running"] != count:
        await asyncio.sleep(0.005)


def engine_pid(client: EngineClient) -> int:
    assert client._process is not None and client._process.pid is not None
    return client._process.pid


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.02)


def test_streams_end_with_their_reason_and_counts() -> None:
    async def body(client: EngineClient) -> None:
        assert client.healthy and client.info["executor"] == "scripted"
        (ids, last), (short, cut) = await asyncio.gather(
            collect(client, submit("a")), collect(client, submit("b", max_tokens=2))
        )
        assert ids == [7, 8, 9] and last.finish_reason == "stop"
        assert short == [7, 8] and cut.finish_reason == "length"
        assert (cut.prompt_tokens, cut.output_tokens) == (3, 2)
        assert (await client.stats())["output_tokens"] == 5
        assert await client.flush()

    with_client(body, Script(reply=(7, 8, 9)))


def test_leaving_the_iterator_aborts_the_request() -> None:
    async def body(client: EngineClient) -> None:
        stream = client.generate(submit("a", ignore_eos=True))
        await anext(stream)
        with pytest.raises(UserError, match="already open"):
            await anext(client.generate(submit("a")))
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(collect(client, submit("b", ignore_eos=True)))
        await running(client, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.open_requests() == ()
        await running(client, 0)

    with_client(body, Script(step_seconds=0.002))


def test_abort_by_id_ends_the_stream() -> None:
    async def body(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client, submit("a", ignore_eos=True, n=2)))
        await running(client, 2)
        await client.abort("a")
        ids, last = await task
        assert ids and last.finish_reason == "abort"

    with_client(body, Script(step_seconds=0.002))


def test_a_killed_engine_ends_every_stream_and_comes_back() -> None:
    async def body(client: EngineClient) -> None:
        tasks = [asyncio.create_task(collect(client, submit(str(i), ignore_eos=True))) for i in range(3)]
        await running(client, 3)
        first = engine_pid(client)
        os.kill(first, signal.SIGKILL)
        for _, last in await asyncio.gather(*tasks):
            assert last.finish_reason == "error" and "died" in (last.message or "")
        assert not client.healthy
        with pytest.raises(Unavailable):
            await anext(client.generate(submit("x")))
        await until(lambda: client.healthy)
        assert engine_pid(client) != first and client.restarts == 1
        ids, _ = await collect(client, submit("y", max_tokens=2))
        assert len(ids) == 2

    with_client(body, Script(step_seconds=0.002))


def test_restarts_are_counted_and_end() -> None:
    async def body(client: EngineClient) -> None:
        os.kill(engine_pid(client), signal.SIGKILL)
        await until(lambda: client.state == "down")
        await asyncio.sleep(0.3)
        assert client.state == "down" and "not started again" in (client.why_not_healthy or "")

    with_client(body, Script(), max_restarts=0)


async def killed_while_starting(client: EngineClient, before: int) -> int:
    """Wait for the process that replaces ``before``, kill it before it is up, and return its id."""
    await until(lambda: client._process is not None and client._process.pid not in (None, before))
    assert client.state == "starting"
    os.kill(engine_pid(client), signal.SIGKILL)
    return engine_pid(client)


def test_an_engine_that_dies_again_while_it_is_started_anew_comes_back() -> None:
    async def body(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client, submit("a", ignore_eos=True)))
        await running(client, 1)
        first = engine_pid(client)
        os.kill(first, signal.SIGKILL)
        second = await killed_while_starting(client, first)
        await until(lambda: client.healthy)
        assert (await task)[1].finish_reason == "error"
        assert engine_pid(client) not in (first, second) and client.restarts == 2
        assert len((await collect(client, submit("b", max_tokens=2)))[0]) == 2

    with_client(body, Script(step_seconds=0.002))


def test_a_death_while_starting_anew_counts_as_one() -> None:
    async def body(client: EngineClient) -> None:
        first = engine_pid(client)
        os.kill(first, signal.SIGKILL)
        await killed_while_starting(client, first)
        await until(lambda: client.state == "down")
        assert client.restarts == 1 and "not started again (1 restarts" in (client.why_not_healthy or "")

    with_client(body, Script(), max_restarts=1)


def test_a_process_that_cannot_be_made_counts_as_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = EngineProcess.spawn

    async def body(client: EngineClient) -> None:
        def refuse(*args: Any) -> EngineProcess:
            monkeypatch.setattr(EngineProcess, "spawn", spawn)
            raise BlockingIOError("Resource temporarily unavailable")

        monkeypatch.setattr(EngineProcess, "spawn", refuse)
        os.kill(engine_pid(client), signal.SIGKILL)
        await until(lambda: client.healthy and client.restarts == 2)

    with_client(body, Script())


def test_sigterm_drains() -> None:
    async def body(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client, submit("a", max_tokens=100, ignore_eos=True)))
        await running(client, 1)
        os.kill(engine_pid(client), signal.SIGTERM)
        await asyncio.sleep(0.05)
        _, late = await collect(client, submit("late"))
        assert late.finish_reason == "rejected" and "drain" in (late.message or "")
        ids, last = await task
        assert len(ids) == 100 and last.finish_reason == "length"
        await until(lambda: client.state == "down")
        assert client.restarts == 0

    with_client(body, Script(step_seconds=0.01))


def test_drain_waits_for_what_runs() -> None:
    async def body(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client, submit("a", max_tokens=50, ignore_eos=True)))
        await running(client, 1)
        await client.drain()
        assert task.done() or len((await task)[0]) == 50
        with pytest.raises(Unavailable, match="drain"):
            await anext(client.generate(submit("late")))

    with_client(body, Script(step_seconds=0.005))


def test_a_hanging_step_is_reported_and_the_engine_started_anew(capfd: pytest.CaptureFixture[str]) -> None:
    async def body(client: EngineClient) -> None:
        _, last = await collect(client, submit("a"))
        assert last.finish_reason == "error" and "hung" in (last.message or "")
        await until(lambda: client.healthy)

    with_client(body, Script(step_seconds=30.0), watchdog_timeout=0.5)
    assert "stacks follow" in capfd.readouterr().err


def test_the_engine_ends_with_its_parent() -> None:
    code = """
import asyncio, os, signal
from k3stack.config.options import EngineOptions
from k3stack.engine.client import EngineClient
from k3stack.engine.scripted import Script
async def main():
    client = EngineClient(EngineOptions(model_path="nowhere"), script=Script())
    await client.start()
    print(client._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    asyncio.run(main())
"""
    src = os.path.dirname(os.path.dirname(os.path.dirname(msg.__file__)))
    env = {**os.environ, "PYTHONPATH": src}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            return
        time.sleep(0.05)
    pytest.fail("the engine process outlived its parent")
