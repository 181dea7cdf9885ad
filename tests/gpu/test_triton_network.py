"""Whole golden networks on the Triton kernels in fp32: under the interpreter, where no GPU is needed."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU runs all golden tests instead (test_golden.py)", allow_module_level=True)

from k3stack.kernels import select
from k3stack.models import network
from k3stack.models.layers import part
from k3stack.models.load import load_model
from tests.cpu.harness import GOLDEN, TestArena, golden, off
from tests.cpu.test_golden_network import FLOAT32, prompt


@pytest.mark.parametrize("name", ["k3_tiny_open", "kimi_linear_tiny_open"])
def test_prefill_and_decode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of (b) prefilled, one in chunks beside decode rows, then greedy steps: logits as others computed them."""
    monkeypatch.setattr(network, "select_kernels", lambda device, dtype, geometry: select._triton(torch.float32))
    monkeypatch.setattr(part, "packs", lambda dtype, device: False)
    net = load_model(GOLDEN / name, dtype="float32", progress=False)
    assert net.kernels.name == "triton"
    g, arena = golden(name), TestArena(net)
    one, mid = (arena.open() for _ in range(2))
    ids = prompt(name, "b1")
    assert not arena.run([(mid, ids[:20])], wanted=[]).numel()
    logits = arena.run([(one, prompt(name, "b0")), (mid, ids[20:])])
    assert off(logits, g["logits_b_last"][:2]) < FLOAT32
    for step in range(1):
        tokens = logits.argmax(-1).tolist()
        assert tokens == g["greedy_tokens"][1:3, step].tolist()
        logits = arena.run([(one, tokens[:1]), (mid, tokens[1:])])
        assert off(logits, g["greedy_logits"][1:3, step + 1]) < FLOAT32
