"""Which kernels a GPU gets, and a checkpoint in the layout that they take, without a GPU: nothing is computed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from k3stack.kernels import select
from k3stack.kernels.linear.cpu import unpack
from k3stack.kernels.mxfp4.weight import Mxfp4Weight
from k3stack.models import network
from k3stack.models.layers import part
from k3stack.models.layers.ffn import MoeFfn
from k3stack.models.layers.kda import KdaAttention
from k3stack.models.load import load_model
from tests.cpu.harness import GOLDEN, model


@pytest.mark.parametrize("name", ["k3_tiny_open", "kimi_linear_tiny_open"])
def test_experts_stay_as_stored_and_projections_are_filled_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model(name, "bfloat16")
    monkeypatch.setattr(network, "select_kernels", lambda device, dtype, geometry: select._triton(dtype))
    monkeypatch.setattr(part, "packs", lambda dtype, device: False)
    net = load_model(GOLDEN / name, dtype="bfloat16", progress=False)
    for layer, other in zip(net.layers, plain.layers, strict=True):
        if isinstance(layer.attention, KdaAttention):
            assert isinstance(other.attention, KdaAttention)
            mine = layer.attention.w_in.split(list(layer.attention.sizes))
            theirs = unpack(other.attention.w_in).split(list(other.attention.sizes))
            for rows, same, filled in zip(mine, theirs, (False,) * 3 + (True,) + (False,) * 2 + (True,), strict=True):
                assert not rows.any() if filled else torch.equal(rows, same)
            assert layer.attention.own_rows % 64 == layer.attention.w_in.shape[0] % 64 == 0
        if isinstance(layer.ffn, MoeFfn):
            assert isinstance(other.ffn, MoeFfn)
            assert torch.equal(layer.ffn.router.float(), unpack(other.ffn.router))
            for own, stacked in ((layer.ffn.w13, other.ffn.w13), (layer.ffn.w2, other.ffn.w2)):
                assert isinstance(own, Mxfp4Weight) == net.geometry.moe.mxfp4
                for e in range(net.geometry.moe.experts):
                    one = own.plain(e, torch.bfloat16) if isinstance(own, Mxfp4Weight) else own[e]
                    assert torch.equal(one, unpack(stacked[e]).view(one.shape))


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "torch"), ((9, 0), "triton"), ((10, 0), "torch")])
def test_hopper_alone_gets_the_triton_set(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    gpu = torch.device("cuda")
    chosen = select.select_kernels(gpu, torch.bfloat16)
    assert chosen.name == name
    assert (select.select_least_kept(gpu) is None) == (name == "torch")
    if name == "torch":
        assert f"compute capability 9.0, not {capability[0]}.{capability[1]}" in chosen.why
