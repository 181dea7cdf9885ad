"""MXFP4 decoding and the KDA recurrence against vectors of third-party implementations."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from k3stack.kernels.kda import cpu as kda
from k3stack.kernels.kda import reference as kda_reference
from k3stack.kernels.kda.layout import tile_layout
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.kernels.mxfp4 import reference as mxfp4_reference
from k3stack.kernels.norm import cpu as norm
from tests.cpu.harness import GOLDEN, off

MXFP4 = np.load(GOLDEN / "mxfp4_vectors.npz")
KDA = np.load(GOLDEN / "kda_vectors.npz")
CASES = [c["case"] for c in json.loads((GOLDEN / "vectors.json").read_text())["kda_vectors"]["cases"]]
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mxfp4_is_exact(dtype: torch.dtype) -> None:
    out = torch.empty(64, 256, dtype=dtype)
    mxfp4.decode_into(torch.from_numpy(MXFP4["packed"]), torch.from_numpy(MXFP4["scale"]), out)
    assert torch.equal(out.float(), torch.from_numpy(MXFP4["decoded"]))
    bits = torch.from_numpy(MXFP4["decoded_bf16_bits"].view(np.int16)).view(torch.bfloat16)
    assert torch.equal(out.to(torch.bfloat16), bits)


def test_mxfp4_reference_agrees() -> None:
    packed, scale = torch.from_numpy(MXFP4["packed"]), torch.from_numpy(MXFP4["scale"])
    assert torch.equal(mxfp4_reference.decode(packed, scale).float(), torch.from_numpy(MXFP4["decoded"]))


def test_mxfp4_encoding_round_trips() -> None:
    # Rows of the vectors whose groups use their scale fully (a magnitude of 4 or 6) come back byte for byte.
    decoded = torch.from_numpy(MXFP4["decoded"])[3:]
    packed, scale = mxfp4.encode(decoded)
    out = torch.empty_like(decoded)
    mxfp4.decode_into(packed, scale, out)
    assert torch.equal(out, decoded)


def case(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        k: torch.from_numpy(KDA[f"{name}_{k}"]).to(dtype) for k in ("q_raw", "k_raw", "q", "k", "v", "g", "beta", "h0")
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_l2_norm(name: str, dtype: torch.dtype, tolerance: float) -> None:
    # The stored q and k are float32 roundings.
    c, tolerance = case(name, dtype), max(tolerance, 6e-8)
    assert off(norm.l2_norm(c["q_raw"], 1e-6), KDA[f"{name}_q"]) < tolerance
    assert off(norm.l2_norm(c["k_raw"], 1e-6), KDA[f"{name}_k"]) < tolerance


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("start", ["zero", "h0"])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("how", ["reference", "chunked", "in pieces", "decode"])
def test_kda(name: str, start: str, dtype: torch.dtype, tolerance: float, how: str) -> None:
    c = case(name, dtype)
    state = c["h0"] if start == "h0" else torch.zeros_like(c["h0"])
    args = [c[x] for x in ("q", "k", "v", "g", "beta")]
    count = c["q"].shape[0]
    if how == "reference":
        out, after = kda_reference.recurrent(*args, state)
    else:
        states = torch.full((3, *state.shape), float("nan"), dtype=dtype)
        states[1] = state
        out = torch.empty_like(c["v"])
        size = {"chunked": count, "in pieces": 23, "decode": 1}[how]
        for at in range(0, count, size):
            part = [x[at : at + size] for x in args]
            if how == "decode":
                out[at : at + 1] = kda.decode(*part, states, [1])
            else:
                n = part[0].shape[0]
                kda.prefill(*part, states, tile_layout([0], [n], [1], n), out[at : at + size])
        after = states[1]
        assert torch.isnan(states[0]).all()
        assert torch.isnan(states[2]).all()
    assert off(out, KDA[f"{name}_o_{start}"]) < tolerance
    assert off(after, KDA[f"{name}_s_{start}"]) < tolerance
