"""Triton kernels against their slow twins (see ``twins``): KDA and MLA."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from k3stack.kernels.activation import reference as activation_reference
from k3stack.kernels.kda import reference as kda_reference
from k3stack.kernels.kda import triton as kda
from k3stack.kernels.kda import triton_chunk as kda_chunk
from k3stack.kernels.kda import triton_ring as kda_ring
from k3stack.kernels.kda.layout import chunk_tiles
from k3stack.kernels.linear import cuda as linear_cuda
from k3stack.kernels.mla import reference as mla_reference
from k3stack.kernels.mla import triton as mla
from k3stack.kernels.mla import triton_ends as mla_ends
from k3stack.kernels.norm import reference as norm_reference
from tests.cpu.harness import relative
from tests.gpu.twins import DEVICE, DTYPES, INTERPRETED, TOLERANCE, draw, in_parts, same

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def kda_inputs(rows: int, heads: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    p = heads * k
    return {
        "raw": draw(rows, 3 * p + 8, dtype=dtype)[:, : 3 * p],
        "f": draw(rows, p, dtype=dtype, seed=1),
        "gate": draw(rows, p + 8, dtype=dtype, seed=2)[:, 8:],
        "b": draw(rows, heads, dtype=dtype, seed=3),
        "conv": draw(4, 3 * p, seed=4, scale=0.5),
        "exp_a": draw(heads, seed=5).exp(),
        "dt_bias": draw(p, seed=6),
        "norm": draw(k, seed=7),
    }


def kda_twin(x: dict[str, Tensor], r: int, window: Tensor, state: Tensor, bound: float | None) -> list[Tensor]:
    """Output, state and window after one token of row ``r``."""
    heads, k = state.shape[:2]
    qkv, window = kda_reference.short_conv(x["raw"][r : r + 1], x["conv"], window)
    q, key, v = qkv.view(1, 3, heads, k).unbind(1)
    z = (x["f"][r].float() + x["dt_bias"]).view(1, heads, k)
    g = kda_reference.log_decay(z, x["exp_a"], bound)
    beta = torch.sigmoid(x["b"][r : r + 1].float())
    q, key = norm_reference.l2_norm(q, 1e-6), norm_reference.l2_norm(key, 1e-6)
    o, state = kda_reference.recurrent(q, key, v, g, beta, state)
    y = norm_reference.gated_rms_norm(o[0], x["gate"][r].reshape(heads, k), x["norm"], 1e-5)
    return [y.reshape(-1), state, window]


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("heads", "k", "alone"), [(3, 32, 264), (2, 128, 264), (2, 128, 0)])
def test_kda_decode(
    dtype: torch.dtype, bound: float | None, heads: int, k: int, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kda, "ALONE", alone)
    x, blocks = kda_inputs(4, heads, k, dtype), [5, 2, -1, 0]
    windows, states = draw(6, 3, 3 * heads * k, dtype=dtype, seed=8), draw(6, heads, k, k, seed=9)
    before = windows.clone(), states.clone()
    index = torch.tensor(blocks, device=DEVICE)
    out = kda.decode_step(*x.values(), windows, states, index, bound, 1e-5)
    for r, block in enumerate(blocks):
        if block < 0:
            assert not out[r].any()
            continue
        y, state, window = kda_twin(x, r, before[0][block], before[1][block], bound)
        same(out[r], y, dtype)
        same(states[block], state, torch.float32)
        assert torch.equal(windows[block].float(), window)
    for block in (1, 3, 4):
        assert torch.equal(windows[block], before[0][block])
        assert torch.equal(states[block], before[1][block])


@pytest.mark.parametrize("fused", [0, 16])
@pytest.mark.parametrize("low_gate", [False, True])
def test_kda_decode_from_low_ranks(
    dtype: torch.dtype, low_gate: bool, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kda, "FUSED", fused)
    heads, k = 3, 32
    x, blocks = kda_inputs(4, heads, k, dtype), torch.tensor([5, 2, -1, 0], device=DEVICE)
    low = {name: draw(4, k + 8, dtype=dtype, seed=10 + i)[:, :k] for i, name in enumerate(("f", "gate"))}
    w_f, w_g = (draw(heads * k, k, dtype=dtype, seed=s, scale=0.2) for s in (12, 13))
    given = x | ({"f": low["f"], "gate": low["gate"]} if low_gate else {"f": low["f"]})
    x["f"] = linear_cuda.linear(low["f"], w_f)
    if low_gate:
        x["gate"] = linear_cuda.linear(low["gate"], w_g)
    arenas = [(draw(6, 3, 3 * heads * k, dtype=dtype, seed=8), draw(6, heads, k, k, seed=9)) for _ in range(2)]
    mine = kda.decode_step(*given.values(), *arenas[0], blocks, -5.0, 1e-5, w_f, w_g if low_gate else None)
    theirs = kda.decode_step(*x.values(), *arenas[1], blocks, -5.0, 1e-5)
    same(mine, theirs, dtype)
    same(arenas[0][1], arenas[1][1], dtype if dtype == torch.bfloat16 else torch.float32)
    assert torch.equal(arenas[0][0], arenas[1][0])


@pytest.mark.parametrize(("alone", "k"), [(132, 64), (0, 64), (0, 128)])
def test_kda_decode_adds_up_its_inputs(dtype: torch.dtype, alone: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype != torch.bfloat16:
        pytest.skip("sums are rounded to bfloat16")
    monkeypatch.setattr(kda, "ALONE", alone)
    heads = 3
    x, blocks = kda_inputs(4, heads, k, dtype), torch.tensor([5, 2, -1, 0], device=DEVICE)
    x["f"], w_f = x["f"][:, :k], draw(heads * k, k, dtype=dtype, seed=12, scale=0.2)
    exact = {n: (x[n].float() * 64).round() / 64 for n in ("raw", "f", "gate", "b")}
    products = in_parts(torch.cat(list(exact.values()), 1), 3)
    given = x | dict(zip(exact, products.split([v.shape[1] for v in exact.values()], dim=2), strict=True))
    whole = x | {n: v.to(dtype) for n, v in exact.items()}
    whole["f"] = linear_cuda.linear(whole["f"], w_f)
    arenas = [(draw(6, 3, 3 * heads * k, dtype=dtype, seed=8), draw(6, heads, k, k, seed=9)) for _ in range(2)]
    mine = kda.decode_step(*given.values(), *arenas[0], blocks, -5.0, 1e-5, w_f)
    theirs = kda.decode_step(*whole.values(), *arenas[1], blocks, -5.0, 1e-5)
    same(mine, theirs, dtype)
    same(arenas[0][1], arenas[1][1], dtype)
    assert torch.equal(arenas[0][0], arenas[1][0])


@pytest.mark.parametrize(
    ("bound", "heads", "k"),
    [(-5.0, 3, 32), (None, 2, 16), (-5.0, 2, 64), (None, 2, 128), (-5.0, 3, 128), (-5.0, 6, 128)],
)
def test_kda_chunks(dtype: torch.dtype, bound: float | None, heads: int, k: int) -> None:
    """Sequences of a few tokens, of one tile and of several, between tokens that belong to no chunk."""
    starts, counts, blocks = [1, 4, 68, 140], [2, 64, 70, 9], [4, 0, 5, 2]
    x = kda_inputs(150, heads, k, dtype)
    windows, states = draw(6, 3, 3 * heads * k, dtype=dtype, seed=8), draw(6, heads, k, k, seed=9)
    before = windows.clone(), states.clone()
    out = torch.full((150, heads * k), 7.0, dtype=dtype, device=DEVICE)
    tiles = chunk_tiles(starts, counts, blocks, torch.device(DEVICE))
    kda_chunk.chunks(*x.values(), windows, states, tiles, bound, 1e-5, out)
    for first, count, block in zip(starts, counts, blocks, strict=True):
        state, window, rows = before[1][block], before[0][block], []
        for t in range(first, first + count):
            y, state, window = kda_twin(x, t, window, state, bound)
            rows.append(y)
        theirs, tolerance = torch.stack(rows), 4 * TOLERANCE[dtype]
        assert float(relative(out[first : first + count], theirs)) < tolerance
        assert float(relative(states[block], state)) < tolerance
        assert torch.equal(windows[block].float(), window.float())
    for t in (0, 3, 138, 149):
        assert bool((out[t] == 7).all())
    for block in (1, 3):
        assert torch.equal(windows[block], before[0][block])
        assert torch.equal(states[block], before[1][block])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no Gluon")
@pytest.mark.parametrize("counts", [[300, 64], [4200]], ids=["short", "long"])
def test_kda_states_through_the_ring(dtype: torch.dtype, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the plain kernel, 3 heads: more tiles than the ring has slots, and fewer; a sequence in segments."""
    if dtype == torch.float32:
        pytest.skip("is the plain kernel's alone")
    total, found = sum(counts), []
    x = kda_inputs(total, 3, 128, dtype)
    first = torch.randn(2, 3, 128, 128, device=DEVICE) * 0.1
    starts, blocks = list(itertools.accumulate(counts, initial=0))[:-1], [1, 0][: len(counts)]
    tiles = chunk_tiles(starts, counts, blocks, torch.device(DEVICE))
    for programs in (kda_ring.PROGRAMS, 0):
        monkeypatch.setattr(kda_ring, "PROGRAMS", programs)
        windows, states = torch.zeros(2, 3, 3 * 384, dtype=dtype, device=DEVICE), first.clone()
        out = torch.empty(total, 384, dtype=dtype, device=DEVICE)
        kda_chunk.chunks(*x.values(), windows, states, tiles, -5.0, 1e-5, out)
        found.append((out, states))
    for mine, theirs in zip(*found, strict=True):
        if len(counts) > 1:
            assert torch.equal(mine, theirs)
        assert relative(mine, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize(("heads", "latent"), [(2, 32), (20, 32), (8, 96)])
def test_mla_decode(dtype: torch.dtype, heads: int, latent: int) -> None:
    lengths, width = [1, 64, 65, 300, 0], latent + 16
    q, kv_b = draw(5, heads, 48, dtype=dtype), draw(heads, 64, latent, dtype=dtype, seed=1, scale=0.2)
    rows = torch.full((20, 64, width), float("nan"), device=DEVICE, dtype=dtype)
    table = torch.full((5, 6), 1 << 40, device=DEVICE)
    pages, contents = iter([7, 3, 11, 0, 9, 1, 5, 2, 4, 19, 12]), []
    for r, length in enumerate(lengths):
        contents.append(draw(length, width, dtype=dtype, seed=20 + r))
        for i in range(-(-length // 64)):
            table[r, i] = next(pages)
            part = contents[r][i * 64 : (i + 1) * 64]
            rows[table[r, i], : part.shape[0]] = part
    out = mla.decode(q, rows, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), kv_b)
    for r, length in enumerate(lengths[:-1]):
        theirs = mla_reference.attend(q[r : r + 1].cpu(), contents[r].cpu(), kv_b.cpu(), length - 1)
        same(out[r : r + 1].cpu(), theirs, dtype)
    assert not out[4].any()


@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
@pytest.mark.parametrize("heads", [3, 8, 12, 32])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_mla_decode_at_full_width(dtype: torch.dtype, kind: torch.dtype, heads: int) -> None:
    """Over pages that hold NaN where nothing was written; small values, too: fp8 has subnormal numbers below 2^-6."""
    lengths = [1, 15, 16, 64, 65, 300, 0, 640]
    count = len(lengths)
    q, kv_b = draw(count, heads, 96, dtype=dtype), draw(heads, 64, 512, dtype=dtype, seed=1, scale=0.2)
    q[0] *= 30
    rows = torch.full((count * 10 * 64, 576), 255, dtype=torch.uint8, device=DEVICE).repeat(1, kind.itemsize).view(kind)
    rows = rows.view(-1, 64, 576)
    table = torch.randperm(count * 10, generator=torch.Generator().manual_seed(3)).view(count, 10).to(DEVICE)
    wide = (draw(count, 640, 576, seed=2) * draw(count, 640, 1, seed=3)).to(kind)
    for r, length in enumerate(lengths):
        for n in range(0, length, 64):
            part = wide[r, n : min(n + 64, length)]
            rows[table[r, n // 64], : len(part)] = part
    out = mla.decode(q, rows, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), kv_b)
    for r, length in enumerate(lengths):
        if length:
            seen = wide[r, :length].to(dtype).cpu()
            theirs = mla_reference.attend(q[r : r + 1].cpu(), seen, kv_b.cpu(), length - 1)
            same(out[r : r + 1].cpu(), theirs, dtype)
    assert not out[lengths.index(0)].any()


@pytest.mark.parametrize(
    ("tokens", "nope", "latent"), [(0, 32, 64), (1, 32, 64), (20, 16, 96), (70, 16, 64), (3, 24, 64)]
)
def test_mla_decode_with_its_gate(dtype: torch.dtype, tokens: int, nope: int, latent: int) -> None:
    q, kv_b = draw(tokens, 3, nope + 16, dtype=dtype), draw(3, nope + 24, latent, dtype=dtype, seed=1, scale=0.2)
    rows, gate = draw(2, 16, latent + 16, dtype=dtype, seed=2), draw(tokens, 80, dtype=dtype, seed=3)[:, 8:]
    table = torch.tensor([[1, 0]], device=DEVICE).expand(tokens, 2)
    lengths = torch.arange(tokens, dtype=torch.int32, device=DEVICE) % 32 + 1
    out = mla.gated(q, rows, table, lengths, kv_b, gate)
    assert out.shape == (tokens, 72)
    seen = rows[[1, 0]].view(32, -1).cpu()
    for r, length in enumerate(lengths.tolist()):
        theirs = mla_reference.attend(q[r : r + 1].cpu(), seen[:length], kv_b.cpu(), length - 1)
        same(out[r : r + 1].cpu(), activation_reference.output_gate(theirs, gate[r : r + 1].cpu()), dtype)


@pytest.mark.parametrize(("shared", "latent"), [(16, 32), (32, 32), (32, 96)])
def test_mla_decode_over_fp8_rows(
    dtype: torch.dtype, shared: int, latent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED and shared == 32:
        # The way to fp16, taken from 32 columns on, is for queries in 16 bits alone; the interpreter has no products
        # in bfloat16.
        dtype = torch.bfloat16
        monkeypatch.setattr(mla_ends, "MOST", 0)
    width = latent + shared
    q, kv_b = draw(2, 6, 32 + shared, dtype=dtype), draw(6, 64, latent, dtype=dtype, seed=1, scale=0.2)
    # Small ones too: fp8 has subnormal numbers below 2^-6.
    rows = (draw(8, 64, width, seed=2) * draw(8, 64, 1, seed=3)).to(torch.float8_e4m3fn)
    table = torch.tensor([[3, 7, 0], [5, 1, 1]], device=DEVICE)
    lengths = [150, 70]
    out = mla.decode(q, rows, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), kv_b)
    for r, length in enumerate(lengths):
        seen = rows[table[r]].view(-1, width)[:length].to(dtype)
        theirs = mla_reference.attend(q[r : r + 1].cpu(), seen.cpu(), kv_b.cpu(), length - 1)
        same(out[r : r + 1].cpu(), theirs, dtype)


@pytest.mark.parametrize(("latent", "query"), [(32, False), (96, True)])
def test_cache_rows_are_written(dtype: torch.dtype, latent: int, query: bool) -> None:
    kv, weight = draw(4, latent + 24, dtype=dtype)[:, : latent + 16], draw(latent, dtype=dtype, seed=1)
    rows = torch.zeros(6, 64, latent + 16, device=DEVICE, dtype=dtype)
    pages, places = torch.tensor([3, 3, -1, 5], device=DEVICE), torch.tensor([0, 63, 9, 2], device=DEVICE)
    q, q_weight = draw(4, 120, dtype=dtype, seed=2)[:, :112], draw(112, dtype=dtype, seed=3)
    if query:
        normed = mla_ends.enter(kv, weight, 1e-6, rows, pages, places, q, q_weight)
        same(normed, norm_reference.rms_norm(q, q_weight, 1e-6), dtype)
    else:
        mla_ends.write_rows(kv, weight, 1e-6, rows, pages, places)
    expected = torch.cat([norm_reference.rms_norm(kv[:, :latent], weight, 1e-6), kv[:, latent:]], 1)
    for t in (0, 1, 3):
        same(rows[pages[t], places[t]], expected[t], dtype)
        rows[pages[t], places[t]] = 0
    assert not rows.any()
