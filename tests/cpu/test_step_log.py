"""``--step-log``: every step is a line, and the lines add up to what was computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3stack import LLM, SamplingParams
from k3stack.errors import UserError
from k3stack.estimate.measured import read_step_log

GOLDEN = Path(__file__).parents[1] / "golden" / "k3_tiny_open"


def test_lines_add_up_to_what_was_computed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    prompts = [list(range(20, 20 + n)) for n in (150, 40, 70)]
    with LLM(str(GOLDEN), arena_gib=0.02, chunked_prefill_size=64, disable_radix_cache=True, step_log=str(path)) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    head, steps = read_step_log(path)
    assert head["model"] == str(GOLDEN) and head["chunk_tokens"] == 64
    assert sum(x.chunk_tokens for x, _ in steps) == 150 + 40 + 70
    assert sum(x.samples for x, _ in steps) == 3 * 9
    assert sum(x.decode_rows for x, _ in steps) == 3 * 8
    # Prefixes and contexts: what a causal model attends to, once for every token.
    pairs = sum(x.chunk_pairs + x.decode_context for x, _ in steps)
    assert pairs == sum(n * n / 2 + sum(n + i for i in range(8)) for n in (150, 40, 70))
    assert all(seconds > 0 for _, seconds in steps)


def test_a_file_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--step-log"):
        LLM(str(GOLDEN), arena_gib=0.02, step_log=str(tmp_path / "no" / "where.jsonl"))
