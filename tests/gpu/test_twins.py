"""Every Triton kernel against its slow twin: on a GPU, or, in fp32, under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from k3stack.kernels.activation import reference as activation_reference
from k3stack.kernels.activation import triton as activation
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.kda import reference as kda_reference
from k3stack.kernels.kda import triton as kda
from k3stack.kernels.kda import triton_chunk as kda_chunk
from k3stack.kernels.kda import triton_ring as kda_ring
from k3stack.kernels.kda.layout import chunk_tiles
from k3stack.kernels.linear import cuda as linear_cuda
from k3stack.kernels.linear import reference as linear_reference
from k3stack.kernels.linear import ring, triton_one
from k3stack.kernels.linear import triton as linear
from k3stack.kernels.mla import reference as mla_reference
from k3stack.kernels.mla import triton as mla
from k3stack.kernels.mla import triton_ends as mla_ends
from k3stack.kernels.moe import reference as moe_reference
from k3stack.kernels.moe import triton as moe
from k3stack.kernels.moe import triton_chunk, triton_decode, triton_group, triton_route, triton_units
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.kernels.mxfp4.triton import halves
from k3stack.kernels.mxfp4.weight import Mxfp4Weight, in_tiles
from k3stack.kernels.norm import reference as norm_reference
from k3stack.kernels.norm import triton as norm
from k3stack.kernels.residual import reference as residual_reference
from k3stack.kernels.residual import triton as residual
from k3stack.kernels.sampling import reference as sampling_reference
from k3stack.kernels.sampling import triton as sampling
from tests.cpu.harness import relative

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.012}
"""Relative L2 distance."""
pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def same(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert mine.dtype == theirs.dtype
    assert float(relative(mine, theirs)) < TOLERANCE[dtype]


def test_norms(dtype: torch.dtype) -> None:
    x, w = draw(5, 112, dtype=dtype)[:, :96], draw(96, dtype=dtype, seed=1)
    same(norm.rms_norm(x, w, 1e-5), norm_reference.rms_norm(x, w, 1e-5), dtype)
    y = draw(5, 96, dtype=dtype, seed=4)
    added = x + y
    mine = x.contiguous()
    same(norm.add_norm(mine, y, w, 1e-5), norm_reference.rms_norm(added, w, 1e-5), dtype)
    assert torch.equal(mine, added)
    a, gate, v = draw(5, 3, 32), draw(5, 112, dtype=dtype, seed=2)[:, 16:], draw(32, seed=3)
    gate = gate.reshape(5, 3, 32)
    same(norm.gated_rms_norm(a, gate, v, 1e-5), norm_reference.gated_rms_norm(a, gate, v, 1e-5), dtype)
    same(norm.l2_norm(a, 1e-6), norm_reference.l2_norm(a, 1e-6), torch.float32)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
def test_a_kernel_is_started_as_it_was_compiled_for_its_arguments(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    # Whichever comes first: multiples of 16 and others, as width, as distance of rows, and as address.
    cases = [
        (draw(5, 112, dtype=dtype)[:, :96], draw(96, dtype=dtype, seed=1)),
        (draw(5, 113, dtype=dtype)[:, :96], draw(96, dtype=dtype, seed=1)),
        (draw(5, 112, dtype=dtype)[:, 1:98], draw(97, dtype=dtype, seed=1)),
        (draw(5, 1, dtype=dtype), draw(1, dtype=dtype, seed=1)),
    ]
    for i in (*order, *order):
        x, w = cases[i]
        same(norm.rms_norm(x, w, 1e-5), norm_reference.rms_norm(x, w, 1e-5), dtype)
        rows = x.unsqueeze(1).clone()
        score = draw(x.shape[1], seed=2)
        same(residual.mix(rows, score, 1e-5), residual_reference.mix(rows, score, 1e-5), dtype)


def test_activations(dtype: torch.dtype) -> None:
    x = draw(4, 2 * 1100, dtype=dtype, scale=8.0)
    same(activation.situ_glu(x, 4.0, 25.0), activation_reference.situ_glu(x, 4.0, 25.0), dtype)
    same(activation.silu_glu(x), activation_reference.silu_glu(x), dtype)
    o, gate = draw(2, 4, 16, dtype=dtype).transpose(0, 1), draw(4, 40, dtype=dtype, seed=1)[:, 8:]
    same(activation.output_gate(o, gate), activation_reference.output_gate(o, gate), dtype)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("change", [residual.NOTHING, residual.ADD, residual.REPLACE])
@pytest.mark.parametrize("many", [False, True])
def test_residual_mix(dtype: torch.dtype, count: int, change: int, many: bool) -> None:
    bank, y = draw(4, 6, 96, dtype=dtype), draw(4, 96, dtype=dtype, seed=1)
    score, weight = draw(96, seed=2, scale=0.3), draw(96, dtype=dtype, seed=3)
    expected = bank.clone()
    if change == residual.ADD:
        expected[:, count - 1] += y
    elif change == residual.REPLACE:
        expected[:, count - 1] = y
    both = {"mixed": True, "many": many, "early": count == 3}
    mixed, normed = residual.mix_norm(bank[:, :count], y, change, score, 1e-5, weight, 1e-5, **both)
    assert torch.equal(bank, expected)
    theirs = residual_reference.mix(expected[:, :count], score, 1e-5)
    assert mixed is not None
    assert normed is not None
    same(mixed, theirs, dtype)
    same(normed, norm_reference.rms_norm(theirs, weight, 1e-5), dtype)


@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 40, 64), (5, 37, 200), (17, 16, 512)])
def test_products_of_few_tokens(dtype: torch.dtype, tokens: int, rows: int, width: int) -> None:
    x, w = draw(tokens, width + 8, dtype=dtype)[:, :width], draw(rows, width, dtype=dtype, seed=1)
    mine = linear.linear(x, w, linear.Tile(16, 32, 4, 3, ahead=64))
    same(mine, linear_reference.linear(x, w), dtype)
    y = draw(tokens, rows, dtype=dtype, seed=2)
    added = linear.linear(x, w, linear.Tile(16, 32, 4, 3, False), plus=y)
    same(added, linear_reference.linear(x, w) + y, dtype)
    same(linear.linear(x, w, linear.Tile(32, 16, 2, 2), torch.float32), x.float() @ w.float().T, torch.float32)


@pytest.mark.parametrize(("rows", "width", "form"), [(37, 512, (1, 4, 1)), (18, 512, (2, 2, 1)), (21, 1024, (1, 4, 2))])
def test_products_of_one_token(dtype: torch.dtype, rows: int, width: int, form: tuple[int, int, int]) -> None:
    x, w = draw(1, width + 8, dtype=dtype)[:, 8:], draw(rows, width + 16, dtype=dtype, seed=1)[:, :width]
    y = draw(1, rows, dtype=dtype, seed=2)
    by = triton_one.Form(*form)
    same(triton_one.linear(x, w, by), linear_reference.linear(x, w), dtype)
    same(triton_one.linear(x, w, by, plus=y), linear_reference.linear(x, w) + y, dtype)
    same(triton_one.linear(x, w, by, torch.float32), x.float() @ w.float().T, torch.float32)


@pytest.mark.parametrize("tokens", [1, 5])
def test_sums_of_two_products(dtype: torch.dtype, tokens: int) -> None:
    x, w = draw(tokens, 72, dtype=dtype)[:, :64], draw(70, 64, dtype=dtype, seed=1)
    x2, w2 = draw(tokens, 32, dtype=dtype, seed=2), draw(70, 32, dtype=dtype, seed=3)
    tile = linear.Tile(32, 16, 2, 2, parts=False)
    assert linear.fits_both(x, x2, tile)
    y = linear.linear_both(x, w, x2, w2, tile)
    same(y, (x.float() @ w.float().T + x2.float() @ w2.float().T).to(dtype), dtype)
    assert not linear.fits_both(x, x2[:, :24], tile)
    assert not linear.fits_both(x, x2, linear.Tile(32, 16, 2, 2))


@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
@pytest.mark.parametrize(
    ("tokens", "rows", "width", "form"),
    [
        (1, 70, 64, (4, 3, 2)),
        (5, 200, 1088, (4, 3, 3)),
        (17, 300, 1024, (2, 3, 1, 2)),
        (64, 130, 1088, (2, 4, 4, 4)),
        (33, 130, 192, (2, 7, 7, 4)),
    ],
)
def test_products_by_rings(dtype: torch.dtype, tokens: int, rows: int, width: int, form: tuple[int, ...]) -> None:
    if dtype != torch.bfloat16:
        pytest.skip("rings take bfloat16")
    own = ring.Ring(*form)
    x, w = draw(tokens, width + 8, dtype=dtype)[:, :width], draw(rows, width, dtype=dtype, seed=1)
    assert ring.fits(x, w)
    expected = x.float() @ w.float().T
    first = ring.product(x, w, own)
    same(first, expected.to(dtype), dtype)
    # Another program may add up the shares each time; the sums are the same.
    for _ in range(3):
        assert torch.equal(first, ring.product(x, w, own))
    same(ring.product(x, w, own, torch.float32), expected, torch.float32)
    x2, w2 = draw(tokens, 192, dtype=dtype, seed=2), draw(rows, 192, dtype=dtype, seed=3)
    both = (expected + x2.float() @ w2.float().T).to(dtype)
    same(ring.product(x, w, own, second=(x2, w2)), both, dtype)
    assert not ring.fits(x, w[:, 4:])


@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
@pytest.mark.parametrize(
    ("tokens", "rows", "form"),
    [(64, 300, (2, 3, 3, 3)), (20, 130, (2, 7, 7, 4)), (16, 130, (2, 5, 4, 4)), (3, 70, (4, 3, 2, 2))],
)
def test_products_that_others_add_up(dtype: torch.dtype, tokens: int, rows: int, form: tuple[int, ...]) -> None:
    if dtype != torch.bfloat16:
        pytest.skip("rings take bfloat16")
    x, w = draw(tokens, 1088, dtype=dtype), draw(rows, 1088, dtype=dtype, seed=1)
    parts = ring.product(x, w, ring.Ring(*form), apart=True)
    assert parts.shape == (form[-1], tokens, rows)
    same(parts.sum(0), x.float() @ w.float().T, torch.float32)


@pytest.mark.skipif(INTERPRETED, reason="no other products are chosen there")
def test_products_of_no_tokens(dtype: torch.dtype) -> None:
    x, w = draw(0, 7168, dtype=dtype), draw(512, 7168, dtype=dtype)
    assert linear_cuda.linear(x, w).shape == (0, 512)
    assert linear_cuda.linear_apart(x, w) is None


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


def in_parts(x: Tensor, shares: int) -> Tensor:
    """fp32 numbers whose sum over the first dimension is ``x``; they are exact."""
    parts = [(draw(*x.shape, seed=30 + i) * 64).round() / 64 for i in range(shares - 1)]
    return torch.stack([*parts, x.float() - sum(parts, torch.zeros_like(x, dtype=torch.float32))])


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


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 16, 4), (7, 896, 16)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_router(dtype: torch.dtype, tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    logits, bias = draw(tokens, experts), draw(experts, seed=1, scale=0.3)
    ids, weights = triton_route.route(logits, bias, top_k, 2.446, renormalize)
    ids_r, weights_r = moe_reference.route(logits, bias, top_k, 2.446, renormalize)
    order, order_r = ids.argsort(-1), ids_r.argsort(-1)
    assert torch.equal(ids.gather(1, order), ids_r.gather(1, order_r))
    same(weights.gather(1, order), weights_r.gather(1, order_r), torch.float32)


def test_a_router_without_numbers_still_names_experts(dtype: torch.dtype) -> None:
    logits = draw(3, 24)
    logits[1] = float("nan")
    ids, weights = triton_route.route(logits, draw(24, seed=1), 4, 1.0, True)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 24
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


def test_what_top_k_and_top_p_keep(dtype: torch.dtype) -> None:
    vocab = 9_000
    weights = torch.exp(draw(7, vocab, scale=3.0))
    weights[4] = weights[4].round(decimals=1)  # many equal ones
    weights[5] = 1.0
    weights /= weights.amax(1, keepdim=True)
    top_k = torch.tensor([5, 0, 40, 0, 30, 7, 20_000], device=DEVICE)
    top_p = torch.tensor([1.0, 0.9, 0.5, 1.0, 0.8, 0.3, 1e-9], dtype=torch.float64, device=DEVICE)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0], dtype=torch.float64, device=DEVICE)
    mine = sampling.least_kept(weights, top_k, top_p, min_p)
    assert torch.equal(mine, sampling_reference.least_kept(weights, top_k, top_p, min_p))
    kept = (weights >= mine.unsqueeze(1)).sum(1).tolist()
    assert kept[0] == 5
    assert kept[5] == vocab
    assert kept[6] == 1


@pytest.mark.parametrize("sizes", [(48, 64, 600), (16, 0, 32)])
def test_what_follows_the_joined_products(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    products, bias = draw(3, sum(sizes), scale=4.0), draw(sizes[0], seed=1, scale=0.3)
    situ = sizes[1] > 0
    act = Glu("situ" if situ else "silu", 4.0, 25.0, lambda t: slow_glu(t, situ))
    ids, weights, latent, hidden = triton_route.choose(products, bias, sizes, act, 4, 2.4, True)
    exact = (products * 1024).round() / 1024
    whole = triton_route.choose(exact, bias, sizes, act, 4, 2.4, True)
    parts = triton_route.choose(in_parts(exact, 3), bias, sizes, act, 4, 2.4, True)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    logits, z, gate_up = products.split(list(sizes), dim=1)
    ids_r, weights_r = triton_route.route(logits.contiguous(), bias, 4, 2.4, True)
    assert torch.equal(ids, ids_r)
    assert torch.equal(weights, weights_r)
    assert latent.shape == z.shape
    if z.numel():
        same(latent, z.bfloat16(), torch.bfloat16)
    same(hidden, slow_glu(gate_up.bfloat16(), situ), torch.bfloat16)


@pytest.mark.parametrize("kind", ["situ", "silu"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (5, 4), (70, 4)])
def test_experts(dtype: torch.dtype, kind: str, packed: bool, tokens: int, first: int) -> None:
    """Experts ``first`` on are here; those of a token that are elsewhere add nothing."""
    experts, here, width, inner, top_k = 12, 8, 96, 64, 3
    x = draw(tokens, width, dtype=dtype)
    plain13 = draw(here, 2 * inner, width, seed=1, scale=0.4)
    plain2 = draw(here, width, inner, seed=2, scale=0.4)
    w13: Tensor | Mxfp4Weight = plain13.to(dtype)
    w2: Tensor | Mxfp4Weight = plain2.to(dtype)
    full = torch.zeros(experts, 2 * inner, width, dtype=dtype), torch.zeros(experts, width, inner, dtype=dtype)
    if packed:
        w13, w2 = encode(plain13), encode(plain2)
    for e in range(here):
        full[0][first + e] = w13.plain(e, dtype) if isinstance(w13, Mxfp4Weight) else w13[e]
        full[1][first + e] = w2.plain(e, dtype) if isinstance(w2, Mxfp4Weight) else w2[e]
    ids = draw(tokens, experts, seed=3).topk(top_k, dim=-1).indices
    weights = torch.softmax(draw(tokens, top_k, seed=4), -1)
    situ = kind == "situ"
    act = Glu("situ" if situ else "silu", 4.0, 25.0, lambda t: slow_glu(t, situ))
    mine = moe.experts(x, ids, weights, w13, w2, act, first)
    theirs = moe_reference.experts(x.cpu(), ids.cpu(), weights.cpu(), *full, lambda t: slow_glu(t, situ))
    same(mine.cpu(), theirs, dtype)


@pytest.mark.parametrize(("tokens", "width", "inner"), [(1, 512, 64), (3, 96, 48), (5, 96, 48)])
def test_experts_and_another_product(dtype: torch.dtype, tokens: int, width: int, inner: int) -> None:
    """Few tokens and more; some chosen experts are elsewhere."""
    experts, here, first, top_k, other = 12, 8, 4, 3, 80
    x, y = draw(tokens, width + 8, dtype=dtype)[:, :width], draw(tokens, other, dtype=dtype, seed=5)
    w13 = draw(here, 2 * inner, width, dtype=dtype, seed=1, scale=0.2)
    w2 = draw(here, width, inner, dtype=dtype, seed=2, scale=0.2)
    plus = draw(width, other, dtype=dtype, seed=6, scale=0.2)
    ids = draw(tokens, experts, seed=3).topk(top_k, dim=-1).indices
    weights = torch.softmax(draw(tokens, top_k, seed=4), -1)
    act = Glu("silu", 1.0, 1.0, lambda t: slow_glu(t, False))
    mine = moe.experts_plus(x, ids, weights, w13, w2, act, (y, plus), first, experts)
    full = [torch.zeros(experts, *w.shape[1:], dtype=dtype) for w in (w13, w2)]
    for whole, w in zip(full, (w13, w2), strict=True):
        whole[first : first + here] = w.cpu()
    theirs = moe_reference.experts(x.cpu(), ids.cpu(), weights.cpu(), *full, lambda t: slow_glu(t, False))
    same(mine.cpu(), (theirs.float() + y.cpu().float() @ plus.cpu().float().T).to(dtype), dtype)


def rows_of(scores: Tensor) -> list[list[int]]:
    """Experts of each row [T, E], the best first, of equal ones the lower."""
    return [sorted(range(len(row)), key=lambda e: (-row[e], e)) for row in scores.tolist()]


@pytest.mark.parametrize(("experts", "top_k"), [(24, 4), (256, 8), (896, 16), (1000 if INTERPRETED else 1100, 5)])
def test_equal_scores_go_to_the_lower_expert(dtype: torch.dtype, experts: int, top_k: int) -> None:
    logits = draw(9, experts, scale=3.0).round()
    logits[0] = 0.0
    logits[1, : experts // 2] = -20.0
    logits[2, 5:] = -float("inf")
    bias = draw(experts, seed=1, scale=0.5).round(decimals=1)
    scores = torch.sigmoid(logits) + bias
    for alike in (torch.zeros_like(bias), bias):
        ids, weights = triton_route.route(logits, alike, top_k, 1.0, False)
        if alike is not bias:
            assert ids.tolist() == [row[:top_k] for row in rows_of(logits)]
        else:
            assert torch.equal(scores.gather(1, ids), scores.topk(top_k, -1).values)
        same(weights, torch.sigmoid(logits).gather(1, ids), torch.float32)


@pytest.mark.parametrize(
    ("columns", "rows", "tokens", "way"),
    [(1, 4, 9, "lists"), (2, 4, 1, "lists"), (2, 4, 9, "units"), (4, 2, 1, "one")],
)
def test_experts_of_a_decode_step(
    dtype: torch.dtype, columns: int, rows: int, tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXFP4 and bfloat16 activations, whatever the dtype of the others; experts with none, few and many tokens; two
    programs that share the work."""
    monkeypatch.setattr(triton_units, "MULTIPROCESSORS", 1)
    here, width, inner, top_k, first = 2, 384 if columns > 1 else 128, 128, 2, 1
    x = draw(tokens, width + 8, dtype=torch.bfloat16)[:, :width]
    drawn = draw(here, 2 * inner, width, seed=1, scale=0.4), draw(here, width, inner, seed=2)
    w13, w2 = in_tiles(*(encode(w) for w in drawn))
    assert w13.tiled
    liking = draw(tokens, here + 2, seed=3)
    liking[:, 1] = 9.0  # an expert that all choose
    liking[:, 2] += 9.0 * (way == "one")
    ids = liking.topk(top_k, dim=-1).indices
    weights = torch.softmax(draw(tokens, top_k, seed=4), -1)
    act = Glu("situ", 4.0, 25.0, lambda t: slow_glu(t, True))
    asm, share = not INTERPRETED, triton_units.Share(columns, rows, 2, programs=2)
    if way == "one":
        mine = triton_units.result_of_one(x, w13, w2, act, (ids, weights, first), share, asm=asm)
    else:
        groups = moe.group(ids, here, first, way == "units")
        warps = triton_decode.Warps(columns, rows, stages=2)
        each = (
            triton_units.results(x, w13, w2, act, groups, (ids, first), share, asm=asm)
            if way == "units"
            else triton_decode.results(x, w13, w2, act, groups, top_k, (warps, warps), asm=asm)
        )
        mine = moe.add_up(each, ids, weights, first, here)
    full = [torch.zeros(here + 2, *w.shape[1:], dtype=torch.bfloat16) for w in (w13, w2)]
    for e, (a, w) in itertools.product(range(here), zip(full, (w13, w2), strict=True)):
        a[first + e] = w.plain(e, torch.bfloat16)
    theirs = moe_reference.experts(x.cpu(), ids.cpu(), weights.cpu(), *full, lambda t: slow_glu(t, True))
    for t in range(tokens):
        assert float(relative(mine[t], theirs[t])) < (0.02 if INTERPRETED else 0.012)  # it cuts bfloat16 off


