"""Experts of a prompt's chunk: many tokens an expert, so what counts is how busy the matrix units are.

Tokens are first copied expert after expert. A product is formed transposed, weight rows by tokens: Hopper's matrix
instruction takes its first operand from registers, so that an unpacked MXFP4 weight never passes through memory. One
program unpacks each of its weights once for as many tokens as two accumulators hold (``Tiles.m`` and ``Tiles.more``).

MXFP4 weights lie in the order of ``mxfp4.tiles``: half a word has four columns that are two apart. Unpacked, the first
columns of all halves come first, then the second ones, and so on; activations are stored in the same order, ``K``
columns by ``K`` columns (``_column``), and nothing has to be interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.activation.triton import glu
from k3stack.kernels.mxfp4.triton import SHIFT, unpack_tiles
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

Experts = Tensor | Mxfp4Weight


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens of one pass (``m`` and ``more``), weight rows, warps, stages."""

    m: int
    more: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of the two products (of plain weights, rows of gate and up count alike), the columns of a tile, for both
    products, and the programs that share an expert's tokens: what the first pass leaves is another program's."""

    into: Tiles
    out: Tiles
    k: int
    passes: int


PACKED = Plan(Tiles(128, 32, 64, 4, 4), Tiles(128, 64, 256, 8, 3), 64, 2)
MANY = Plan(Tiles(256, 32, 128, 8, 4), Tiles(256, 32, 128, 8, 4), 64, 1)
PLAIN = {
    40: Plan(Tiles(32, 16, 128, 4, 5), Tiles(32, 16, 128, 4, 5), 64, 1),
    72: Plan(Tiles(64, 16, 128, 4, 4), Tiles(64, 16, 128, 4, 4), 64, 1),
    160: Plan(Tiles(128, 32, 256, 8, 3), Tiles(128, 32, 256, 8, 3), 64, 1),
}
"""Of plain weights, by the mean tokens of an expert up to which they are fastest; ``MANY`` for more."""
PLACED = 1024
"""Choices that a program of the placing kernel looks at."""


@triton.jit
def _column(d, K: tl.constexpr, PACKED: tl.constexpr):
    """The column that is stored at place ``d``."""
    if PACKED:
        half = d % (K // 4)
        return d // K * K + half // 2 * 8 + half % 2 + d % K // (K // 4) * 2
    else:
        return d


@triton.jit
def _place_kernel(ids, slots, counts, first, experts, total, BLOCK: tl.constexpr):
    """How many choices fell on each expert here, and which of them each choice is."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + i, mask=i < total, other=-1) - first
    here = (expert >= 0) & (expert < experts) & (i < total)
    slot = tl.atomic_add(counts + tl.where(here, expert, 0), 1, mask=here)
    tl.store(slots + i, tl.where(here, slot, -1), mask=i < total)


@triton.jit
def _before(counts, expert, experts, EXPERTS: tl.constexpr):
    """Choices of the experts before ``expert``."""
    e = tl.arange(0, EXPERTS)
    return tl.sum(tl.load(counts + e, mask=(e < experts) & (e < expert), other=0), 0)


