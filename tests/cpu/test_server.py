"""The served built-in model under OpenAI's client: chats, tools, concurrency, disconnects, prefix reuse, refusals."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from k3stack import LLM
from k3stack.models.builtin import resolve
from tests.cpu.served import ROOT, Served, served

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # float64, so that a request's tokens cannot depend on what else is in the batch.
    with served("--model-path", "random", "--dtype", "float64", "--arena-gib", "0.1") as running:
        yield running


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def text_of(message: Any) -> str:
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def stream_text(server: Served, text: str, tokens: int) -> str:
    stream = server.client.chat.completions.create(
        model="random", messages=question(text), max_tokens=tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return "".join(text_of(chunk.choices[0].delta) for chunk in stream if chunk.choices)


def test_plain_and_streamed_chats_with_tools_agree(server: Served) -> None:
    ask: dict[str, Any] = {
        "model": "random",
        "messages": question("What is the weather in Oslo?"),
        "tools": TOOLS,
        "max_tokens": 30,
        "temperature": 0,
    }
    whole = server.client.chat.completions.create(**ask)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 30
    chunks = list(server.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(text_of(c.choices[0].delta) for c in chunks if c.choices) == text_of(whole.choices[0].message)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_prefix_is_reused(server: Served) -> None:
    ask: dict[str, Any] = {"model": "random", "max_tokens": 3, "temperature": 0}
    beginning = [ord(c) for c in "Tell me something long. " * 20]
    server.client.completions.create(prompt=beginning, **ask)
    longer = [*beginning, *(ord(c) for c in " And go on from there.")]
    reused = server.client.completions.create(prompt=longer, **ask).usage
    assert reused is not None and reused.prompt_tokens == len(longer)
    assert reused.prompt_tokens_details.cached_tokens == len(beginning)  # type: ignore[union-attr]


def test_sixteen_streams_have_the_tokens_they_have_alone(server: Served) -> None:
    questions = [f"Question {i}: " + "why? " * (3 * i) for i in range(16)]
    alone = [stream_text(server, q, 8) for q in questions]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda q: stream_text(server, q, 8), questions))
    assert together == alone


def test_clients_that_leave_give_every_page_back(server: Served) -> None:
    def leave(number: int) -> None:
        body = {"messages": question(f"Stay {number}"), "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
            for count, _ in enumerate(answer.iter_lines()):
                if count > 8:
                    return

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        leaving = [pool.submit(leave, i) for i in range(8)]
        staying = [pool.submit(stream_text, server, f"Stay {i}", 40) for i in range(8, 16)]
        assert all(task.result() is None for task in leaving)
        assert all(len(task.result()) > 0 for task in staying)
    deadline = time.monotonic() + 20
    while server.metric("k3_arena_blocks", kind="running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("k3_arena_blocks", kind="running") == 0
    assert server.metric("k3_arena_pages", kind="running") == 0
    assert server.metric("k3_requests_in_flight") == 0
    assert server.metric("k3_arena_blocks") == server.metric("k3_arena_blocks_capacity")


def test_completions_and_logprobs(server: Served) -> None:
    got = server.client.completions.create(
        model="random",
        prompt="Once",
        max_tokens=5,
        temperature=0,
        logprobs=2,
        echo=True,
        extra_body={"ignore_eos": True},
    )
    logprobs = got.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.tokens[:4] == ["O", "n", "c", "e"]
    assert logprobs.token_logprobs[0] is None and all(v < 0 for v in logprobs.token_logprobs[1:] if v is not None)
    assert len(logprobs.tokens) == 9


def test_scores_are_those_of_the_network(server: Served) -> None:
    llm = LLM(resolve("random").path, dtype="float64", device="cpu", load_format="dummy", arena_gib=0.02)
    ids = [ord(c) for c in "The quick brown fox"]
    logits = np.asarray(llm.logits(ids), dtype=np.float64)
    llm.close()
    expected = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
    }
    meta = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["meta_info"]
    scored = meta["input_token_logprobs"]
    assert [entry[1] for entry in scored] == ids and scored[0][0] is None
    for position in range(1, len(ids)):
        assert scored[position][0] == pytest.approx(expected[position - 1, ids[position]], abs=1e-6)
        best = [entry[1] for entry in meta["input_top_logprobs"][position]]
        assert best == list(np.argsort(-expected[position - 1])[:3])


def test_seeds_and_stop_ids(server: Served) -> None:
    ask: dict[str, Any] = {"model": "random", "messages": question("Hi"), "max_tokens": 12, "seed": 5}
    one, two = (server.client.chat.completions.create(**ask, n=2) for _ in range(2))
    assert [text_of(c.message) for c in one.choices] == [text_of(c.message) for c in two.choices]
    assert text_of(one.choices[0].message) != text_of(one.choices[1].message)


def test_too_long_is_refused_with_the_numbers(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="context holds 8192"):
        server.client.chat.completions.create(model="random", messages=question("x" * 9000))


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--model-path", "/no/such/folder"], 2, "config.json"),
        (["--model-path", "random", "--arena-gib", "0.0001"], 1, "budget of 107,374 B holds 0 blocks"),
        (["--model-path", "random", "--port", "x"], 2, "--port"),
    ],
)
def test_what_cannot_be_served_ends_with_status_and_reason(options: list[str], status: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "k3stack", "serve", "--port", "0", *options],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    assert says in done.stderr.splitlines()[-1]
    assert done.stdout == ""
