"""Whole networks against golden outputs that third-party implementations computed (tests/golden/README.md)."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from k3stack.models.capture import Capture
from k3stack.models.load import load_model
from k3stack.models.network import Model
from tests.cpu.harness import GOLDEN, TestArena

NAMES = ("k3_tiny_open", "k3_tiny_8h_open", "kimi_linear_tiny_open")
EXACT, FLOAT32 = 1e-9, 5e-4


@cache
def model(name: str, dtype: str, eps: float = 1e-6) -> Model:
    return load_model(GOLDEN / name, dtype=dtype, latent_norm_eps=eps, progress=False)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return dict(arrays)


def off(mine: Tensor, theirs: np.ndarray) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    difference = (mine.double() - torch.from_numpy(theirs).double()).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


def prompt(name: str, which: str) -> list[int]:
    return golden(name)[f"input_ids_{which}"].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", EXACT), ("float32", FLOAT32)])
def test_whole_prompt(name: str, dtype: str, tolerance: float) -> None:
    g, net = golden(name), model(name, dtype)
    arena, capture = TestArena(net), Capture()
    seq = arena.open()
    logits = arena.run([(seq, prompt(name, "a"))], every=True, capture=capture)
    for what in ("attn_in", "attn_out", "ffn_in", "ffn_out", "stream"):
        for layer in range(net.geometry.layers):
            assert off(capture.values[what][layer][-1], g[f"last_{what}"][layer]) < tolerance, (what, layer)
    assert off(logits, g["logits_a"]) < tolerance
