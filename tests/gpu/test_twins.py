"""Triton kernels against their slow twins (see ``twins``): norms, activations, residual mix, products, sampling."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from k3stack.kernels.activation import reference as activation_reference
from k3stack.kernels.activation import triton as activation
from k3stack.kernels.linear import cuda as linear_cuda
from k3stack.kernels.linear import reference as linear_reference
from k3stack.kernels.linear import ring, triton_one
from k3stack.kernels.linear import triton as linear
from k3stack.kernels.norm import reference as norm_reference
from k3stack.kernels.norm import triton as norm
from k3stack.kernels.residual import reference as residual_reference
from k3stack.kernels.residual import triton as residual
from k3stack.kernels.sampling import reference as sampling_reference
from k3stack.kernels.sampling import triton as sampling
from tests.gpu.twins import DEVICE, DTYPES, INTERPRETED, draw, same

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


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
    # From 17 to 64 tokens the next kernel's programs come at once.
    tokens = 20 if count == 5 else 4
    bank, y = draw(tokens, 6, 96, dtype=dtype), draw(tokens, 96, dtype=dtype, seed=1)
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
