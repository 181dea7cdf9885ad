"""KDA in Triton: a whole decode step of one head in one program (chunks: ``triton_chunk``)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs
from k3stack.kernels.linear.cuda import linear
from k3stack.kernels.linear.triton import added_up
from k3stack.kernels.sums import add_three, add_two

L2_EPS = 1e-6
WARPS, WARPS_ALONE = 4, 8
"""Of a decode program with heads 128 wide: half of one head's state, or all of it, is held in registers."""
COLUMNS = 64
"""Neighbouring columns that a warp takes of a row, where a program has all of a head's state."""
FUSED = 16
"""Rows up to which the second halves of low-rank projections are part of the step."""
ALONE, AHEAD = 132, 264
"""Heads of all rows that have room on an H200 at once with their whole states, and with half of them."""


@triton.jit
def _window(windows, conv, channel, channels, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """Rows of the window, and the convolution's taps, of some channels."""
    j = tl.arange(0, ROWS)[:, None]
    at = j * channels + channel[None, :]
    return tl.load(windows + at, mask=j < TAPS - 1, other=0.0), tl.load(conv + at, mask=j < TAPS, other=0.0)


@triton.jit
def _convolve(now, past, taps, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """The convolution and SiLU of one token's channels ``now``, and the window's rows with the token as the last."""
    j = tl.arange(0, ROWS)[:, None]
    x = tl.where(j == TAPS - 1, now[None, :], past)
    y = tl.sum(x.to(tl.float32) * taps, 0)
    return y / (1 + tl.exp(-y)), x


@triton.jit
def _move_on(windows, x, channel, channels, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """Store the window's rows one place further back; all reads must be done."""
    j = tl.arange(0, ROWS)[:, None]
    tl.store(windows + (j - 1) * channels + channel[None, :], x, mask=(j > 0) & (j < TAPS))


@triton.jit
def _second(x, w, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The product of a low-rank projection's second half ``w`` [K, K / COLUMNS, COLUMNS] with the first half's output
    ``x`` [K]; with half the warps (COLUMNS is K) in the layout of a square, in which they have registers for it."""
    if COLUMNS == K:
        return tl.sum(tl.reshape(w, [K, K]).to(tl.float32) * x.to(tl.float32)[None, :], 1).to(x.dtype).to(tl.float32)
    wide = tl.reshape(x, [1, K // COLUMNS, COLUMNS]).to(tl.float32)
    return tl.sum(tl.sum(w.to(tl.float32) * wide, 1), 1)


@triton.jit
def log_decay(z, a, lower_bound, BOUNDED: tl.constexpr):
    """See ``reference.log_decay``; z with its bias, a the exponential of A_log."""
    if BOUNDED:
        return lower_bound / (1 + tl.exp(-a * z))
    else:
        return -a * (tl.maximum(z, 0.0) + tl.log(1 + tl.exp(-tl.abs(z))))


@triton.jit
def _at_once(place, first, q, k, v, both, beta, decay, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The state ``first`` moved on, to ``place``; the output [K]. What k and q see of the decayed state is found in one
    pass; q sees the new one through k too (``both``: their product)."""
    kd = (k * decay)[:, None, None]
    qd = (q * decay)[:, None, None]
    s = first.to(tl.float32)
    by_k, by_q = tl.reduce((s * kd, s * qd), 0, add_two)
    d = beta * (tl.reshape(v, [K // COLUMNS, COLUMNS]) - by_k)
    o = tl.reshape(by_q + both * d, [K])
    s = s * decay[:, None, None] + k[:, None, None] * d[None, :, :]
    tl.store(place, s.to(place.dtype.element_ty))
    return o


@triton.jit
def _in_parts(
    place, coming, q, k, v, beta, decay, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """The state's columns at ``place``, V at a time, moved on; the output [K]. AHEAD: the first of them are ``coming``,
    the next are called for before those before them are moved on."""
    values = tl.reshape(v, [PARTS, V])
    part = tl.arange(0, PARTS)[:, None]
    outputs = tl.zeros([PARTS, V], tl.float32)
    for p in tl.static_range(PARTS):
        # In two passes: fewer registers, so that more programs have room.
        if AHEAD:
            s = coming.to(tl.float32) * decay[:, None]
            if p + 1 < PARTS:
                coming = tl.load(place + (p + 1) * V)
        else:
            s = tl.load(place + p * V).to(tl.float32) * decay[:, None]
        d = beta * (tl.sum(tl.where(part == p, values, 0.0), 0) - tl.sum(s * k[:, None], 0))
        s += k[:, None] * d[None, :]
        tl.store(place + p * V, s.to(place.dtype.element_ty))
        outputs = tl.where(part == p, tl.sum(s * q[:, None], 0)[None, :], outputs)
    return tl.reshape(outputs, [K])


@triton.jit
def _decode_kernel(
    raw, f, gate, b, conv, exp_a, dt_bias, norm, windows, states, blocks, out, w_f, w_g,
    raw_row, f_row, gate_row, b_row, apart, window_block, state_block, width, scale, lower_bound, l2_eps, eps,
    K: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOUNDED: tl.constexpr,
    PARTS: tl.constexpr, LOW_F: tl.constexpr, LOW_G: tl.constexpr, SHARES: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token. The state's columns are independent: they are taken in PARTS, one after the other, so that
    more programs have room side by side. LOW_F, LOW_G: of decay and gate only the first half's output is given. What
    an earlier step wrote, and weights, are read before the inputs are there (of the state all, or with AHEAD the first
    part); then all of these are called for at once, and added up where they come in SHARES. Where PARTS is 1, squares
    [K, K] are [K, K / COLUMNS, COLUMNS]: a thread has fewer rows, for each of which it works out decay and gate."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.load(blocks + row)
    own = tl.maximum(block, 0)
    i = tl.arange(0, K)
    at = head * K + i
    V: tl.constexpr = K // PARTS
    column = tl.arange(0, K // COLUMNS)[None, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    states += own * state_block + head * K * K
    windows += own * window_block
    # In pieces as the state's, so that all are laid out alike.
    square = tl.max_contiguous(at.to(tl.int64)[:, None, None] * K + column, (1, 1, 4))
    if LOW_F:
        by_f = tl.load(w_f + square)
    if LOW_G:
        by_g = tl.load(w_g + square)
    q_past, q_taps = _window(windows, conv, at, 3 * width, TAPS, ROWS)
    k_past, k_taps = _window(windows, conv, width + at, 3 * width, TAPS, ROWS)
    v_past, v_taps = _window(windows, conv, 2 * width + at, 3 * width, TAPS, ROWS)
    bias = tl.load(dt_bias + at)
    a = tl.load(exp_a + head)
    weight = tl.load(norm + i)
    if PARTS == 1:
        # The last of these reads: Triton then lays out what it meets by it.
        place = states + i[:, None, None] * K + column
        first = tl.load(place)
    else:
        place = states + i[:, None] * K + tl.arange(0, V)[None, :]
        first = tl.load(place) if AHEAD else 0.0
    await_inputs(PDL)
    raw += row * raw_row
    kind: tl.constexpr = out.dtype.element_ty
    q_now = added_up(raw + at, True, apart, SHARES).to(kind)
    k_now = added_up(raw + width + at, True, apart, SHARES).to(kind)
    v_now = added_up(raw + 2 * width + at, True, apart, SHARES).to(kind)
    by_beta = added_up(b + row * b_row + head, True, apart, SHARES).to(kind)
    z = added_up(f + row * f_row + (i if LOW_F else at), True, apart, SHARES).to(kind)
    z_gate = added_up(gate + row * gate_row + (i if LOW_G else at), True, apart, SHARES).to(kind)
    if block < 0:
        tl.store(out + row * width + at, tl.zeros([K], out.dtype.element_ty))
        return
    q, q_rows = _convolve(q_now, q_past, q_taps, TAPS, ROWS)
    k, k_rows = _convolve(k_now, k_past, k_taps, TAPS, ROWS)
    v, v_rows = _convolve(v_now, v_past, v_taps, TAPS, ROWS)
    beta = 1 / (1 + tl.exp(-by_beta.to(tl.float32)))
    if LOW_F:
        z = _second(z, by_f, K, COLUMNS)
    z = z.to(tl.float32) + bias
    if LOW_G:
        z_gate = _second(z_gate, by_g, K, COLUMNS)
    opened = 1 / (1 + tl.exp(-z_gate.to(tl.float32)))
    # Other threads may still have to read what is overwritten now.
    tl.debug_barrier()
    _move_on(windows, q_rows, at, 3 * width, TAPS, ROWS)
    _move_on(windows, k_rows, width + at, 3 * width, TAPS, ROWS)
    _move_on(windows, v_rows, 2 * width + at, 3 * width, TAPS, ROWS)
    q_square, k_square, both = tl.reduce((q * q, k * k, q * k), 0, add_three)
    q_factor = tl.rsqrt(q_square + l2_eps) * scale
    k_factor = tl.rsqrt(k_square + l2_eps)
    q, k, both = q * q_factor, k * k_factor, both * (q_factor * k_factor)
    decay = tl.exp(log_decay(z, a, lower_bound, BOUNDED))
    if PARTS == 1:
        o = _at_once(place, first, q, k, v, both, beta, decay, K, COLUMNS)
    else:
        o = _in_parts(place, first, q, k, v, beta, decay, K, V, PARTS, AHEAD)
    o = o * tl.rsqrt(tl.sum(o * o, 0) / K + eps) * weight
    o *= opened
    tl.store(out + row * width + at, o.to(out.dtype.element_ty))


def decode_step(
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
    blocks: Tensor,
    lower_bound: float | None,
    eps: float,
    w_f: Tensor | None = None,
    w_g: Tensor | None = None,
) -> Tensor:
    """One token each of R sequences, from the projections to the gated norm's output; state and window in place.

    raw [R, 3 P], f [R, P] (before dt_bias), gate [R, P], b [R, H] (rows may lie apart), conv [taps, 3 P], exp_a [H],
    dt_bias [P], norm [K] fp32, windows [blocks, taps - 1, 3 P], states [blocks, H, K, K], blocks int64 [R] -> [R, P] in
    raw's dtype. Or the first four are fp32, parts of one tensor, with one dimension more before these, over which they
    are still to be added up (``linear.cuda.linear_apart``) to bfloat16 numbers; so is the result then. A row of block
    -1 changes nothing and gives zeros. With ``w_f`` [P, K], f is [R, K] and still to be multiplied by it; likewise gate
    with ``w_g``. Blocks, windows and states must not be the work of the kernel just before (``launch.await_inputs``).
    """
    rows, heads = b.shape[-2:]
    k, shares = states.shape[2], b.shape[0] if b.dim() == 3 else None
    if rows > FUSED and shares is None:
        f, w_f = (f, None) if w_f is None else (linear(f, w_f), None)
        gate, w_g = (gate, None) if w_g is None else (linear(gate, w_g), None)
    out = torch.empty(rows, heads * k, dtype=raw.dtype if shares is None else torch.bfloat16, device=raw.device)
    taps = conv.shape[0]
    parts = 1 if rows * heads <= ALONE or k < 64 else 2
    start.launch(
        _decode_kernel,
        (rows, heads),
        *(raw, f, gate, b, conv, exp_a, dt_bias, norm, windows, states, blocks, out),
        *(raw if w_f is None else w_f, raw if w_g is None else w_g),
        *(raw.stride(-2), f.stride(-2), gate.stride(-2), b.stride(-2), raw.stride(0), windows.stride(0)),
        *(states.stride(0),),
        *(heads * k, k**-0.5, 0.0 if lower_bound is None else lower_bound, L2_EPS, eps),
        K=k,
        TAPS=taps,
        ROWS=triton.next_power_of_2(taps),
        COLUMNS=min(COLUMNS, k) if parts == 1 else k,
        BOUNDED=lower_bound is not None,
        PARTS=parts,
        LOW_F=w_f is not None,
        LOW_G=w_g is not None,
        SHARES=shares or 1,
        # A low-rank gate's weights need the registers.
        AHEAD=shares is not None and w_g is None and parts > 1 and rows * heads <= AHEAD,
        num_warps=WARPS if parts > 1 else WARPS_ALONE,
    )
    return out
