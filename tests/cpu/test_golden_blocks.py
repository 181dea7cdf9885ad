"""Single blocks against the golden in/out pairs: KDA, MLA, experts, residual mix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3stack.models.layers.ffn import MoeFfn
from tests.cpu.harness import NAMES, TestArena, golden, model, off, relative

# The stored pairs are float32 roundings of float64 values.
STORED = 1e-6


def block(name: str, dtype: str, kind: str) -> Tensor:
    """Run one block on its golden input as a fresh sequence."""
    g, net = golden(name), model(name, dtype)
    arena = TestArena(net)
    x = torch.from_numpy(g[f"block_{kind}_in" if kind != "mix" else "block_mix_rows"]).to(net.device, net.dtype)
    with torch.inference_mode():
        if kind == "mix":
            assert net.scorers is not None
            return net.kernels.residual_mix(x, net.scorers.output[0], net.geometry.rms_eps)
        if kind == "moe":
            ffn = net.layers[net.geometry.dense_layers].ffn
            assert isinstance(ffn, MoeFfn)
            return ffn(x, net.geometry.dense_layers, None)
        layer = (net.geometry.kda_layers if kind == "kda" else net.geometry.mla_layers)[0]
        step = arena.batch([(arena.open(), [0] * x.shape[0])]).step
        return net.layers[layer].attention(x, step, arena.views)


CASES = [(n, k) for n in NAMES for k in ("kda", "mla", "moe", "mix") if k != "mix" or n.startswith("k3")]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", STORED), ("float32", 5e-5)])
def test_block(name: str, kind: str, dtype: str, tolerance: float) -> None:
    assert off(block(name, dtype, kind), golden(name)[f"block_{kind}_out"]) < tolerance


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_block_in_bfloat16(name: str, kind: str) -> None:
    assert relative(block(name, "bfloat16", kind), golden(name)[f"block_{kind}_out"]) < 0.015