@triton.jit
def _gather_kernel(
    x, ids, slots, counts, rows, out, first, experts, x_row, width,
    TOPK: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token to the rows of its choices, which are noted (-1: none)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    for j in range(TOPK):
        choice = token * TOPK + j
        slot = tl.load(slots + choice)
        row = slot
        if slot >= 0:
            row = _before(counts, tl.load(ids + choice) - first, experts, EXPERTS) + slot
            value = tl.load(x + token * x_row + _column(d, K, PACKED), mask=d < width, other=0.0)
            tl.store(out + row.to(tl.int64) * width + d, value, mask=d < width)
        tl.store(rows + choice, row)


@triton.jit
def _scales(scale, rows, step, WIDTH: tl.constexpr, K: tl.constexpr):
    """Scales of one pass's columns; after the last pass once more its own."""
    g = tl.minimum(step, WIDTH // K - 1) * (K // 32) + tl.arange(0, K // 32)
    row = rows // 16 * (WIDTH // 2) + rows % 8 * 8 + rows % 16 // 8
    return tl.load(scale + row[:, None] + (g // 4 * 64 + g % 4 * 2)[None, :])


@triton.jit
def _weights(
    w, byte, rows, step, WIDTH: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """One pass's columns of N rows of MXFP4 weights [N, K]. byte [N, K / 32]: their scales."""
    PER: tl.constexpr = 128 // K
    at = step // PER * 512 + step % PER * (K // 4) + tl.arange(0, K // 4)
    row = rows // 16 * (WIDTH * 4) + rows % 16 * 32
    halves = tl.load(w + row[:, None] + at[None, :])
    byte = tl.reshape(tl.broadcast_to(byte[:, :, None], [N, K // 32, 8]), [N, K // 4])
    a, b, c, d = unpack_tiles(halves, byte, tl.bfloat16 == DTYPE)
    four = tl.join(tl.join(a.to(DTYPE), b.to(DTYPE)), tl.join(c.to(DTYPE), d.to(DTYPE)))
    return tl.reshape(tl.permute(four, (0, 3, 2, 1)), [N, K])


@triton.jit
def _tokens(x, step, WIDTH: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """One pass's columns of M tokens, [K, M]."""
    at = tl.arange(0, M)[:, None] * WIDTH + (step * K + tl.arange(0, K))[None, :]
    return tl.trans(tl.load(x + at))


@triton.jit
def _all_done(THREADS: tl.constexpr):
    """Products that are under way have been formed. They read weights from registers, which the compiler takes for free
    as soon as a product has begun, and fills with the next ones (seen with Triton 3.6: wrong results)."""
    if THREADS:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;",
            "=r,r",
            [tl.arange(0, THREADS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _in_kernel(
    x, w, scale, counts, out, experts, beta, linear_beta, factor,
    WIDTH: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, SITU: tl.constexpr,
    M: tl.constexpr, MORE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PASSES: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """N inner columns of one expert's tokens: gate, up, activation. MXFP4 weights."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    first = _before(counts, expert, experts, EXPERTS).to(tl.int64)
    DTYPE: tl.constexpr = x.dtype.element_ty
    w += expert * 2 * INNER * (WIDTH // 4)
    w_up = w + INNER * (WIDTH // 4)
    scale += expert * 2 * INNER * (WIDTH // 32)
    scale_up = scale + INNER * (WIDTH // 32)
    d = tl.program_id(0) * N + tl.arange(0, N)
    rows = _column(d, K, True)
    for m0 in range(tl.program_id(2) * (M + MORE), count, PASSES * (M + MORE)):
        xs = x + (first + m0) * WIDTH
        gate = tl.zeros([N, M], tl.float32)
        up = tl.zeros([N, M], tl.float32)
        if MORE:
            gate_2 = tl.zeros([N, MORE], tl.float32)
            up_2 = tl.zeros([N, MORE], tl.float32)
        byte = _scales(scale, rows, 0, WIDTH, K)
        byte_up = _scales(scale_up, rows, 0, WIDTH, K)
        for step in range(WIDTH // K):
            # Scales are too few for the copies ahead that the compiler makes: those of the next pass are taken now.
            next_byte = _scales(scale, rows, step + 1, WIDTH, K)
            next_up = _scales(scale_up, rows, step + 1, WIDTH, K)
            t = _tokens(xs, step, WIDTH, M, K)
            if MORE:
                t_2 = _tokens(xs + M * WIDTH, step, WIDTH, MORE, K)
            a = _weights(w, byte, rows, step, WIDTH, N, K, DTYPE)
            gate = tl.dot(a, t, gate, input_precision="ieee")
            if MORE:
                gate_2 = tl.dot(a, t_2, gate_2, input_precision="ieee")
            _all_done(THREADS)
            a = _weights(w_up, byte_up, rows, step, WIDTH, N, K, DTYPE)
            up = tl.dot(a, t, up, input_precision="ieee")
            if MORE:
                up_2 = tl.dot(a, t_2, up_2, input_precision="ieee")
            _all_done(THREADS)
            byte = next_byte
            byte_up = next_up
        to = out + (first + m0) * INNER
        _store_inner(to, gate, up, d, count - m0, beta, linear_beta, factor, INNER, SITU, M)
        if MORE:
            _store_inner(to + M * INNER, gate_2, up_2, d, count - m0 - M, beta, linear_beta, factor, INNER, SITU, MORE)


@triton.jit
def _in_plain_kernel(
    x, w, counts, out, experts, beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, SITU: tl.constexpr,
    M: tl.constexpr, MORE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """N / 2 inner columns of one expert's tokens: rows of gate and up alternate in one product."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    first = _before(counts, expert, experts, EXPERTS).to(tl.int64)
    w += expert * 2 * INNER * WIDTH
    n = tl.arange(0, N)
    rows = tl.program_id(0) * (N // 2) + n // 2 + n % 2 * INNER
    d = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
    for m0 in range(tl.program_id(2) * (M + MORE), count, PASSES * (M + MORE)):
        xs = x + (first + m0) * WIDTH
        acc = tl.zeros([N, M], tl.float32)
        if MORE:
            acc_2 = tl.zeros([N, MORE], tl.float32)
        for step in range(WIDTH // K):
            t = _tokens(xs, step, WIDTH, M, K)
            a = tl.load(w + rows[:, None] * WIDTH + (step * K + tl.arange(0, K))[None, :])
            acc = tl.dot(a, t, acc, input_precision="ieee")
            if MORE:
                t_2 = _tokens(xs + M * WIDTH, step, WIDTH, MORE, K)
                acc_2 = tl.dot(a, t_2, acc_2, input_precision="ieee")
        to = out + (first + m0) * INNER
        gate, up = _alternate(acc, N, M)
        _store_inner(to, gate, up, d, count - m0, beta, linear_beta, 1.0, INNER, SITU, M)
        if MORE:
            gate, up = _alternate(acc_2, N, MORE)
            _store_inner(to + M * INNER, gate, up, d, count - m0 - M, beta, linear_beta, 1.0, INNER, SITU, MORE)


@triton.jit
def _alternate(acc, N: tl.constexpr, M: tl.constexpr):
    """Even and odd rows."""
    return tl.split(tl.permute(tl.reshape(acc, [N // 2, 2, M]), (0, 2, 1)))


@triton.jit
def _store_inner(
    out, gate, up, d, count, beta, linear_beta, factor, INNER: tl.constexpr, SITU: tl.constexpr, M: tl.constexpr
):
    m = tl.arange(0, M)
    # The products are rounded as the reference rounds them.
    gate = (gate * factor).to(out.dtype.element_ty).to(tl.float32)
    up = (up * factor).to(out.dtype.element_ty).to(tl.float32)
    y = glu(gate, up, beta, linear_beta, SITU).to(out.dtype.element_ty)
    tl.store(out + m[None, :] * INNER + d[:, None], y, mask=(m < count)[None, :])


@triton.jit
def _out_kernel(
    x, w, scale, counts, out, experts, factor,
    INNER: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    M: tl.constexpr, MORE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PASSES: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """N columns of the down product of one expert's tokens, one half after the other. MXFP4 weights."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    first = _before(counts, expert, experts, EXPERTS).to(tl.int64)
    DTYPE: tl.constexpr = x.dtype.element_ty
    HALF: tl.constexpr = N // 2
    w += expert * WIDTH * (INNER // 4)
    scale += expert * WIDTH * (INNER // 32)
    n = tl.program_id(0) * N + tl.arange(0, HALF)
    for m0 in range(tl.program_id(2) * (M + MORE), count, PASSES * (M + MORE)):
        xs = x + (first + m0) * INNER
        low = tl.zeros([HALF, M], tl.float32)
        high = tl.zeros([HALF, M], tl.float32)
        if MORE:
            low_2 = tl.zeros([HALF, MORE], tl.float32)
            high_2 = tl.zeros([HALF, MORE], tl.float32)
        byte = _scales(scale, n, 0, INNER, K)
        byte_high = _scales(scale, n + HALF, 0, INNER, K)
        for step in range(INNER // K):
            next_byte = _scales(scale, n, step + 1, INNER, K)
            next_high = _scales(scale, n + HALF, step + 1, INNER, K)
            t = _tokens(xs, step, INNER, M, K)
            if MORE:
                t_2 = _tokens(xs + M * INNER, step, INNER, MORE, K)
            a = _weights(w, byte, n, step, INNER, HALF, K, DTYPE)
            low = tl.dot(a, t, low, input_precision="ieee")
            if MORE:
                low_2 = tl.dot(a, t_2, low_2, input_precision="ieee")
            _all_done(THREADS)
            a = _weights(w, byte_high, n + HALF, step, INNER, HALF, K, DTYPE)
            high = tl.dot(a, t, high, input_precision="ieee")
            if MORE:
                high_2 = tl.dot(a, t_2, high_2, input_precision="ieee")
            _all_done(THREADS)
            byte = next_byte
            byte_high = next_high
        to = out + (first + m0) * WIDTH
        _store_outer(to, low, n, count - m0, factor, WIDTH, M)
        _store_outer(to, high, n + HALF, count - m0, factor, WIDTH, M)
        if MORE:
            _store_outer(to + M * WIDTH, low_2, n, count - m0 - M, factor, WIDTH, MORE)
            _store_outer(to + M * WIDTH, high_2, n + HALF, count - m0 - M, factor, WIDTH, MORE)


@triton.jit
def _out_plain_kernel(
    x, w, counts, out, experts,
    INNER: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    M: tl.constexpr, MORE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """N columns of the down product of one expert's tokens."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    first = _before(counts, expert, experts, EXPERTS).to(tl.int64)
    w += expert * WIDTH * INNER
    n = tl.program_id(0) * N + tl.arange(0, N)
    for m0 in range(tl.program_id(2) * (M + MORE), count, PASSES * (M + MORE)):
        xs = x + (first + m0) * INNER
        acc = tl.zeros([N, M], tl.float32)
        if MORE:
            acc_2 = tl.zeros([N, MORE], tl.float32)
        for step in range(INNER // K):
            t = _tokens(xs, step, INNER, M, K)
            if MORE:
                t_2 = _tokens(xs + M * INNER, step, INNER, MORE, K)
            a = tl.load(w + n[:, None] * INNER + (step * K + tl.arange(0, K))[None, :])
            acc = tl.dot(a, t, acc, input_precision="ieee")
            if MORE:
                acc_2 = tl.dot(a, t_2, acc_2, input_precision="ieee")
        to = out + (first + m0) * WIDTH
        _store_outer(to, acc, n, count - m0, 1.0, WIDTH, M)
        if MORE:
            _store_outer(to + M * WIDTH, acc_2, n, count - m0 - M, 1.0, WIDTH, MORE)


@triton.jit
def _store_outer(out, acc, n, count, factor, WIDTH: tl.constexpr, M: tl.constexpr):
    m = tl.arange(0, M)
    y = (acc * factor).to(out.dtype.element_ty)
    tl.store(out + m[None, :] * WIDTH + n[:, None], y, mask=(m < count)[None, :])


@triton.jit
def _sum_kernel(results, rows, weights, out, width, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """The weighted sum of one token's choices that are here."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(TOPK):
        row = tl.load(rows + token * TOPK + j)
        if row >= 0:
            value = tl.load(results + row.to(tl.int64) * width + c, mask=c < width, other=0.0)
            acc += tl.load(weights + token * TOPK + j) * value.to(tl.float32)
    tl.store(out + token * width + c, acc.to(out.dtype.element_ty), mask=c < width)


def plan_for(w13: Experts, mean: float) -> Plan:
    """For experts that have ``mean`` tokens each."""
    if isinstance(w13, Mxfp4Weight):
        return PACKED
    return next((plan for most, plan in PLAIN.items() if mean <= most), MANY)


def fits(w13: Experts, plan: Plan | None = None) -> bool:
    """Whether all sizes are whole tiles (of any plan, if none is given), and MXFP4 is in the order that the kernels
    take."""
    if plan is None:
        return all(fits(w13, p) for p in ((PACKED,) if isinstance(w13, Mxfp4Weight) else (MANY, *PLAIN.values())))
    _, double, width = w13.shape
    inner = double // 2
    if isinstance(w13, Mxfp4Weight):
        return w13.tiled and not (width % plan.k or inner % plan.k or inner % plan.into.n or width % plan.out.n)
    return not (width % plan.k or inner % plan.k or double % plan.into.n or width % plan.out.n)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Experts,
    w2: Experts,
    activation: Glu,
    first: int = 0,
    total: int | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """See ``triton.experts``; sizes as ``fits`` says. In which order an expert's tokens lie is left to chance, and does
    not matter to the result."""
    (tokens, top_k), (count, double, width) = ids.shape, w13.shape
    inner, device = double // 2, x.device
    plan = plan or plan_for(w13, tokens * top_k / (total or count))
    packed = isinstance(w13, Mxfp4Weight)
    slots = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    rows = torch.empty_like(slots)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    start.launch(
        _place_kernel,
        (triton.cdiv(ids.numel(), PLACED),),
        *(ids, slots, counts, first, count, ids.numel()),
        BLOCK=PLACED,
        num_warps=8,
    )
    room = tokens * top_k
    # A pass reads beyond the last token; what it finds there stays in columns that nobody stores.
    grouped = torch.empty(room + plan.into.m + plan.into.more, width, dtype=x.dtype, device=device)
    start.launch(
        _gather_kernel,
        (tokens,),
        *(x, ids, slots, counts, rows, grouped, first, count, x.stride(0), width),
        TOPK=top_k,
        EXPERTS=triton.next_power_of_2(count),
        K=plan.k,
        PACKED=packed,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    factor = 2.0**SHIFT.value if packed and x.dtype == torch.bfloat16 else 1.0
    hidden = torch.empty(room + plan.out.m + plan.out.more, inner, dtype=x.dtype, device=device)
    _inner(grouped, w13, counts, hidden, activation, factor, plan)
    results = grouped
    _outer(hidden, w2, counts, results, factor, plan)
    out = torch.empty(tokens, width, dtype=x.dtype, device=device)
    start.launch(
        _sum_kernel,
        (tokens,),
        *(results, rows, weights, out, width),
        TOPK=top_k,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out


def _inner(
    grouped: Tensor, w13: Experts, counts: Tensor, hidden: Tensor, activation: Glu, factor: float, plan: Plan
) -> None:
    """The activations of all choices, expert after expert."""
    (count, _, width), inner, t = w13.shape, hidden.shape[1], plan.into
    sizes: dict[str, Any] = {"WIDTH": width, "INNER": inner, "EXPERTS": triton.next_power_of_2(count)}
    sizes |= {"SITU": activation.kind == "situ", **_options(t, plan)}
    act = (activation.beta, activation.linear_beta)
    if isinstance(w13, Mxfp4Weight):
        start.launch(
            _in_kernel,
            (inner // t.n, count, plan.passes),
            *(grouped, *_parts(w13), counts, hidden, count, *act, factor),
            THREADS=_waiting(t),
            **sizes,
        )
    else:
        grid = (2 * inner // t.n, count, plan.passes)
        start.launch(_in_plain_kernel, grid, *(grouped, w13, counts, hidden, count, *act), **sizes)


def _outer(hidden: Tensor, w2: Experts, counts: Tensor, results: Tensor, factor: float, plan: Plan) -> None:
    """The down products of all choices, expert after expert."""
    (count, width, inner), t = w2.shape, plan.out
    sizes: dict[str, Any] = {"INNER": inner, "WIDTH": width, "EXPERTS": triton.next_power_of_2(count)}
    sizes |= _options(t, plan)
    grid = (width // t.n, count, plan.passes)
    if isinstance(w2, Mxfp4Weight):
        parts = (hidden, *_parts(w2), counts, results, count, factor)
        start.launch(_out_kernel, grid, *parts, THREADS=_waiting(t), **sizes)
    else:
        start.launch(_out_plain_kernel, grid, *(hidden, w2, counts, results, count), **sizes)


def _parts(w: Mxfp4Weight) -> tuple[Tensor, Tensor]:
    return w.packed.view(torch.int16), w.scale


def _waiting(t: Tiles) -> int:
    """Threads that wait for products."""
    return 0 if start.INTERPRETED else 32 * t.warps


def _options(t: Tiles, plan: Plan) -> dict[str, Any]:
    sizes = {"M": t.m, "MORE": t.more, "N": t.n, "K": plan.k, "PASSES": plan.passes}
    return {**sizes, "num_warps": t.warps, "num_stages": t.stages}
