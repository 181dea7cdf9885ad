"""KDA in Triton: a whole decode step of one head in one program, and the windows of chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs

L2_EPS = 1e-6
CHANNELS = 128
WARPS = 4
"""Of a decode program with heads 128 wide: one head's state, or half of it, is held in registers."""
ALONE = 264
"""Heads of all rows that have room on an H200 at once with their whole states."""


@triton.jit
def _convolve(raw, windows, conv, channel, channels, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """One token's convolution and SiLU of some channels, and the window's rows with the token as the last."""
    j = tl.arange(0, ROWS)[:, None]
    at = j * channels + channel[None, :]
    past = tl.load(windows + at, mask=j < TAPS - 1, other=0.0)
    now = tl.load(raw + channel)
    x = tl.where(j == TAPS - 1, now[None, :], past)
    taps = tl.load(conv + at, mask=j < TAPS, other=0.0)
    y = tl.sum(x.to(tl.float32) * taps, 0)
    return y / (1 + tl.exp(-y)), x


@triton.jit
def _move_on(windows, x, channel, channels, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """Store the window's rows one place further back; all reads must be done."""
    j = tl.arange(0, ROWS)[:, None]
    tl.store(windows + (j - 1) * channels + channel[None, :], x, mask=(j > 0) & (j < TAPS))


@triton.jit
def _decode_kernel(
    raw, f, gate, b, conv, exp_a, dt_bias, norm, windows, states, blocks, out,
    raw_row, f_row, gate_row, b_row, window_block, state_block, width, scale, lower_bound, l2_eps, eps,
    K: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token. The state's columns are independent: they are taken in PARTS, one after the other, so that
    more programs have room side by side."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.load(blocks + row)
    i = tl.arange(0, K)
    at = head * K + i
    if block < 0:
        tl.store(out + row * width + at, tl.zeros([K], out.dtype.element_ty))
        return
    V: tl.constexpr = K // PARTS
    place = states + block * state_block + head * K * K + i[:, None] * K + tl.arange(0, V)[None, :]
    raw += row * raw_row
    windows += block * window_block
    q, q_rows = _convolve(raw, windows, conv, at, 3 * width, TAPS, ROWS)
    k, k_rows = _convolve(raw, windows, conv, width + at, 3 * width, TAPS, ROWS)
    v, v_rows = _convolve(raw, windows, conv, 2 * width + at, 3 * width, TAPS, ROWS)
    z = tl.load(f + row * f_row + at).to(tl.float32) + tl.load(dt_bias + at)
    a = tl.load(exp_a + head)
    beta = 1 / (1 + tl.exp(-tl.load(b + row * b_row + head).to(tl.float32)))
    # Other threads may still have to read what is overwritten now.
    tl.debug_barrier()
    _move_on(windows, q_rows, at, 3 * width, TAPS, ROWS)
    _move_on(windows, k_rows, width + at, 3 * width, TAPS, ROWS)
    _move_on(windows, v_rows, 2 * width + at, 3 * width, TAPS, ROWS)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    if BOUNDED:
        g = lower_bound / (1 + tl.exp(-a * z))
    else:
        g = -a * (tl.maximum(z, 0.0) + tl.log(1 + tl.exp(-tl.abs(z))))
    decay = tl.exp(g)
    values = tl.reshape(v, [PARTS, V])
    part = tl.arange(0, PARTS)[:, None]
    outputs = tl.zeros([PARTS, V], tl.float32)
    for p in range(PARTS):
        s = tl.load(place + p * V).to(tl.float32) * decay[:, None]
        d = beta * (tl.sum(tl.where(part == p, values, 0.0), 0) - tl.sum(s * k[:, None], 0))
        s += k[:, None] * d[None, :]
        tl.store(place + p * V, s.to(states.dtype.element_ty))
        outputs = tl.where(part == p, tl.sum(s * q[:, None], 0)[None, :], outputs)
    o = tl.reshape(outputs, [K])
    o = o * tl.rsqrt(tl.sum(o * o, 0) / K + eps) * tl.load(norm + i)
    o = o / (1 + tl.exp(-tl.load(gate + row * gate_row + at).to(tl.float32)))
    tl.store(out + row * width + at, o.to(out.dtype.element_ty))


@triton.jit
def _window_kernel(
    raw, windows, first, last, blocks, raw_row, window_block, channels,
    TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    j = tl.arange(0, ROWS)[:, None]
    here = (c < channels) & (j < TAPS - 1)
    begin = tl.load(first + row)
    own = windows + tl.load(blocks + row) * window_block
    back = tl.load(last + row) - (TAPS - 1) + 1 + j
    x = tl.load(raw + back.to(tl.int64) * raw_row + c, mask=here & (back >= begin), other=0.0)
    past = tl.load(own + (back - begin + TAPS - 1) * channels + c, mask=here & (back < begin), other=0.0)
    tl.debug_barrier()
    tl.store(own + j * channels + c, tl.where(back >= begin, x, past), mask=here)


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
) -> Tensor:
    """One token each of R sequences, from the projections to the gated norm's output; state and window in place.

    raw [R, 3 P], f [R, P] (before dt_bias), gate [R, P], b [R, H] (rows may lie apart), conv [taps, 3 P], exp_a [H],
    dt_bias [P], norm [K] fp32, windows [blocks, taps - 1, 3 P], states [blocks, H, K, K], blocks int64 [R] -> [R, P] in
    raw's dtype. A row of block -1 changes nothing and gives zeros.
    """
    rows, heads = b.shape
    k = states.shape[2]
    out = torch.empty(rows, heads * k, dtype=raw.dtype, device=raw.device)
    taps = conv.shape[0]
    start.launch(
        _decode_kernel,
        (rows, heads),
        *(raw, f, gate, b, conv, exp_a, dt_bias, norm, windows, states, blocks, out),
        *(raw.stride(0), f.stride(0), gate.stride(0), b.stride(0), windows.stride(0), states.stride(0)),
        *(heads * k, k**-0.5, 0.0 if lower_bound is None else lower_bound, L2_EPS, eps),
        K=k,
        TAPS=taps,
        ROWS=triton.next_power_of_2(taps),
        BOUNDED=lower_bound is not None,
        PARTS=1 if rows * heads <= ALONE or k < 64 else 2,
        num_warps=WARPS,
    )
    return out


def move_windows(raw: Tensor, windows: Tensor, first: Tensor, last: Tensor, blocks: Tensor) -> None:
    """Windows [blocks, taps - 1, C] move on by the tokens raw [T, C] of their rows, in place.

    The rows of raw may lie apart; per sequence int64 [R] its first token, last token and block.
    """
    channels, taps = raw.shape[1], windows.shape[1] + 1
    start.launch(
        _window_kernel,
        (first.shape[0], triton.cdiv(channels, CHANNELS)),
        *(raw, windows, first, last, blocks, raw.stride(0), windows.stride(0), channels),
        TAPS=taps,
        ROWS=triton.next_power_of_2(taps),
        CHANNELS=CHANNELS,
        num_warps=1,
    )