@pytest.mark.parametrize("more", [0, 16])
@pytest.mark.parametrize("packed", [True, False])
def test_experts_of_a_chunk(dtype: torch.dtype, packed: bool, more: int) -> None:
    """Experts with no, few and many tokens; some chosen experts are elsewhere."""
    tokens, total, here, first, width, inner, top_k = 70, 6, 4, 1, 256, 128, 2
    x = draw(tokens, width + 16, dtype=dtype)[:, :width]
    drawn = draw(here, 2 * inner, width, seed=1, scale=0.4), draw(here, width, inner, seed=2)
    w13, w2 = in_tiles(*(encode(w) for w in drawn)) if packed else [w.to(dtype) for w in drawn]
    popularity = torch.tensor([1.0, 2.0, -9.0, 0.0, -1.5, 1.0], device=DEVICE)
    ids = (draw(tokens, total, seed=3) + popularity).topk(top_k, dim=-1).indices
    weights = torch.softmax(draw(tokens, top_k, seed=4), -1)
    act = Glu("situ", 4.0, 25.0, lambda t: slow_glu(t, True))
    tiles = triton_chunk.Tiles(16, more, 64, 4, 2)
    out = triton_chunk.Tiles(16, more, 128 if packed else 64, 4, 2)
    plan = triton_chunk.Plan(tiles, out, 64, 2 if packed else 1)
    assert triton_chunk.fits(w13, plan)
    mine = triton_chunk.experts(x, ids, weights, w13, w2, act, first, total, plan)
    full = torch.zeros(total, 2 * inner, width, dtype=dtype), torch.zeros(total, width, inner, dtype=dtype)
    for e in range(here):
        for whole, w in zip(full, (w13, w2), strict=True):
            whole[first + e] = w.plain(e, dtype) if isinstance(w, Mxfp4Weight) else w[e]
    theirs = moe_reference.experts(x.cpu(), ids.cpu(), weights.cpu(), *full, lambda t: slow_glu(t, True))
    same(mine.cpu(), theirs, dtype)


