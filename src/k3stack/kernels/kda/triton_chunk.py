"""KDA of chunks in Triton: many sequences at once, states and windows read from and written to arena blocks.

Chunked form of the recurrence over tiles of 64 tokens (``cpu.prefill`` has the formulas), in a handful of kernels: from
the projections to convolved, normalised q, k, v and the running log decay of each tile; everything of a tile that does
not need the state; the states from tile to tile; the outputs with their gated norm.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.kda.layout import SUB, ChunkTiles
from k3stack.kernels.kda.triton import L2_EPS, log_decay, move_windows


@dataclass(frozen=True, slots=True)
class Options:
    """Warps of the kernels; of the one that carries states, columns of a state (0: by their number) and stages."""

    prepare: int = 16
    inside: int = 8
    halved: int = 4
    solve: int = 4
    values: int = 0
    carry: int = 4
    stages: int = 3
    output: int = 8


@dataclass(frozen=True, slots=True)
class Rooms:
    """What passes between the kernels, for all tiles and heads [tiles, heads, ...]: in the inputs' dtype, then fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    u: Tensor
    decayed_q: Tensor
    decayed_k: Tensor
    qk: Tensor
    kept: Tensor
    """States before each tile."""
    decay: Tensor
    beta: Tensor
    fade: Tensor
    a: Tensor

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, f.name).nbytes for f in fields(self))


TUNED = Options()
SOLVE_NARROW = 8
"""Warps that solve tiles of heads under 64 wide: with four, ptxas 12.8 takes wrong registers for an operand's place."""
KEPT_BYTES = 256 << 20
"""Most bytes of rooms that stay from one layer to the next: with more of them, the host has time to ask again."""
PROGRAMS = 264
"""Programs that fill the device, two a multiprocessor."""
FACTOR_LIMIT = 84.0
"""Largest decay (nats) over a sub-chunk that is split into factors at its middle."""


@triton.jit
def _convolve(raw, windows, conv, first, begin, here, channel, raw_row, channels, TAPS: tl.constexpr, C: tl.constexpr):
    """Convolution and SiLU of a tile's tokens [C, channels of ``channel``]."""
    t = first + tl.arange(0, C)
    y = tl.zeros([C, channel.shape[0]], tl.float32)
    for j in tl.static_range(TAPS):
        back = t - (TAPS - 1) + j
        x = tl.load(raw + back[:, None] * raw_row + channel[None, :], mask=(here & (back >= begin))[:, None], other=0.0)
        y += x.to(tl.float32) * tl.load(conv + j * channels + channel)[None, :]
    # Only a sequence's first tile looks back to the window.
    if first - begin < TAPS - 1:
        for j in tl.static_range(TAPS - 1):
            slot = t + j - begin
            old = (here & (slot < TAPS - 1))[:, None]
            past = tl.load(windows + slot[:, None] * channels + channel[None, :], mask=old, other=0.0)
            y += past.to(tl.float32) * tl.load(conv + j * channels + channel)[None, :]
    return y / (1 + tl.exp(-y))


