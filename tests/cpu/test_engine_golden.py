"""The whole engine process on a golden checkpoint: its tokens, streams that vanish, a drain, a killed process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from k3stack.config.options import EngineOptions
from k3stack.config.sampling import SamplingParams
from k3stack.engine import messages as msg
from k3stack.engine.client import EngineClient
from k3stack.errors import CheckpointError, DoesNotFit
from tests.cpu.test_engine_process import collect, engine_pid, until
from tests.cpu.test_llm import K3, MODELS, Golden

BUSY = ("waiting", "prefilling", "decoding", "finishing")


def with_engine(body: Callable[[EngineClient], Awaitable[None]], golden: Golden = K3, **options: Any) -> None:
    async def run() -> None:
        client = EngineClient(
            EngineOptions(model_path=golden.path, **{"dtype": "float64", "arena_gib": 0.02, **options})
        )
        try:
            await client.start()
            await body(client)
        finally:
            await client.close()

    asyncio.run(run())


def greedy(rid: str, prompt: list[int], count: int = 24) -> msg.Submit:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return msg.Submit(rid=rid, prompt_ids=tuple(prompt), sampling=params)


async def idle_memory(client: EngineClient) -> dict[str, Any]:
    """Memory's stats once nothing runs or waits."""
    while True:
        stats = await client.stats()
        if not any(stats["scheduler"][name] for name in BUSY):
            return stats["memory"]
        await asyncio.sleep(0.02)


def test_golden_tokens_through_the_process() -> None:
    for name in MODELS[::2]:
        golden = Golden(name)

        async def body(client: EngineClient, golden: Golden = golden) -> None:
            pools = client.info["pools"]
            assert pools["predicted"]["blocks"] == pools["actual"]["blocks"] > 0
            assert abs(pools["predicted"]["weight_bytes"] / pools["actual"]["weight_bytes"] - 1) < 0.01
            requests = [greedy(str(i), prompt) for i, prompt in enumerate(golden.prompts)]
            answers = await asyncio.gather(*(collect(client, request) for request in requests))
            assert [ids for ids, _ in answers] == golden.tokens
            assert all(last.finish_reason == "length" and last.output_tokens == 24 for _, last in answers)
            assert all(last.times is not None and last.times.first_token is not None for _, last in answers)

        with_engine(body, golden)


def test_killing_half_of_16_streams_returns_every_page() -> None:
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, 490, int(rng.integers(1, 80))).tolist() for _ in range(16)]

    async def body(client: EngineClient) -> None:
        alone = [(await collect(client, greedy(f"alone{i}", prompts[i])))[0] for i in (1, 3, 5)]
        tasks = [asyncio.create_task(collect(client, greedy(f"s{i}", p, 24 + i))) for i, p in enumerate(prompts)]
        while (await client.stats())["scheduler"]["decoding"] < 8:
            await asyncio.sleep(0.005)
        for task in tasks[::2]:
            task.cancel()
        kept = [await task for task in tasks[1::2]]
        assert [len(ids) for ids, _ in kept] == [24 + i for i in range(1, 16, 2)]
        assert [ids[:24] for ids, _ in kept[:3]] == alone
        memory = await idle_memory(client)
        assert memory["running"] == memory["blocks_running"] == memory["pages_running"] == 0
        assert (await client.stats())["scheduler"]["finished"]["abort"] == 8
        assert await client.flush()
        memory = await idle_memory(client)
        assert memory["blocks_free"] == memory["blocks"]

    with_engine(body)


def test_sigterm_lets_streams_finish() -> None:
    async def body(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client, greedy("a", K3.prompts[0])))
        while not (await client.stats())["scheduler"]["rows"]:
            await asyncio.sleep(0.005)
        os.kill(engine_pid(client), signal.SIGTERM)
        ids, last = await task
        assert ids == K3.tokens[0] and last.finish_reason == "length"
        await until(lambda: client.state == "down")
        assert "SIGTERM" in (client.why_not_healthy or "") and client.restarts == 0

    with_engine(body)


def test_a_killed_engine_comes_back_with_the_right_tokens() -> None:
    async def body(client: EngineClient) -> None:
        long = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
        stream = client.generate(msg.Submit(rid="a", prompt_ids=(1, 2, 3), sampling=long))
        await anext(stream)
        os.kill(engine_pid(client), signal.SIGKILL)
        last = None
        async for output in stream:
            last = output
        assert last is not None and last.finish_reason == "error"
        await until(lambda: client.healthy, 60.0)
        ids, _ = await collect(client, greedy("b", K3.prompts[1]))
        assert ids == K3.tokens[1]

    with_engine(body)


def test_settings_that_cannot_work_come_back_as_the_users_error() -> None:
    async def start(**options: Any) -> None:
        client = EngineClient(EngineOptions(**{"model_path": K3.path, "arena_gib": 0.02, **options}))
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises(DoesNotFit, match="needs 2"):
        asyncio.run(start(arena_gib=0.0001))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        asyncio.run(start(model_path="/nonexistent"))


def test_the_log_level_holds_in_the_engine_process(capfd: pytest.CaptureFixture[str]) -> None:
    async def start(level: str) -> str:
        client = EngineClient(EngineOptions(model_path=K3.path, arena_gib=0.02), log_level=level)
        await client.start()
        await client.close()
        return capfd.readouterr().err

    assert "INFO k3stack.engine: arena: " in asyncio.run(start("info"))
    assert "INFO" not in asyncio.run(start("warning"))