def slow_glu(gate_up: Tensor, situ: bool) -> Tensor:
    if situ:
        return activation_reference.situ_glu(gate_up, 4.0, 25.0)
    return activation_reference.silu_glu(gate_up)


def encode(weights: Tensor) -> Mxfp4Weight:
    parts = [mxfp4.encode(w.cpu()) for w in weights]
    return Mxfp4Weight(*(torch.stack([p[i] for p in parts]).to(DEVICE) for i in range(2)))


def test_mxfp4_weights_decode_exactly(dtype: torch.dtype) -> None:
    weight = encode(draw(2, 8, 64))
    for e in range(2):
        out = torch.empty(8, 64, dtype=dtype)
        mxfp4.decode_into(weight.packed[e].cpu(), weight.scale[e].cpu(), out)
        assert torch.equal(weight.plain(e, dtype).cpu(), out)
    assert torch.equal(halves(torch.arange(8.0).view(1, 8)), torch.tensor([[0.0, 2, 4, 6, 1, 3, 5, 7]]))


@pytest.mark.parametrize(("tokens", "here"), [(3, 40), (1, 4), (20, 33)])
def test_choices_by_expert(dtype: torch.dtype, tokens: int, here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More experts than bits of a word, more choices than are looked at in one go."""
    monkeypatch.setattr(triton_group, "GROUPED", 64)
    first, top_k, total = 5, 8, 48
    ids = draw(tokens, total).topk(top_k, dim=-1).indices
    lists, counts = (t.cpu() for t in moe.group(ids, here, first, True))
    flat = ids.flatten().cpu()
    chosen = [e for e in range(here) if bool((flat == first + e).any())]
    assert counts[here : here + 1 + len(chosen)].tolist() == [len(chosen), *chosen]
    for e in range(here):
        assert lists[e, : counts[e]].tolist() == (flat == first + e).nonzero().flatten().tolist()
