"""Every fast operation against its slow twin, in each precision, on shapes that have edges."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from k3stack.kernels.activation import cpu as activation
from k3stack.kernels.activation import reference as activation_reference
from k3stack.kernels.kda import cpu as kda
from k3stack.kernels.kda import reference as kda_reference
from k3stack.kernels.kda.layout import tile_layout
from k3stack.kernels.linear import blocked, stacked
from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear import reference as linear_reference
from k3stack.kernels.mla import cpu as mla
from k3stack.kernels.mla import reference as mla_reference
from k3stack.kernels.moe import cpu as moe
from k3stack.kernels.moe import reference as moe_reference
from k3stack.kernels.norm import cpu as norm
from k3stack.kernels.norm import reference as norm_reference
from k3stack.kernels.precision import wide_dtype
from k3stack.kernels.residual import cpu as residual
from k3stack.kernels.residual import reference as residual_reference
from tests.cpu.harness import off

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.04}
WIDE = [torch.float64, torch.float32]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def same(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert mine.dtype == theirs.dtype
    assert off(mine, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, gate, wide = random(5, 3, 48, dtype=dtype), random(5, 3, 48, dtype=dtype, seed=1), wide_dtype(dtype)
    weight = random(48, dtype=dtype, seed=2)
    same(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5), dtype)
    args = (x.to(wide), gate, weight.to(wide), 1e-5)
    same(norm.gated_rms_norm(*args), norm_reference.gated_rms_norm(*args), dtype)
    same(norm.l2_norm(x, 1e-6), norm_reference.l2_norm(x, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_leaves_its_input_alone(dtype: torch.dtype) -> None:
    x = random(4, 16, dtype=dtype)
    before = x.clone()
    norm.rms_norm(x, torch.full((16,), 2.0, dtype=dtype), 1e-5)
    norm.l2_norm(x, 1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype: torch.dtype) -> None:
    x = random(7, 64, dtype=dtype, scale=6.0)
    tolerance = 4.0 if dtype == torch.bfloat16 else 1.0
    assert off(activation.silu_glu(x) / 20, activation_reference.silu_glu(x) / 20) < tolerance * TOLERANCE[dtype]
    assert (
        off(activation.situ_glu(x, 4.0, 25.0) / 20, activation_reference.situ_glu(x, 4.0, 25.0) / 20) < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_residual_mix(dtype: torch.dtype, rows: int) -> None:
    x, score = random(6, rows, 32, dtype=dtype, scale=2.0), random(32, dtype=wide_dtype(dtype), seed=4)
    same(residual.mix(x, score, 1e-5), residual_reference.mix(x, score, 1e-5), dtype)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_log_decay(dtype: torch.dtype, bound: float | None) -> None:
    z, exp_a = random(9, 3, 16, dtype=dtype, scale=20.0), random(3, dtype=dtype, seed=1).exp()
    mine, theirs = kda.log_decay(z, exp_a, bound), kda_reference.log_decay(z, exp_a, bound)
    assert off(mine / 50, theirs / 50) < TOLERANCE[dtype]
    assert (mine <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 20])
def test_short_convolution(dtype: torch.dtype, count: int) -> None:
    wide = wide_dtype(dtype)
    raw, weight = random(count, 24, dtype=dtype), random(4, 24, dtype=wide, seed=1)
    windows = random(5, 3, 24, dtype=dtype, seed=2)
    y, after = kda_reference.short_conv(raw, weight, windows[2])
    mine = windows.clone()
    same(kda.conv_chunk(raw, weight, mine[2]), y, torch.float32 if wide == torch.float32 else dtype)
    assert torch.equal(mine[2], after.to(dtype))
    assert torch.equal(mine[[0, 1, 3, 4]], windows[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_convolution_of_many_decode_rows(dtype: torch.dtype) -> None:
    raw, weight = random(4, 24, dtype=dtype), random(4, 24, dtype=wide_dtype(dtype), seed=1)
    windows = random(6, 3, 24, dtype=dtype, seed=2)
    blocks, mine = [4, 0, 1, 2], windows.clone()
    y = kda.conv_decode(raw, weight, mine, blocks)
    assert torch.equal(mine[[3, 5]], windows[[3, 5]])
    for r, block in enumerate(blocks):
        expected, after = kda_reference.short_conv(raw[r : r + 1], weight, windows[block])
        assert off(y[r : r + 1], expected) < TOLERANCE[wide_dtype(dtype)]
        assert torch.equal(mine[block], after.to(dtype))


def kda_inputs(tokens: int, dtype: torch.dtype, gate: Callable[[Tensor], Tensor]) -> list[Tensor]:
    q, k = (norm.l2_norm(random(tokens, 2, 16, dtype=dtype, seed=s), 1e-6) for s in (1, 2))
    v, z = random(tokens, 2, 16, dtype=dtype, seed=3), random(tokens, 2, 16, dtype=dtype, seed=4, scale=4.0)
    return [q, k, v, gate(z), torch.sigmoid(random(tokens, 2, dtype=dtype, seed=5))]


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "bounded": lambda z: -5 * torch.sigmoid(z),
    "at the bound": lambda z: torch.full_like(z, -5.0),
    "unbounded": lambda z: -30 * torch.nn.functional.softplus(z),
    "steep here and there": lambda z: torch.where(z > 6, -200.0, -torch.sigmoid(z)),
    "none": torch.zeros_like,
}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("gate", GATES)
def test_kda_of_unequal_chunks_among_other_tokens(dtype: torch.dtype, gate: str) -> None:
    counts, blocks = [3, 130, 64, 17, 1, 65], [5, 0, 3, 1, 7, 2]
    starts = [2, 10, 145, 209, 230, 231]
    args = kda_inputs(300, dtype, GATES[gate])
    states = random(8, 2, 16, 16, dtype=dtype, seed=6)
    mine, out = states.clone(), torch.full((300, 2, 16), 7.0, dtype=dtype)
    kda.prefill(*args, mine, tile_layout(starts, counts, blocks, 300), out)
    touched = torch.zeros(300, dtype=torch.bool)
    for start, count, block in zip(starts, counts, blocks, strict=True):
        part = slice(start, start + count)
        touched[part] = True
        o, after = kda_reference.recurrent(*(x[part] for x in args), states[block])
        assert off(out[part], o) < TOLERANCE[dtype]
        assert off(mine[block], after) < TOLERANCE[dtype]
    assert (out[~touched] == 7.0).all()
    assert torch.equal(mine[[4, 6]], states[[4, 6]])


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("rows", [1, 3])
def test_kda_decode_in_place(dtype: torch.dtype, rows: int) -> None:
    blocks = [6, 1, 4][:rows]
    args = kda_inputs(rows, dtype, GATES["bounded"])
    states = random(8, 2, 16, 16, dtype=dtype, seed=6)
    mine = states.clone()
    out = kda.decode(*args, mine, blocks)
    for r, block in enumerate(blocks):
        o, after = kda_reference.recurrent(*(x[r : r + 1] for x in args), states[block])
        assert off(out[r : r + 1], o) < TOLERANCE[dtype]
        assert off(mine[block], after) < TOLERANCE[dtype]
    others = [b for b in range(8) if b not in blocks]
    assert torch.equal(mine[others], states[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "start"), [(1, 0), (1, 70), (5, 0), (5, 37), (30, 3), (31, 0), (128, 3), (300, 20)])
def test_mla_chunk(dtype: torch.dtype, count: int, start: int) -> None:
    q, kv_b = random(count, 2, 12, dtype=dtype), random(2, 16, 10, dtype=dtype, seed=1, scale=0.4)
    rows = random(start + count, 14, dtype=dtype, seed=2)
    same(mla.attend(q, rows, kv_b, start), mla_reference.attend(q, rows, kv_b, start), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_chunk_head_by_head(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the scores of all heads are too many."""
    monkeypatch.setattr(mla, "SCORE_BYTES", 0)
    q, kv_b = random(100, 5, 12, dtype=dtype), random(5, 16, 10, dtype=dtype, seed=1, scale=0.4)
    rows = random(120, 14, dtype=dtype, seed=2)
    same(mla.attend(q, rows, kv_b, 20), mla_reference.attend(q, rows, kv_b, 20), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_decode_over_pages(dtype: torch.dtype) -> None:
    lengths, page_rows = [1, 64, 65, 130], 64
    q, kv_b = random(4, 2, 12, dtype=dtype), random(2, 16, 10, dtype=dtype, seed=1, scale=0.4)
    rows = torch.full((12, page_rows, 14), float("nan"), dtype=dtype)
    table = torch.full((4, 4), 1 << 40)
    pages = iter([7, 3, 11, 0, 9, 1, 5, 2])
    out = []
    for r, length in enumerate(lengths):
        content = random(length, 14, dtype=dtype, seed=20 + r)
        for i in range(-(-length // page_rows)):
            table[r, i] = next(pages)
            part = content[i * page_rows : (i + 1) * page_rows]
            rows[table[r, i], : part.shape[0]] = part
        out.append(mla_reference.attend(q[r : r + 1], content, kv_b, length - 1))
    same(mla.decode(q, rows, table, lengths, kv_b), torch.cat(out), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_decode_of_rows_that_share_pages(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows begin alike, two of them longer than the third is; others share less, or nothing."""
    monkeypatch.setattr(mla, "SHARED_ROWS", 8)
    page_rows, trunk = 4, [1, 2, 3, 4, 5]
    tables = [[*trunk, 6, 7], [9, 10, 11], [*trunk, 8], trunk[:3], [*trunk[:2], 12, 13], [14]]
    lengths = [27, 12, 22, 12, 13, 2]
    assert mla._sharing(_padded(tables), lengths, page_rows) == [([0, 2, 3, 4], 2), ([1, 5], 0)]
    assert mla._sharing(_padded(tables[:3]), lengths[:3], page_rows) == [([0, 2], 5), ([1], 0)]
    q, kv_b = random(6, 2, 12, dtype=dtype), random(2, 16, 10, dtype=dtype, seed=1, scale=0.4)
    rows = random(16, page_rows, 14, dtype=dtype, seed=2)
    for members in (range(6), range(3), (0, 2)):
        own = [tables[r] for r in members]
        # What lies after a row's end may be anything.
        spoilt, ends = rows.clone(), [lengths[r] for r in members]
        for table, length in zip(own, ends, strict=True):
            if length % page_rows and table[-1] not in trunk:
                spoilt[table[-1], length % page_rows :] = float("nan")
        right = [
            mla_reference.attend(q[i : i + 1], rows[table].view(-1, 14)[:length], kv_b, length - 1)
            for i, (table, length) in enumerate(zip(own, ends, strict=True))
        ]
        same(mla.decode(q[: len(own)], spoilt, _padded(own), ends, kv_b), torch.cat(right), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_chunks_that_share_pages(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks after the same pages, a long one after others, a short one after the same."""
    monkeypatch.setattr(mla, "SHARED_ROWS", 8)
    page_rows, trunk = 4, [1, 2, 3]
    tables = [[*trunk, *range(20, 34)], [5, 6, *range(34, 50)], [*trunk, *range(50, 62)], [*trunk, 62, 63], trunk]
    starts, counts = [13, 8, 12, 12, 8], [50, 64, 47, 5, 3]
    assert mla.absorbed_up_to(12, 14, random(2, 16, 10, dtype=dtype)) < 47
    assert mla._sharing(_padded(tables[:3]), [n + 1 for n in starts[:3]], page_rows) == [([0, 2], 3), ([1], 0)]
    kv_b = random(2, 16, 10, dtype=dtype, seed=1, scale=0.4)
    rows = random(64, page_rows, 14, dtype=dtype, seed=2)
    queries = [random(n, 2, 12, dtype=dtype, seed=30 + n) for n in counts]
    mine = mla.attend_chunks(queries, rows, _padded(tables), starts, kv_b)
    for q, own, table, start in zip(queries, mine, tables, starts, strict=True):
        seen = rows[table].view(-1, 14)[: start + q.shape[0]]
        same(own, mla_reference.attend(q, seen, kv_b, start), dtype)


def _padded(tables: list[list[int]]) -> Tensor:
    table = torch.full((len(tables), max(map(len, tables)) + 1), 1 << 40)
    for r, pages in enumerate(tables):
        table[r, : len(pages)] = torch.tensor(pages)
    return table


def test_short_chunks_are_absorbed() -> None:
    """Kimi-K3's sizes and K3-nano's: three quarters of where expanding costs the same."""
    assert mla.absorbed_up_to(192, 576, torch.empty(1, 256, 512)) == 128
    assert mla.absorbed_up_to(64, 128, torch.empty(1, 64, 96)) == 36


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("renormalize", [True, False])
def test_router(dtype: torch.dtype, renormalize: bool) -> None:
    logits, bias = random(20, 16, dtype=dtype), random(16, dtype=dtype, seed=1, scale=0.3)
    for forced in (None, torch.arange(80).view(20, 4) % 16):
        ids, weights = moe.route(logits, bias, 4, 2.446, renormalize, forced)
        ids_r, weights_r = moe_reference.route(logits, bias, 4, 2.446, renormalize, forced)
        order, order_r = ids.argsort(-1), ids_r.argsort(-1)
        assert torch.equal(ids.gather(1, order), ids_r.gather(1, order_r))
        same(weights.gather(1, order), weights_r.gather(1, order_r), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 20])
def test_linear(dtype: torch.dtype, rows: int) -> None:
    x, weight = random(rows, 40, dtype=dtype), random(50, 40, dtype=dtype, seed=1, scale=0.2)
    theirs = linear_reference.linear(x, weight)
    same(linear.linear(x, weight), theirs, dtype)
    packed = linear.pack(weight)
    same(linear.linear(x, packed), theirs, dtype)
    same(linear.linear(x.T.contiguous().T, packed), theirs, dtype)
    assert packed.nbytes == weight.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 50])
def test_experts(dtype: torch.dtype, tokens: int) -> None:
    x = random(tokens, 24, dtype=dtype)
    w13, w2 = random(10, 32, 24, dtype=dtype, seed=1, scale=0.2), random(10, 24, 16, dtype=dtype, seed=2, scale=0.25)
    # Experts 8 and 9 get nothing.
    scores = random(tokens, 8, dtype=torch.float64, seed=3)
    ids = scores.topk(3, dim=-1).indices
    weights = torch.softmax(random(tokens, 3, dtype=wide_dtype(dtype), seed=4), -1)
    args = (x, ids, weights, w13, w2, activation.silu_glu)
    theirs = moe_reference.experts(*args)
    same(moe.experts(*args), theirs, dtype)
    packed = [[linear.pack(m) for m in w] for w in (w13, w2)]
    same(moe.experts(x, ids, weights, *packed, activation.silu_glu), theirs, dtype)
    stacks = [stacked.pack_all(list(w)) for w in (w13, w2)]
    same(moe.experts(x, ids, weights, *stacks, activation.silu_glu), theirs, dtype)


STACKED = [d for d in DTYPES if linear.packs(d, torch.device("cpu"))]


@pytest.mark.parametrize("dtype", STACKED)
@pytest.mark.parametrize("tokens", [1, 2, 16, 40, 200])
def test_stacked_experts(dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once and one by one from the same bytes, with the busiest expert in every token's choice."""
    x = random(tokens, 64, dtype=dtype)
    w13, w2 = random(12, 96, 64, dtype=dtype, seed=1, scale=0.1), random(12, 64, 48, dtype=dtype, seed=2, scale=0.15)
    scores = random(tokens, 11, dtype=torch.float64, seed=3)
    scores[:, 4] = 100.0
    ids = scores.topk(3, dim=-1).indices
    weights = torch.softmax(random(tokens, 3, dtype=wide_dtype(dtype), seed=4), -1)
    args = (x, ids, weights, w13, w2, activation.silu_glu)
    theirs = moe_reference.experts(*args)
    one, two = stacked.pack_all(list(w13)), stacked.pack_all(list(w2))
    assert isinstance(one, stacked.Stack)
    assert isinstance(two, stacked.Stack)
    for mine, plain in ((one, w13), (two, w2)):
        assert all(torch.equal(linear.unpack(mine[e]), plain[e]) for e in range(12))
        assert sum(m.nbytes for m in mine) == plain.nbytes
    for cost in (0, 1 << 40):
        monkeypatch.setattr(moe, "CALL_BYTES", cost)
        same(moe.experts(x, ids, weights, one, two, activation.silu_glu), theirs, dtype)


@pytest.mark.parametrize("dtype", STACKED)
def test_experts_get_numbers_of_rows_for_which_they_lie_right(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN lays a weight out anew, in every call, for the numbers of rows that it wants in another layout."""
    shapes = ((512, 576), (576, 256))
    one, two = (stacked.pack_all([random(*s, dtype=dtype, seed=e) for e in range(2)]) for s in shapes)
    assert isinstance(one, stacked.Stack)
    assert isinstance(two, stacked.Stack)
    asked: list[int] = []

    def linear_seen(x: Tensor, weight: linear.Weight) -> Tensor:
        asked.append(x.shape[0])
        return linear.linear(x, weight)

    def image_seen(image: Tensor, weight: Tensor, groups: int) -> Tensor:
        asked.append(image.shape[3])
        return linear.convolve_image(image, weight, groups)

    monkeypatch.setattr(moe, "linear", SimpleNamespace(**{**vars(linear), "linear": linear_seen}))
    monkeypatch.setattr(stacked, "convolve_image", image_seen)
    monkeypatch.setattr(moe, "_stacked_is_faster", lambda *_: False)
    for tokens in (1, 2, 5, 11, 13, 22, 32, 33, 60):
        ids, weights = torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1, dtype=wide_dtype(dtype))
        asked.clear()
        moe.experts(random(tokens, 576, dtype=dtype), ids, weights, one, two, activation.silu_glu)
        both = one.fast_rows & two.fast_rows
        assert len(asked) == 2
        for n, weight in zip(asked, (one, two), strict=True):
            # A single token asks each weight for its own fewest.
            fast = weight.fast_rows if tokens == 1 else both
            assert n >= tokens and (n in fast or n % linear.IMAGE == 0), (tokens, asked, sorted(fast))
    assert stacked.filled_rows(frozenset({3, 4, 8, 9}), frozenset({1, 4, 9, 32}))[:11] == (0, *[4] * 4, *[9] * 5, 48)
    assert stacked.filled_rows(frozenset({4, 32}), frozenset({4, 32}))[4:] == (4, *[32] * 28)


def test_experts_are_packed_one_by_one_where_parts_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "library", lambda: None)
    monkeypatch.setattr(blocked, "library", lambda: None)
    stacked._layout.cache_clear()
    weights = random(12, 96, 64, dtype=torch.float32)
    packed = stacked.pack_all(list(weights))
    stacked._layout.cache_clear()
    assert isinstance(packed, list)
    assert all(torch.equal(linear.unpack(p), w) for p, w in zip(packed, weights, strict=True))
