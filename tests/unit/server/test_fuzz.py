"""A few hundred mutated requests against a server process; benchmarks/fuzz_chat.py sends thousands."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.fuzz_chat import Found, check, fuzz, left_behind
from benchmarks.mutations import SEEDS, as_bytes, bounded, mutate, places, request

from k3stack.server.native_fields import NativeSampling
from k3stack.server.schemas import BODIES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server process with a scripted engine: its limit on recursion is what a user's is."""
    command = [sys.executable, str(ROOT / "benchmarks" / "scripted_worker.py"), "--tokens", "20", "--step-ms", "1"]
    with subprocess.Popen(
        [*command, "--port", "0", "--disable-request-log"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_mutated_requests_find_nothing_wrong(server: str) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # to write the deep ones
    try:
        found = asyncio.run(fuzz(server, 300, 16, seed=0, timeout_s=30))
    finally:
        sys.setrecursionlimit(limit)
    assert found.wrong == []
    assert found.statuses["200"] > 30 and found.statuses["400"] > 60
    assert not any(left_behind(server).values())


def test_seeds_are_served_when_nothing_is_changed(server: str) -> None:
    """Else the mutations would start from what is refused anyway."""
    for path in ("/v1/completions", "/generate", "/tokenize", "/detokenize", "/v1/messages"):
        for body in SEEDS[path]:
            if "max_tokens" not in body and path == "/v1/messages":
                body = {**body, "max_tokens": 2}
            answer = httpx.post(f"{server}{path}", json=body, timeout=30)
            assert answer.status_code == 200, (path, body, answer.text)


DEEP: Any = json.loads("[" * 300 + "]" * 300)
KINDS = (None, True, -1, 1.5, "x", [], ["auto"], [[]], {}, {"a": 1})
EXTREMES = (2**31, 2**63, 2**64, -(2**64), 1e308, -1e308, 10**400, "9" * 5000, "\x00", "\u00b2", DEEP, {"9" * 5000: 1})


def members() -> list[tuple[str, Any]]:
    """Every path's first body with each member that the path knows set to each value in turn."""
    found = []
    for path, seeds in SEEDS.items():
        names = [("", name) for name in BODIES[path].__struct_fields__]
        if path == "/generate":
            names += [("sampling_params", name) for name in NativeSampling.__struct_fields__]
        for group, name in names:
            for value in (*KINDS, *EXTREMES):
                body = bounded(random.Random(0), path, copy.deepcopy(seeds[0]))
                at = body.setdefault(group, {}) if group else body
                at[name] = value
                found.append((path, body))
    return found


def retyped() -> list[tuple[str, Any]]:
    """Every body with one of its members, at any depth, replaced by a value of every JSON type."""
    found = []
    for path, seeds in SEEDS.items():
        for seed in seeds:
            for number in range(len(list(places(seed)))):
                for value in (*KINDS, *EXTREMES):
                    body = copy.deepcopy(seed)
                    at, key = list(places(body))[number]
                    at[key] = copy.deepcopy(value)
                    found.append((path, bounded(random.Random(0), path, body)))
    return found


def test_members_of_every_type(server: str) -> None:
    """A sample here; all of them, some thousands, with SAMPLE=0 in the environment."""
    size = int(os.environ.get("SAMPLE", "400"))
    bodies = retyped() + members()
    wrong = []
    with httpx.Client(base_url=server, timeout=60) as client:
        for path, body in random.Random(3).sample(bodies, size) if size else bodies:
            answer = client.post(path, json=body)
            if answer.status_code >= 500:
                wrong.append((path, body, answer.text))
    assert wrong == []


def test_tool_calls_of_another_type_on_a_user_message(server: str) -> None:
    """Found by the fuzzer: the ids of an answer's calls were counted from it, and it has no length."""
    for calls in (-5, True, "x", {"a": 1}, [7]):
        body = {"messages": [{"role": "user", "content": "Hi", "tool_calls": calls}], "max_tokens": 2}
        assert httpx.post(f"{server}/v1/chat/completions", json=body, timeout=30).status_code in (200, 400)


def test_tool_choice_of_another_type_in_anthropics_form(server: str) -> None:
    """Found by the fuzzer: a list has no hash, so it could not be looked up."""
    for kind in (["auto"], {"a": 1}, 1, None):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "tool_choice": {"type": kind}}
        answer = httpx.post(f"{server}/v1/messages", json=body, timeout=30)
        assert answer.status_code == 400 and "tool_choice" in answer.text


def test_same_seed_same_requests() -> None:
    twice = [[request(random.Random(f"7-{i}"), list(SEEDS)) for i in range(50)] for _ in range(2)]
    assert twice[0] == twice[1]


def test_mutations_leave_the_original_alone() -> None:
    rng = random.Random(0)
    before = json.dumps(SEEDS)
    for _ in range(200):
        body = rng.choice(SEEDS["/v1/chat/completions"])
        as_bytes(rng, mutate(rng, body))
    assert json.dumps(SEEDS) == before


@pytest.mark.parametrize(
    ("status", "head", "body"),
    [
        (500, b"content-type: application/json", b'{"error": {"message": "x"}}'),
        (400, b"content-type: application/json", b'{"detail": "x"}'),
        (200, b"content-type: application/json", b'{"a":'),
        (200, b"content-type: text/event-stream", b'data: {"a": 1}\n\n'),
        (200, b"content-type: text/event-stream", b'data: {"error": {"message": "x"}}\n\n'),
        (200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked", b"5\r\ndata:\r\n"),
        (0, b"", b""),
    ],
)
def test_what_counts_as_wrong(status: int, head: bytes, body: bytes) -> None:
    assert check(status, head, body, Found())
