"""KDA of chunks, kernels of single tiles (``triton_chunk`` starts them): all before the states, all after them.

Logarithms of decay are to base 2, so that exponentials are one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x):
    """In six instructions: a natural exponential and a division take twice as many, for ranges that do not occur."""
    root = tl.rsqrt(1 + tl.exp2(-LOG2E * x))
    return root * root


@triton.jit
def _decay(z, a, lower_bound, BOUNDED: tl.constexpr):
    """The logarithm to base 2 of ``triton.log_decay``'s."""
    if BOUNDED:
        return LOG2E * lower_bound * _sigmoid(a * z)
    else:
        return -a * (LOG2E * tl.maximum(z, 0.0) + tl.log2(1 + tl.exp2(-LOG2E * tl.abs(z))))


@triton.jit
def _token(
    raw, windows, first, begin, end, at, channel, raw_row, channels, TAPS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Tokens ``first + at`` of some channels [rows, channels]; those before the sequence from its window, where EARLY
    says that there can be some; else zeros."""
    t = first + at
    x = tl.load(raw + t[:, None] * raw_row + channel[None, :], mask=((t >= begin) & (t < end))[:, None], other=0.0)
    x = x.to(tl.float32)
    if EARLY:
        slot = at + (TAPS - 1)
        past = windows + slot[:, None] * channels + channel[None, :]
        # Only a sequence's first tile looks back to the window.
        x += tl.load(past, mask=((slot < TAPS - 1) & (first == begin))[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def prepare_kernel(
    raw, f, b, conv, exp_a, dt_bias, windows, tiles, q, k, v, c, beta,
    raw_row, f_row, b_row, window_block, width, count, scale, lower_bound, l2_eps,
    K: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BOUNDED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One head of one tile by four programs: q (scaled); k; beta v; the running sum of its log decay, with beta. Zeros
    where no token is.

    A thread goes through RUN tokens of its channels: it loads each once for all taps, and adds decays up by itself.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(tiles + tile)
    tokens = tl.load(tiles + count + tile)
    r = tl.arange(0, C // RUN) * RUN
    i = head * K + tl.arange(0, K)
    at = (tile * tl.num_programs(1) + head).to(tl.int64) * C
    to = (at + r[:, None]) * K + tl.arange(0, K)[None, :]
    if part < 3:
        begin = tl.load(tiles + 2 * count + tile)
        own = windows + tl.load(tiles + 3 * count + tile) * window_block
        channel = part * width + i
        xs = ()
        for t in tl.static_range(RUN + TAPS - 1):
            place = r + (t - TAPS + 1), channel, raw_row, 3 * width
            xs += (_token(raw, own, first, begin, first + tokens, *place, TAPS, t < TAPS - 1),)
        # As many rows as the tokens have: a thread then loads what it needs itself.
        wide = channel[None, :] + r[:, None] * 0
        taps = ()
        for j in tl.static_range(TAPS):
            taps += (tl.load(conv + j * 3 * width + wide),)
        for t in tl.static_range(RUN):
            here = r + t < tokens
            y = xs[t] * taps[0]
            for j in tl.static_range(1, TAPS):
                y += xs[t + j] * taps[j]
            y *= _sigmoid(y)
            if part == 2:
                chance = tl.load(b + (first + r + t) * b_row + head, mask=here, other=0.0).to(tl.float32)
                share = tl.where(here, _sigmoid(chance), 0.0)
                tl.store(v + to + t * K, (y * share[:, None]).to(v.dtype.element_ty))
            else:
                norm = tl.where(here, tl.rsqrt(tl.sum(y * y, 1) + l2_eps), 0.0)
                if part == 0:
                    tl.store(q + to + t * K, (y * (norm * scale)[:, None]).to(q.dtype.element_ty))
                else:
                    tl.store(k + to + t * K, (y * norm[:, None]).to(k.dtype.element_ty))
    else:
        a = tl.load(exp_a + head)
        bias = tl.load(dt_bias + i[None, :] + r[:, None] * 0)
        total = tl.zeros([C // RUN, K], tl.float32)
        zs = ()
        for t in tl.static_range(RUN):
            source = f + (first + t + r)[:, None] * f_row + i[None, :]
            zs += (tl.load(source, mask=(r + t < tokens)[:, None], other=0.0),)
        sums = ()
        for t in tl.static_range(RUN):
            g = _decay(zs[t].to(tl.float32) + bias, a, lower_bound, BOUNDED)
            total += tl.where((r + t < tokens)[:, None], g, 0.0)
            sums += (total,)
        before = tl.cumsum(total, 0) - total
        for t in tl.static_range(RUN):
            tl.store(c + to + t * K, before + sums[t])
        one = tl.arange(0, C)
        chance = tl.load(b + (first + one) * b_row + head, mask=one < tokens, other=0.0).to(tl.float32)
        tl.store(beta + at + one, tl.where(one < tokens, _sigmoid(chance), 0.0))


@triton.jit
def _both(q, k, factor, inverse, kk, qk, PRECISION: tl.constexpr):
    """Add the products of keys, and of queries, with keys: rows times ``factor``, columns times ``inverse``."""
    column = tl.trans(k * inverse)
    kk = tl.dot(k * factor, column, kk, input_precision=PRECISION)
    qk = tl.dot(q * factor, column, qk, input_precision=PRECISION)
    return kk, qk


@triton.jit
def inside_kernel(
    q, k, c, beta, a_out, qk_out, q_out, k_out, w_out, fade,
    K: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A = beta k k^T and q k^T under decay within a tile, q exp(c), k exp(c_C - c), beta k exp(c) and exp(c_C), by four
    programs: of the products what lies between halves, between neighbouring sub-chunks, within sub-chunks; the rest.

    The decay between two tokens is split at a token between them: halves of the tile at its middle, neighbouring
    sub-chunks at their border, both factors <= 1; within a sub-chunk at the middle of its range, which must be bounded.
    """
    tile = (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)
    part = tl.program_id(0)
    q += tile * C * K
    k += tile * C * K
    c += tile * C * K
    PART: tl.constexpr = min(32, K)
    r = tl.arange(0, C)
    share = tl.load(beta + tile * C + r)
    block = r // SUB
    if part == 3:
        for begin in range(0, K, PART):
            i = begin + tl.arange(0, PART)
            at = r[:, None] * K + i[None, :]
            kt = tl.load(k + at).to(tl.float32)
            qt = tl.load(q + at).to(tl.float32)
            _decayed(qt, kt, tl.load(c + at), share, c, q_out, k_out, w_out, fade, tile, at, i, K, C)
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
            factor = tl.exp2(tl.where(near, up, -tl.abs(up)))
            inverse = tl.exp2(-tl.where(near, up, tl.abs(up)))
            kk, qk = _both(qt, kt, factor, inverse, kk, qk, PRECISION)
        same = block[:, None] == block[None, :]
        pair = (block // 2)[:, None] == (block // 2)[None, :]
        own = tl.where(same, 2, tl.where(pair, 1, 0)) == part
        kk *= share[:, None]
        below = r[:, None] - r[None, :]
        to = tile * C * C + r[:, None] * C + r[None, :]
        tl.store(a_out + to, tl.where(below > 0, kk, 0.0), mask=own)
        tl.store(qk_out + to, tl.where(below >= 0, qk, 0.0).to(qk_out.dtype.element_ty), mask=own)


@triton.jit
def halved_kernel(
    q, k, c, beta, a_out, qk_out, q_out, k_out, w_out, fade,
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
    share = tl.load(beta + tile * C + r)
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    for begin in range(0, K, PART):
        i = begin + tl.arange(0, PART)
        at = r[:, None] * K + i[None, :]
        kt = tl.load(k + at).to(tl.float32)
        qt = tl.load(q + at).to(tl.float32)
        own += tl.sum(qt * kt, 1)
        _decayed(qt, kt, tl.load(c + at), share, c, q_out, k_out, w_out, fade, tile, at, i, K, C)
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
            e = tl.exp2(-tl.abs(tl.load(c + at) - tl.load(c + border[:, None] * K + i[None, :])))
            kk_new, qk_new = _both(qt, kt, e, e, kk_new, qk_new, PRECISION)
        same = block[:, None] == block[None, :]
        kk = tl.where(same, kk_new, kk)
        qk = tl.where(same, qk_new, qk)
        size = size // 2
    kk *= share[:, None]
    qk = tl.where(r[:, None] == r[None, :], own[:, None], qk)
    _store_products(a_out, qk_out, kk, qk, tile, C)


@triton.jit
def _decayed(qt, kt, ct, share, c, q_out, k_out, w_out, fade, tile, at, i, K: tl.constexpr, C: tl.constexpr):
    """Write some columns of q exp(c), k exp(c_C - c), beta k exp(c) and exp(c_C); ``share``: beta."""
    end = tl.load(c + (C - 1) * K + i)
    at += tile * C * K
    e = tl.exp2(ct)
    tl.store(q_out + at, (qt * e).to(q_out.dtype.element_ty))
    tl.store(k_out + at, (kt * tl.exp2(end[None, :] - ct)).to(k_out.dtype.element_ty))
    tl.store(w_out + at, (kt * e * share[:, None]).to(w_out.dtype.element_ty))
    tl.store(fade + tile * K + i, tl.exp2(end))


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
def solve_kernel(a, w, v, u_out, K: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """With M = (I + A)^-1, w = M beta k exp(c) and u = M beta v: from any state S, corrected values are u - w S.

    ``a``: A with its sub-chunks inverted already (``invert_kernel``). ``w`` holds beta k exp(c) before, ``v`` beta v.
    """
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    r = tl.arange(0, C)
    block = r // SUB
    filled = block[:, None] >= block[None, :]
    x = tl.load(a + tile * C * C + r[:, None] * C + r[None, :], mask=filled, other=0.0)
    PART: tl.constexpr = min(64, K)
    # Under way before the products; values would take too much shared memory.
    ks = ()
    for begin in tl.static_range(0, K, PART):
        at = tile * C * K + r[:, None] * K + (begin + tl.arange(0, PART))[None, :]
        ks += (tl.load(w + at),)
    same = block[:, None] == block[None, :]
    one = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    # With D the sub-chunks' inverse, L what is below them in -A and N = D L, M = (I - N) (I + N^2) D, as N^4 = 0.
    lower = tl.where(same, 0.0, -x)
    x = tl.where(same, x, 0.0)
    n1 = tl.dot(x, lower, input_precision=PRECISION)
    n2 = tl.dot(n1, n1, input_precision=PRECISION)
    m = tl.dot(one + n2, x, input_precision=PRECISION)
    m = tl.dot(one + n1, m, input_precision=PRECISION).to(w.dtype.element_ty)
    for n in tl.static_range(K // PART):
        at = tile * C * K + r[:, None] * K + (n * PART + tl.arange(0, PART))[None, :]
        vt = tl.load(v + at)
        tl.store(w + at, tl.dot(m, ks[n], input_precision=PRECISION).to(m.dtype))
        tl.store(u_out + at, tl.dot(m, vt, input_precision=PRECISION).to(m.dtype))


@triton.jit
def _move_window(raw, window, first, last, channel, raw_row, channels, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """Some channels of a sequence's window move on by its tokens ``first`` to ``last``, in place."""
    c = channel[None, :]
    j = tl.arange(0, ROWS)[:, None]
    here = (j < TAPS - 1) & (c >= 0)
    back = last - (TAPS - 1) + 1 + j
    x = tl.load(raw + back * raw_row + c, mask=here & (back >= first), other=0.0)
    past = tl.load(window + (back - first + TAPS - 1) * channels + c, mask=here & (back < first), other=0.0)
    tl.debug_barrier()
    tl.store(window + j * channels + c, tl.where(back >= first, x, past), mask=here)


@triton.jit
def output_kernel(
    q, qk, kept, corrected, gate, norm, tiles, out, raw, windows,
    gate_row, out_row, raw_row, window_block, width, count, eps,
    K: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one head of one tile, with their gated norm. A sequence's last moves the window on, now that nobody
    reads it any more."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile)
    here = (tl.arange(0, C) < tl.load(tiles + count + tile))[:, None]
    at = (tile * tl.num_programs(1) + head).to(tl.int64)
    i = tl.arange(0, K)
    r = tl.arange(0, C)
    # All under way before the products.
    qt = tl.load(q + at * C * K + r[:, None] * K + i[None, :])
    s = tl.load(kept + at * K * K + i[:, None] * K + i[None, :])
    filled = (r // SUB)[:, None] >= (r // SUB)[None, :]
    a = tl.load(qk + at * C * C + r[:, None] * C + r[None, :], mask=filled, other=0.0)
    d = tl.load(corrected + at * C * K + r[:, None] * K + i[None, :])
    g = tl.load(gate + (first + r)[:, None] * gate_row + (head * K + i)[None, :], mask=here, other=0.0)
    o = tl.dot(qt, s, input_precision=PRECISION)
    o = tl.dot(a, d, o, input_precision=PRECISION)
    o = o * tl.rsqrt(tl.sum(o * o, 1) / K + eps)[:, None] * tl.load(norm + i)[None, :]
    o *= _sigmoid(g.to(tl.float32))
    tl.store(out + (first + r)[:, None] * out_row + (head * K + i)[None, :], o.to(out.dtype.element_ty), mask=here)
    begin = tl.load(tiles + 2 * count + tile)
    if tl.load(tiles + 2 * count + tile + 1, mask=tile + 1 < count, other=-1) != begin:
        last = first + tl.load(tiles + count + tile) - 1
        window = windows + tl.load(tiles + 3 * count + tile) * window_block
        for part in tl.static_range(3):
            _move_window(raw, window, begin, last, part * width + head * K + i, raw_row, 3 * width, TAPS, ROWS)
