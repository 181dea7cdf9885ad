"""Triton kernels against their slow twins (see ``twins``): router, experts, MXFP4."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from k3stack.kernels.activation import reference as activation_reference
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.moe import reference as moe_reference
from k3stack.kernels.moe import triton as moe
from k3stack.kernels.moe import triton_chunk, triton_decode, triton_group, triton_route, triton_units
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.kernels.mxfp4.triton import halves
from k3stack.kernels.mxfp4.weight import Mxfp4Weight, in_tiles
from tests.cpu.harness import relative
from tests.gpu.twins import DEVICE, DTYPES, INTERPRETED, draw, in_parts, same

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def rows_of(scores: Tensor) -> list[list[int]]:
    """Experts of each row [T, E], the best first, of equal ones the lower."""
    return [sorted(range(len(row)), key=lambda e: (-row[e], e)) for row in scores.tolist()]


def slow_glu(gate_up: Tensor, situ: bool) -> Tensor:
    if situ:
        return activation_reference.situ_glu(gate_up, 4.0, 25.0)
    return activation_reference.silu_glu(gate_up)


def encode(weights: Tensor) -> Mxfp4Weight:
    parts = [mxfp4.encode(w.cpu()) for w in weights]
    return Mxfp4Weight(*(torch.stack([p[i] for p in parts]).to(DEVICE) for i in range(2)))


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
