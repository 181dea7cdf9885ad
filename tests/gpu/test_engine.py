"""The engine on the GPU with K3-nano: the CPU's greedy tokens, agreement with the reference, and the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from k3stack.config.sampling import SamplingParams
from k3stack.engine.llm import LLM
from k3stack.verify.local import LocalTarget
from k3stack.verify.run import AGREEMENT, verify

PROMPTS = ["The capital of France is", "1 2 3 4 5", "A list of fruit: apple, pear,"]
OPTIONS = {"arena_gib": 0.5, "max_running_requests": 16}


def test_greedy_tokens_are_those_of_the_cpu() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=48)
    tokens = []
    for device in ("cpu", "cuda"):
        with LLM("nano", dtype="float32", device=device, **OPTIONS) as llm:
            tokens.append([g.token_ids for g in llm.generate(PROMPTS, sampling)])
    assert tokens[0] == tokens[1]


def test_seeded_sampling_is_the_same_alone_and_in_a_batch() -> None:
    with LLM("nano", dtype="float32", device="cuda", **OPTIONS) as llm:
        params = [SamplingParams(temperature=1.0, top_p=0.9, top_k=k, seed=7 + k, max_tokens=24) for k in (0, 5, 40)]
        together = [g.token_ids for g in llm.generate(PROMPTS, params)]
        alone = [llm.generate([p], [s])[0].token_ids for p, s in zip(PROMPTS, params, strict=True)]
    assert together == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nano_agrees_with_its_reference(dtype: str) -> None:
    with LocalTarget("nano", dtype, "cuda") as target:
        report = verify(target, target.tokenizer, dtype=dtype, quick=True)
    found, limits = report["agreement"], AGREEMENT[dtype]
    assert found["top1"] >= limits["top1"]
    assert found["mean_kl"] <= limits["mean_kl"]
    assert report["passed"], report["missed"]


def test_serve_on_the_gpu() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "k3stack", "serve", "--model-path", "nano", "--device", "cuda", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--arena-gib", "0.5"], stderr=subprocess.PIPE, text=True, cwd=root / "src"
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"answers at (http://\S+)", line):
                break
        else:
            pytest.fail("the server ended: " + "".join(said[-20:]))
        url = found.group(1)
        body = {"model": "nano", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
