"""Cache rows in fp8 and states in bfloat16: half of the bytes, nearly the same answers, whatever way a step goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from k3stack import LLM, SamplingParams
from k3stack.errors import UserError
from k3stack.kernels.mla import cpu as mla

GOLDEN = Path(__file__).parents[1] / "golden"
NARROW = {"kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16"}
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 200, 150)]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Of the middle position: where a router's close choice falls the other way, one position differs by a lot."""
    return float(np.median(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)))


@pytest.mark.parametrize("name", ["k3_tiny_open", "kimi_linear_tiny_open"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_stay_near_and_bytes_halve(name: str, dtype: str) -> None:
    common = {"dtype": dtype, "arena_gib": 0.02}
    with LLM(str(GOLDEN / name), **common) as llm:
        full, wide = llm.logits(IDS), llm._engine.plan.layout
    with LLM(str(GOLDEN / name), **common, **NARROW) as llm:
        narrow, layout = llm.logits(IDS), llm._engine.plan.layout
        assert llm.info["kv_cache_dtype"] == "fp8_e4m3"
        assert llm.info["state_dtype"] == "bfloat16"
    assert layout.row_bytes * (4 if dtype == "float32" else 2) == wide.row_bytes
    assert layout.recurrent_bytes * 2 == wide.recurrent_bytes
    # A number of three bits is off by 2 % at the mean, and attention averages; zero would mean that nothing changed.
    assert 1e-4 < relative(narrow, full) < 0.08


def test_each_is_felt_alone() -> None:
    path = str(GOLDEN / "k3_tiny_open")
    common = {"arena_gib": 0.02, "chunked_prefill_size": 16}  # within a chunk the state is in float32 anyway
    with LLM(path, **common) as llm:
        full = llm.logits(IDS)
    for option, value in NARROW.items():
        with LLM(path, **common, **{option: value}) as llm:
            assert 1e-4 < relative(llm.logits(IDS), full) < 0.08


def test_chunks_of_any_size_and_decode_see_the_same_rows() -> None:
    """One chunk, small chunks and decode round the state at other places, so they agree to its rounding alone; with
    rows in fp8 and a float32 state they agree to float32's."""
    path = str(GOLDEN / "k3_tiny_open")
    found = []
    for chunk in (150, 7):
        with LLM(path, arena_gib=0.02, kv_cache_dtype="fp8_e4m3", chunked_prefill_size=chunk) as llm:
            found.append(llm.logits(IDS))
            sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            answers = [r.token_ids for r in llm.generate([IDS[:n] for n in (40, 90, 150, 151)], sampling)]
            alone = [llm.generate([IDS[:n]], sampling)[0].token_ids for n in (40, 90, 150, 151)]
            assert answers == alone
            whole = llm.logits(IDS[:90] + answers[1])
            assert [int(i) for i in whole[89:-1].argmax(-1)] == answers[1]
    assert relative(found[1], found[0]) < 1e-4


def test_numbers_beyond_fp8_become_the_largest() -> None:
    rows = torch.zeros(2, 4, 6, dtype=torch.float8_e4m3fn)
    kv = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1e6, -700.0]])
    mla.write_rows(kv, torch.full((4,), 1000.0), 1e-6, rows, torch.tensor([1]), torch.tensor([2]))
    assert rows[1, 2].float().tolist() == [448.0, -448.0, 448.0, -448.0, 448.0, -448.0]


@pytest.mark.parametrize("option", NARROW)
def test_float64_keeps_all_in_float64(option: str) -> None:
    with pytest.raises(UserError, match="float64"):
        LLM(str(GOLDEN / "k3_tiny_open"), dtype="float64", arena_gib=0.02, **{option: NARROW[option]})
