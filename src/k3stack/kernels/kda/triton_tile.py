"""KDA of chunks, kernels of single tiles (``triton_chunk`` starts them): all before the states, all after them."""

from __future__ import annotations

import triton
import triton.language as tl

from k3stack.kernels.kda.triton import log_decay


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
def prepare_kernel(
    raw, f, b, conv, exp_a, dt_bias, windows, tiles, q, k, v, c, beta,
    raw_row, f_row, b_row, window_block, width, count, scale, lower_bound, l2_eps,
    K: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """One head of one tile by four programs: q (scaled); k; v; the running sum of its log decay, with beta. Zeros where
    no token is. (A program that does all of it needs a multiprocessor for itself.)"""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(tiles + tile)
    r = tl.arange(0, C)
    here = r < tl.load(tiles + count + tile)
    i = head * K + tl.arange(0, K)
    at = (tile * tl.num_programs(1) + head).to(tl.int64) * C
    to = at * K + r[:, None] * K + tl.arange(0, K)[None, :]
    if part < 3:
        begin = tl.load(tiles + 2 * count + tile)
        own = windows + tl.load(tiles + 3 * count + tile) * window_block
        x = _convolve(raw, own, conv, first, begin, here, part * width + i, raw_row, 3 * width, TAPS, C)
        if part == 2:
            tl.store(v + to, x.to(v.dtype.element_ty))
        else:
            norm = tl.rsqrt(tl.sum(x * x, 1) + l2_eps)
            if part == 0:
                tl.store(q + to, (x * (norm * scale)[:, None]).to(q.dtype.element_ty))
            else:
                tl.store(k + to, (x * norm[:, None]).to(k.dtype.element_ty))
    else:
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
def inside_kernel(
    q, k, c, beta, a_out, qk_out, q_out, k_out, fade,
    K: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A = beta k k^T and q k^T under decay within a tile, q exp(c), k exp(c_C - c) and exp(c_C), by four programs: of
    the products what lies between halves, between neighbouring sub-chunks, within sub-chunks; the decayed q and k.

    The decay between two tokens is split at a token between them: halves of the tile at its middle, neighbouring
    sub-chunks at their border, both factors <= 1; within a sub-chunk at the middle of its range, which must be bounded.
    """
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    part = tl.program_id(2)
    q += tile * C * K
    k += tile * C * K
    c += tile * C * K
    PART: tl.constexpr = min(32, K)
    r = tl.arange(0, C)
    block = r // SUB
    if part == 3:
        for begin in range(0, K, PART):
            i = begin + tl.arange(0, PART)
            at = r[:, None] * K + i[None, :]
            kt = tl.load(k + at).to(tl.float32)
            qt = tl.load(q + at).to(tl.float32)
            _decayed(qt, kt, tl.load(c + at), c, q_out, k_out, fade, tile, at, i, K, C)
    else:
        near = part == 2
        border = tl.where(part == 0, C // 2 - 1, r // (2 * SUB) * (2 * SUB) + SUB - 1)
        # The two rows whose mean is where the decay is split.
        above = tl.where(near, block * SUB - 1, border)
        last = tl.where(near, block * SUB + SUB - 1, border)
        kk = tl.zeros([C, C], tl.float32)
        qk = tl.zeros([C, C], tl.float32)
        for begin in range(0, K, PART):
            i = begin + tl.arange(0, PART)
            at = r[:, None] * K + i[None, :]
            kt = tl.load(k + at).to(tl.float32)
            qt = tl.load(q + at).to(tl.float32)
            split = tl.load(c + above[:, None] * K + i[None, :], mask=(above >= 0)[:, None], other=0.0)
            split += tl.load(c + last[:, None] * K + i[None, :])
            up = tl.load(c + at) - 0.5 * split
            factor = tl.exp(tl.where(near, up, -tl.abs(up)))
            inverse = tl.exp(-tl.where(near, up, tl.abs(up)))
            kk, qk = _both(qt, kt, factor, inverse, kk, qk, PRECISION)
        same = block[:, None] == block[None, :]
        pair = (block // 2)[:, None] == (block // 2)[None, :]
        own = tl.where(same, 2, tl.where(pair, 1, 0)) == part
        kk *= tl.load(beta + tile * C + r)[:, None]
        below = r[:, None] - r[None, :]
        to = tile * C * C + r[:, None] * C + r[None, :]
        tl.store(a_out + to, tl.where(below > 0, kk, 0.0), mask=own)
        tl.store(qk_out + to, tl.where(below >= 0, qk, 0.0).to(qk_out.dtype.element_ty), mask=own)


@triton.jit
def halved_kernel(
    q, k, c, beta, a_out, qk_out, q_out, k_out, fade,
    K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same by one program, under any decay: halves of the tile at its middle, their halves at theirs, down to
    single tokens."""
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
def invert_kernel(a, C: tl.constexpr, SUB: tl.constexpr):
    """(I + A)^-1 of one sub-chunk, in its place in A, by one warp: sums over rows then cross no border of warps."""
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    i = tl.arange(0, SUB)[:, None]
    j = tl.arange(0, SUB)[None, :]
    place = a + tile * C * C + tl.program_id(2) * (SUB * C + SUB) + i * C + j
    lower = -tl.load(place)
    # Row after row: the inverse's is -A's plus -A's times the rows above.
    x = lower
    for n in tl.static_range(2, SUB):
        y = tl.sum(tl.where(i == n, lower, 0.0), 0)
        y += tl.sum(y[:, None] * x, 0)
        x = tl.where(i == n, y[None, :], x)
    tl.store(place, x + tl.where(i == j, 1.0, 0.0))


@triton.jit
def solve_kernel(
    k, v, c, beta, a, w_out, u_out,
    K: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With M = (I + A)^-1, w = M beta k exp(c) and u = M beta v: from any state S, corrected values are u - w S.

    ``a``: A with its sub-chunks inverted already (``invert_kernel``)."""
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    r = tl.arange(0, C)
    x = tl.load(a + tile * C * C + r[:, None] * C + r[None, :])
    same = (r // SUB)[:, None] == (r // SUB)[None, :]
    one = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    # With D the sub-chunks' inverse, L what is below them in -A and N = D L, M = (I - N) (I + N^2) D, as N^4 = 0.
    lower = tl.where(same, 0.0, -x)
    x = tl.where(same, x, 0.0)
    n1 = tl.dot(x, lower, input_precision=PRECISION)
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
def output_kernel(
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