@triton.jit
def _prepare_kernel(
    raw, f, b, conv, exp_a, dt_bias, windows, tiles, q, k, v, c, beta,
    raw_row, f_row, b_row, window_block, width, count, scale, lower_bound, l2_eps,
    K: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """One head of one tile: q (scaled), k, v, the running sum of its log decay, beta; zeros where no token is."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile)
    here = tl.arange(0, C) < tl.load(tiles + count + tile)
    begin = tl.load(tiles + 2 * count + tile)
    own = windows + tl.load(tiles + 3 * count + tile) * window_block
    r = tl.arange(0, C)
    i = head * K + tl.arange(0, K)
    at = (tile * tl.num_programs(1) + head).to(tl.int64) * C
    to = at * K + r[:, None] * K + tl.arange(0, K)[None, :]
    x = _convolve(raw, own, conv, first, begin, here, i, raw_row, 3 * width, TAPS, C)
    x = x * (tl.rsqrt(tl.sum(x * x, 1) + l2_eps) * scale)[:, None]
    tl.store(q + to, x.to(q.dtype.element_ty))
    x = _convolve(raw, own, conv, first, begin, here, width + i, raw_row, 3 * width, TAPS, C)
    x = x * tl.rsqrt(tl.sum(x * x, 1) + l2_eps)[:, None]
    tl.store(k + to, x.to(k.dtype.element_ty))
    x = _convolve(raw, own, conv, first, begin, here, 2 * width + i, raw_row, 3 * width, TAPS, C)
    tl.store(v + to, x.to(v.dtype.element_ty))
    a = tl.load(exp_a + head)
    z = tl.load(f + (first + r)[:, None] * f_row + i[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    z += tl.load(dt_bias + i)[None, :]
    g = log_decay(z, a, lower_bound, BOUNDED)
    tl.store(c + to, tl.cumsum(tl.where(here[:, None], g, 0.0), 0))
    chance = tl.load(b + (first + r) * b_row + head, mask=here, other=0.0).to(tl.float32)
    tl.store(beta + at + r, tl.where(here, 1 / (1 + tl.exp(-chance)), 0.0))


@triton.jit
def _both(q, k, factor, inverse, kk, qk, PRECISION: tl.constexpr):
    """Add the products of keys, and of queries, with keys: rows times ``factor``, columns times ``inverse``."""
    column = tl.trans(k * inverse)
    kk = tl.dot(k * factor, column, kk, input_precision=PRECISION)
    qk = tl.dot(q * factor, column, qk, input_precision=PRECISION)
    return kk, qk


@triton.jit
def _inside_kernel(
    q, k, c, beta, a_out, qk_out, q_out, k_out, fade,
    K: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A = beta k k^T and q k^T under decay within a tile, q exp(c), k exp(c_C - c) and exp(c_C).

    The decay between two tokens is split at a token between them: halves of the tile at its middle, neighbouring
    sub-chunks at their border, both factors <= 1; within a sub-chunk at the middle of its range, which must be bounded.
    """
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    q += tile * C * K
    k += tile * C * K
    c += tile * C * K
    PART: tl.constexpr = min(32, K)
    r = tl.arange(0, C)
    block = r // SUB
    zero = tl.zeros([C, C], tl.float32)
    kk_far, qk_far, kk_next, qk_next, kk_near, qk_near = zero, zero, zero, zero, zero, zero
    for begin in range(0, K, PART):
        i = begin + tl.arange(0, PART)
        at = r[:, None] * K + i[None, :]
        kt = tl.load(k + at).to(tl.float32)
        qt = tl.load(q + at).to(tl.float32)
        ct = tl.load(c + at)
        e = tl.exp(-tl.abs(ct - tl.load(c + (C // 2 - 1) * K + i)[None, :]))
        kk_far, qk_far = _both(qt, kt, e, e, kk_far, qk_far, PRECISION)
        border = r // (2 * SUB) * (2 * SUB) + SUB - 1
        e = tl.exp(-tl.abs(ct - tl.load(c + border[:, None] * K + i[None, :])))
        kk_next, qk_next = _both(qt, kt, e, e, kk_next, qk_next, PRECISION)
        before = tl.load(c + (block * SUB - 1)[:, None] * K + i[None, :], mask=(block > 0)[:, None], other=0.0)
        last = tl.load(c + (block * SUB + SUB - 1)[:, None] * K + i[None, :])
        up = ct - 0.5 * (before + last)
        kk_near, qk_near = _both(qt, kt, tl.exp(up), tl.exp(-up), kk_near, qk_near, PRECISION)
        _decayed(qt, kt, ct, c, q_out, k_out, fade, tile, at, i, K, C)
    same = block[:, None] == block[None, :]
    pair = (block // 2)[:, None] == (block // 2)[None, :]
    kk = tl.where(same, kk_near, tl.where(pair, kk_next, kk_far)) * tl.load(beta + tile * C + r)[:, None]
    qk = tl.where(same, qk_near, tl.where(pair, qk_next, qk_far))
    _store_products(a_out, qk_out, kk, qk, tile, C)


@triton.jit
def _halved_kernel(
    q, k, c, beta, a_out, qk_out, q_out, k_out, fade,
    K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same under any decay: halves of the tile at its middle, their halves at theirs, down to single tokens."""
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    q += tile * C * K
    k += tile * C * K
    c += tile * C * K
    PART: tl.constexpr = min(32, K)
    r = tl.arange(0, C)
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    for begin in range(0, K, PART):
        i = begin + tl.arange(0, PART)
        at = r[:, None] * K + i[None, :]
        kt = tl.load(k + at).to(tl.float32)
        qt = tl.load(q + at).to(tl.float32)
        own += tl.sum(qt * kt, 1)
        _decayed(qt, kt, tl.load(c + at), c, q_out, k_out, fade, tile, at, i, K, C)
    size = C
    for _ in range(LEVELS):
        block = r // size
        border = block * size + size // 2 - 1
        kk_new = tl.zeros([C, C], tl.float32)
        qk_new = tl.zeros([C, C], tl.float32)
        for begin in range(0, K, PART):
            i = begin + tl.arange(0, PART)
            at = r[:, None] * K + i[None, :]
            kt = tl.load(k + at).to(tl.float32)
            qt = tl.load(q + at).to(tl.float32)
            e = tl.exp(-tl.abs(tl.load(c + at) - tl.load(c + border[:, None] * K + i[None, :])))
            kk_new, qk_new = _both(qt, kt, e, e, kk_new, qk_new, PRECISION)
        same = block[:, None] == block[None, :]
        kk = tl.where(same, kk_new, kk)
        qk = tl.where(same, qk_new, qk)
        size = size // 2
    kk *= tl.load(beta + tile * C + r)[:, None]
    qk = tl.where(r[:, None] == r[None, :], own[:, None], qk)
    _store_products(a_out, qk_out, kk, qk, tile, C)


@triton.jit
def _decayed(qt, kt, ct, c, q_out, k_out, fade, tile, at, i, K: tl.constexpr, C: tl.constexpr):
    """Write some columns of q exp(c), k exp(c_C - c) and exp(c_C)."""
    end = tl.load(c + (C - 1) * K + i)
    tl.store(q_out + tile * C * K + at, (qt * tl.exp(ct)).to(q_out.dtype.element_ty))
    tl.store(k_out + tile * C * K + at, (kt * tl.exp(end[None, :] - ct)).to(k_out.dtype.element_ty))
    tl.store(fade + tile * K + i, tl.exp(end))


@triton.jit
def _store_products(a_out, qk_out, kk, qk, tile, C: tl.constexpr):
    r = tl.arange(0, C)
    below = r[:, None] - r[None, :]
    to = tile * C * C + r[:, None] * C + r[None, :]
    tl.store(a_out + to, tl.where(below > 0, kk, 0.0))
    tl.store(qk_out + to, tl.where(below >= 0, qk, 0.0).to(qk_out.dtype.element_ty))


@triton.jit
def _solve_kernel(
    k, v, c, beta, a, w_out, u_out,
    K: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With M = (I + A)^-1, w = M beta k exp(c) and u = M beta v: from any state S, corrected values are u - w S."""
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    r = tl.arange(0, C)
    lower = -tl.load(a + tile * C * C + r[:, None] * C + r[None, :])
    same = (r // SUB)[:, None] == (r // SUB)[None, :]
    one = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    # Sub-chunks first, all at once, row after row: the inverse's is -A's plus -A's times the rows above.
    x = tl.where(same, lower, 0.0)
    for j in range(2, SUB):
        row = (r % SUB == j)[:, None] & same
        y = tl.sum(tl.where(row, lower, 0.0), 0)
        y += tl.sum(y[:, None] * x, 0)
        x = tl.where(row, y[None, :], x)
    # Then what is below them: with D the sub-chunks' inverse and N = D L, M = (I - N) (I + N^2) D, as N^4 = 0.
    x += one
    n1 = tl.dot(x, tl.where(same, 0.0, lower), input_precision=PRECISION)
    n2 = tl.dot(n1, n1, input_precision=PRECISION)
    m = tl.dot(one + n2, x, input_precision=PRECISION)
    m = tl.dot(one + n1, m, input_precision=PRECISION).to(w_out.dtype.element_ty)
    b = tl.load(beta + tile * C + r)[:, None]
    PART: tl.constexpr = min(64, K)
    for begin in tl.static_range(0, K, PART):
        at = tile * C * K + r[:, None] * K + (begin + tl.arange(0, PART))[None, :]
        kt = tl.load(k + at).to(tl.float32) * tl.exp(tl.load(c + at)) * b
        tl.store(w_out + at, tl.dot(m, kt.to(m.dtype), input_precision=PRECISION).to(m.dtype))
        vt = tl.load(v + at).to(tl.float32) * b
        tl.store(u_out + at, tl.dot(m, vt.to(m.dtype), input_precision=PRECISION).to(m.dtype))


@triton.jit
def _carry_kernel(
    w, u, k, fade, states, sequences, kept, corrected, count, state_block,
    K: tl.constexpr, C: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state through the tiles of one sequence: the state before each, corrected values."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.load(sequences + sequence)
    tiles = tl.load(sequences + count + sequence)
    block = tl.load(sequences + 4 * count + sequence)
    i = tl.arange(0, K)
    r = tl.arange(0, C)
    j = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    place = states + block * state_block + head * K * K + i[:, None] * K + j[None, :]
    s = tl.load(place).to(tl.float32)
    for n in range(tiles):
        tile = (first + n) * heads + head
        at = tile * C * K + r[:, None] * K
        wt = tl.load(w + at + i[None, :])
        ut = tl.load(u + at + j[None, :])
        kt = tl.load(k + at + i[None, :])
        faded = tl.load(fade + tile * K + i)
        rounded = s.to(wt.dtype)
        tl.store(kept + tile * K * K + i[:, None] * K + j[None, :], rounded)
        d = (ut.to(tl.float32) - tl.dot(wt, rounded, input_precision=PRECISION)).to(wt.dtype)
        tl.store(corrected + at + j[None, :], d)
        s = tl.dot(tl.trans(kt), d, s * faded[:, None], input_precision=PRECISION)
    tl.store(place, s.to(states.dtype.element_ty))


@triton.jit
def _output_kernel(
    q, qk, kept, corrected, gate, norm, tiles, out, gate_row, out_row, count, eps,
    K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one head of one tile, with their gated norm."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile)
    here = (tl.arange(0, C) < tl.load(tiles + count + tile))[:, None]
    at = (tile * tl.num_programs(1) + head).to(tl.int64)
    i = tl.arange(0, K)
    r = tl.arange(0, C)
    qt = tl.load(q + at * C * K + r[:, None] * K + i[None, :])
    s = tl.load(kept + at * K * K + i[:, None] * K + i[None, :])
    o = tl.dot(qt, s, input_precision=PRECISION)
    a = tl.load(qk + at * C * C + r[:, None] * C + r[None, :])
    d = tl.load(corrected + at * C * K + r[:, None] * K + i[None, :])
    o = tl.dot(a, d, o, input_precision=PRECISION)
    g = tl.load(gate + (first + r)[:, None] * gate_row + (head * K + i)[None, :], mask=here, other=0.0)
    o = o * tl.rsqrt(tl.sum(o * o, 1) / K + eps)[:, None] * tl.load(norm + i)[None, :]
    o = o / (1 + tl.exp(-g.to(tl.float32)))
    tl.store(out + (first + r)[:, None] * out_row + (head * K + i)[None, :], o.to(out.dtype.element_ty), mask=here)


def state_columns(states: int, width: int) -> int:
    """Columns of a state that one program carries: few while there are too few states to fill the device."""
    return min(16 if states * (width // 16) <= PROGRAMS else 64, width)


def chunks(
    raw: Tensor,
    f: Tensor,
    gate: Tensor,
    b: Tensor,
    conv: Tensor,
    exp_a: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    windows: Tensor,
    states: Tensor,
    tiles: ChunkTiles,
    lower_bound: float | None,
    eps: float,
    out: Tensor,
    options: Options = TUNED,
) -> None:
    """Chunks of many sequences, from the projections to the gated norm's output; states and windows in place.

    raw [T, 3 P], f [T, P] (before dt_bias), gate [T, P], b [T, H] (rows may lie apart), conv [taps, 3 P], exp_a [H],
    dt_bias [P], norm [K] fp32, windows [blocks, taps - 1, 3 P], states [blocks, H, K, K] -> rows of ``out`` [T, P] of
    the tokens that ``tiles`` names; the others stay.
    """
    heads, k = b.shape[1], states.shape[2]
    n, c = tiles.tiles, tiles.tile
    factored = lower_bound is not None and -lower_bound * SUB <= FACTOR_LIMIT
    rooms = rooms_for(tiles, heads, k, raw)
    sizes: dict[str, Any] = {"K": k, "C": c}
    precision = {"PRECISION": "ieee" if raw.dtype == torch.float32 else "tf32"}
    start.launch(
        _prepare_kernel,
        (n, heads),
        *(raw, f, b, conv, exp_a, dt_bias, windows, tiles.per_tile),
        *(rooms.q, rooms.k, rooms.v, rooms.decay, rooms.beta),
        *(raw.stride(0), f.stride(0), b.stride(0), windows.stride(0), heads * k, n, k**-0.5),
        *(0.0 if lower_bound is None else lower_bound, L2_EPS),
        **sizes,
        TAPS=conv.shape[0],
        BOUNDED=lower_bound is not None,
        num_warps=options.prepare,
    )
    move_windows(raw, windows, *tiles.ends)
    _within(rooms, sizes | precision, options, factored=factored)
    sequences = tiles.per_sequence.shape[1]
    values = options.values or state_columns(sequences * heads, k)
    # The values have been used up: their room takes the corrected ones.
    corrected = rooms.v
    start.launch(
        _carry_kernel,
        (sequences, heads, k // values),
        *(rooms.w, rooms.u, rooms.decayed_k, rooms.fade, states, tiles.per_sequence, rooms.kept, corrected),
        *(sequences, states.stride(0)),
        **sizes,
        VALUES=values,
        **precision,
        num_warps=options.carry,
        num_stages=options.stages,
    )
    start.launch(
        _output_kernel,
        (n, heads),
        *(rooms.decayed_q, rooms.qk, rooms.kept, corrected, gate, norm, tiles.per_tile, out),
        *(gate.stride(0), out.stride(0), n, eps),
        **sizes,
        **precision,
        num_warps=options.output,
    )


def rooms_for(tiles: ChunkTiles, heads: int, k: int, raw: Tensor) -> Rooms:
    """Uninitialised; those of the layer before, where they are few enough to be kept: all kernels come one by one."""
    name = ("kda rooms", heads, k, raw.dtype)
    if name in tiles.kept:
        kept: Rooms = tiles.kept[name]
        return kept
    n, c = tiles.tiles, tiles.tile

    def room(*shape: int, dtype: torch.dtype = raw.dtype) -> Tensor:
        return torch.empty(n, heads, *shape, dtype=dtype, device=raw.device)

    def wide(*shape: int) -> Tensor:
        return room(*shape, dtype=torch.float32)

    same = (room(c, k) for _ in range(7))
    rooms = Rooms(*same, room(c, c), room(k, k), wide(c, k), wide(c), wide(k), wide(c, c))
    if rooms.nbytes <= KEPT_BYTES:
        tiles.kept[name] = rooms
    return rooms


def _within(r: Rooms, constants: dict[str, Any], options: Options, *, factored: bool) -> None:
    """What needs no state: from q, k, v, c, beta of all tiles to q k^T, the decayed q and k, exp(c_C), w and u."""
    levels = constants["C"].bit_length() - 1
    start.launch(
        _inside_kernel if factored else _halved_kernel,
        (*r.q.shape[:2],),
        *(r.q, r.k, r.decay, r.beta, r.a, r.qk, r.decayed_q, r.decayed_k, r.fade),
        **constants,
        **({"SUB": SUB} if factored else {"LEVELS": levels}),
        num_warps=options.inside if factored else options.halved,
        num_stages=1,
    )
    start.launch(
        _solve_kernel,
        (*r.q.shape[:2],),
        *(r.k, r.v, r.decay, r.beta, r.a, r.w, r.u),
        **constants,
        SUB=SUB,
        num_warps=options.solve if constants["K"] >= 64 else SOLVE_NARROW,
    )
