"""The offline API on the golden checkpoints: their tokens and logits, whatever the schedule."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3stack import LLM, SamplingParams
from k3stack.errors import CheckpointError, DoesNotFit, UserError

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ["k3_tiny_open", "k3_tiny_8h_open", "kimi_linear_tiny_open"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SMALL = {"arena_gib": 0.02}


class Golden:
    def __init__(self, name: str) -> None:
        self.path = str(GOLDEN / name)
        arrays = np.load(GOLDEN / name / "golden.npz")
        self.prompts = [arrays[f"input_ids_{key}"].tolist() for key in ("a", "b0", "b1", "b2")]
        self.tokens = arrays["greedy_tokens"].tolist()
        self.logits = arrays["logits_a"]

    def llm(self, dtype: str = "float64", **options: Any) -> LLM:
        return LLM(self.path, dtype=dtype, **{**SMALL, **options})


K3 = Golden("k3_tiny_open")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with K3.llm() as llm:
        yield llm


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 5e-4)])
def test_golden_logits_and_greedy_tokens(name: str, dtype: str, tolerance: float) -> None:
    golden = Golden(name)
    with golden.llm(dtype, chunked_prefill_size=64) as llm:
        logits = llm.logits(golden.prompts[0])
        assert logits.dtype == dtype and logits.shape == golden.logits.shape
        assert np.abs(logits - golden.logits).max() < tolerance
        results = llm.generate(golden.prompts, GREEDY)
        assert [r.token_ids for r in results] == golden.tokens
        assert [r.finish_reason for r in results] == ["length"] * 4
        assert all(r.prompt_ids == p for r, p in zip(results, golden.prompts, strict=True))


@pytest.mark.parametrize("chunk", [1, 7, 64, 77, -1])
def test_chunk_sizes_do_not_matter(chunk: int) -> None:
    prompts, tokens = (K3.prompts[2:3], K3.tokens[2:3]) if chunk == 1 else (K3.prompts, K3.tokens)
    with K3.llm(chunked_prefill_size=chunk) as llm:
        assert [r.token_ids for r in llm.generate(prompts, GREEDY)] == tokens
        assert np.abs(llm.logits(K3.prompts[0][:50]) - K3.logits[:50]).max() < 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {"disable_overlap_schedule": True},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 30},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 30, "disable_overlap_schedule": True},
        {"disable_radix_cache": True},
        {"engine": "sglang", "chunked_prefill_size": 64},
    ],
    ids=lambda o: "-".join(o),
)
def test_schedules_give_the_same_tokens(options: dict[str, Any]) -> None:
    with K3.llm(**options) as llm:
        assert [r.token_ids for r in llm.generate(K3.prompts, GREEDY)] == K3.tokens


def prompts_of(count: int, longest: int = 90) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 490, int(rng.integers(1, longest))).tolist() for _ in range(count)]


def test_16_streams_finish_with_the_tokens_they_have_alone(llm: LLM) -> None:
    prompts = prompts_of(16)
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, top_p=0.95, max_tokens=20 + i, ignore_eos=True)
        for i in range(16)
    ]
    together = [r.token_ids for r in llm.generate(prompts, params)]
    assert [len(t) for t in together] == [20 + i for i in range(16)]
    for prompt, own, tokens in zip(prompts, params, together, strict=True):
        llm.flush()
        assert llm.generate([prompt], own)[0].token_ids == tokens


def test_32_streams_on_an_arena_far_too_small() -> None:
    """Four states and four pages, and each stream comes to need two pages: they wait, are preempted and resume."""
    prompts = [(prompt * 60)[: 45 + i % 19] for i, prompt in enumerate(prompts_of(32))]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    golden = Golden("kimi_linear_tiny_open")
    with golden.llm() as roomy:
        expected = [r.token_ids for r in roomy.generate(prompts, params)]
        block = roomy.stats()["block_bytes"]
    with golden.llm(arena_gib=5.5 * block / 2**30) as tight:
        results = tight.generate(prompts, params)
        stats = tight.stats()
    assert stats["blocks"] == 5 and stats["scheduler"]["preempted"] > 0
    assert [r.token_ids for r in results] == expected
    assert stats["scheduler"]["finished"]["length"] == 32
    assert stats["blocks_running"] == 0 and stats["pages_running"] == 0


@pytest.mark.parametrize("options", [{}, {"max_gap_ms": 20.0, "target_ttft_s": 0.05, "target_tpot_ms": 5.0}])
def test_the_policy_does_not_matter(options: dict[str, float]) -> None:
    with K3.llm(policy="slo", chunked_prefill_size=32, **options) as llm:
        results = llm.generate(K3.prompts * 2, GREEDY)
    assert [r.token_ids for r in results] == K3.tokens * 2


def test_a_bound_on_the_gap_that_this_machine_cannot_keep_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    """Measured, not assumed: prompts of 64 tokens beside a stream. What was computed for it leaves nothing behind."""
    with K3.llm(policy="slo", max_gap_ms=0.01) as llm:
        stats = llm.stats()
        assert stats["pages_cached"] == stats["blocks_snapshot"] == stats["blocks_running"] == 0
        assert [r.token_ids for r in llm.generate(K3.prompts, GREEDY)] == K3.tokens
    said = [r.getMessage() for r in caplog.records if "cannot be kept" in r.getMessage()]
    assert len(said) == 1 and "the smallest chunk (64 tokens) takes" in said[0]
    caplog.clear()
    with K3.llm(policy="slo", max_gap_ms=600_000.0):
        assert not any("cannot be kept" in r.getMessage() for r in caplog.records)


def test_options_that_do_not_exist_or_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"chunked_prefil_size.*did you mean chunked_prefill_size"):
        LLM(K3.path, chunked_prefil_size=3)
    with pytest.raises(UserError, match="policy"):
        LLM(K3.path, policy="fastest")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM("/nonexistent")
    with pytest.raises(DoesNotFit, match="one request needs 2"):
        K3.llm(arena_gib=0.0004)
    with pytest.raises(UserError, match="mamba-ssm-dtype"):
        K3.llm(mamba_ssm_dtype="bfloat16")


def test_requests_that_cannot_run_say_why(llm: LLM) -> None:
    results = llm.generate(
        [[1, 2], [], [512], [3]],
        [
            SamplingParams(max_tokens=10**7),
            SamplingParams(),
            SamplingParams(),
            SamplingParams(temperature=0.0, max_tokens=2, logit_bias={9999: 1.0}),
        ],
    )
    assert [r.finish_reason for r in results] == ["rejected"] * 4
    for result, word in zip(results, ["context", "empty", "512", "9999"], strict=True):
        assert word in (result.message or "")
    for call in (lambda: llm.logits([]), lambda: llm.logits([600]), lambda: llm.generate([1, 2])):  # type: ignore[list-item]
        with pytest.raises(UserError):
            call()


def test_n_choices_share_the_prompt_and_differ(llm: LLM) -> None:
    llm.flush()
    prompt = K3.prompts[0]
    result = llm.generate([prompt], SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True))[0]
    sequences = [tuple(c.token_ids) for c in result.choices]
    assert len(set(sequences)) == 3 and all(len(s) == 12 for s in sequences)
    alone = llm.generate([prompt], SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True))[0]
    assert tuple(alone.token_ids) == sequences[0]


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    prompt = K3.prompts[2]
    params = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=3, prompt_logprobs_from=0
    )
    result = llm.generate([prompt], params)[0]
    ids = prompt + result.token_ids
    logits = llm.logits(ids)
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    assert len(result.prompt_logprobs) == len(prompt) and result.prompt_logprobs[0] is None
    for position, entry in enumerate([*result.prompt_logprobs[1:], *result.logprobs], start=1):
        assert entry is not None and entry.token == ids[position]
        row = logprobs[position - 1]
        assert entry.logprob == pytest.approx(row[ids[position]], abs=1e-9)
        assert entry.top_logprobs == pytest.approx(np.sort(row)[::-1][:3], abs=1e-9)


def test_stop_tokens_and_end_ids(llm: LLM) -> None:
    expected = K3.tokens[0]
    stop = expected[5]
    first = expected.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(stop,))
    result = llm.generate([K3.prompts[0]], params)[0]
    assert result.finish_reason == "stop" and result.matched_stop == stop
    assert result.token_ids == expected[: first + 1]
    later = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(stop,), min_tokens=first + 2)
    longer = llm.generate([K3.prompts[0]], later)[0].token_ids
    assert len(longer) > first + 1 and longer[first] != stop


def test_stop_strings_never_leak(llm: LLM) -> None:
    """The golden vocabulary of 512 has the byte stand-in, so random output is text of a kind."""
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(K3.tokens[0])
    for start, end in ((3, 5), (7, 12), (0, 1)):
        stop = text[start:end]
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=("never", stop))
        result = llm.generate([K3.prompts[0]], params)[0]
        at = text.index(stop)
        assert (result.finish_reason, result.matched_stop) == ("stop", stop)
        assert llm.tokenizer.decode(result.token_ids) == text[:at]


def test_prompts_may_be_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    by_text, by_ids = llm.generate(["hello", list(b"hello")], params)
    assert by_text.token_ids == by_ids.token_ids and by_text.text is not None


def test_a_forgotten_engine_ends_its_thread() -> None:
    before = threading.active_count()
    llm = K3.llm("float32")
    llm.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=2))
    assert threading.active_count() == before + 1
    del llm
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


REUSE = [("k3_tiny_open", 64), ("kimi_linear_tiny_open", 7)]


@pytest.mark.parametrize(("name", "chunk"), REUSE, ids=[name for name, _ in REUSE])
def test_reused_prefixes_give_the_logits_of_a_fresh_run(name: str, chunk: int) -> None:
    """Hits that end in the middle of a page, at its end, on the whole prompt and behind decoded tokens."""
    rng = np.random.default_rng(2)
    history = rng.integers(0, 490, 200).tolist()
    with Golden(name).llm(chunked_prefill_size=chunk, mamba_track_interval=64) as llm:
        first = llm.generate([history], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
        told = history + first.token_ids
        prompts = {
            "the same prompt": history,
            "the conversation goes on": [*told, 5, 6, 7],
            "a branch at a page's end": [*history[:128], 9, 9],
            "a branch inside a page": [*history[:150], 9, 9, 9],
            "the same branch again": [*history[:150], 9, 9, 9],
            "one page exactly": history[:64],
            "one page exactly, again": history[:64],
            "one token": history[:1],
        }
        cached = {}
        for what, prompt in prompts.items():
            params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=64)
            result = llm.generate([prompt], params)[0]
            cached[what] = result.cached_tokens
            ids = prompt + result.token_ids
            logits = llm.logits(ids)[len(prompt) - 1 : -1]
            shift = logits.max(-1, keepdims=True)
            logprobs = logits - shift - np.log(np.exp(logits - shift).sum(-1, keepdims=True))
            for row, entry in zip(logprobs, result.logprobs, strict=True):
                assert entry.logprob == pytest.approx(row[entry.token], abs=1e-9), what
                assert np.abs(row[list(entry.top_ids)] - entry.top_logprobs).max() < 1e-9, what
        assert cached["the same prompt"] >= 128 and cached["the conversation goes on"] >= 192
        assert cached["a branch at a page's end"] > 0 and cached["the same branch again"] >= 128
        assert all(cached[what] < len(prompt) for what, prompt in prompts.items())
