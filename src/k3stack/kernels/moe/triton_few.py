"""bfloat16 experts of few tokens: each choice reads its expert's weights for itself, so that nothing has to be sorted.

What counts is that enough bytes are on their way at any time. Warps take whole rows, 16 bytes a thread and load; sums
are plain fp32 ones. The product out of the experts adds up a token's choices, and with them the shared MLP's product.
Its weights are on their way before the activations are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.activation.triton import glu
from k3stack.kernels.launch import await_inputs
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

COLUMNS = 256
"""Of one warp's load of a row: 32 threads, 8 each."""
LOADS = 9
"""Of each of a warp's rows into the experts that are on their way together, at most."""
MOST_TOKENS, MOST_INNER = 4, 2048
"""Tokens, and the experts' width: a warp holds whole rows out of the experts in registers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a program: inner columns of each warp, one after the other (out of the experts: columns at once); warps; at
    most so many registers a thread."""

    rows: int
    warps: int
    registers: int | None = None


INTO, OUT = Shape(4, 4, 128), Shape(1, 4)
"""Into the experts, and out of them."""


@triton.jit
def _in_kernel(
    x, w, ids, out, x_row, width, inner, first, experts, beta, linear_beta,
    TOPK: tl.constexpr, SITU: tl.constexpr, ROWS: tl.constexpr, LOADS: tl.constexpr, WARPS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gate, up and the activation of one choice: WARPS inner columns at a time, ROWS times."""
    await_inputs(PDL)
    choice = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + choice) - first
    if (expert < 0) | (expert >= experts):
        return
    c = tl.arange(0, COLUMNS)[None, :]
    n = tl.program_id(0) * (WARPS * ROWS) + tl.arange(0, WARPS)[:, None]
    # Every warp's own, so that all are laid out alike.
    x += choice // TOPK * x_row + n * 0
    w += expert * 2 * inner * width + n * width
    out += choice * inner + n
    for r in range(ROWS):
        gate = tl.zeros([WARPS, COLUMNS], tl.float32)
        up = tl.zeros([WARPS, COLUMNS], tl.float32)
        for k0 in range(0, width, LOADS * COLUMNS):
            for i in tl.static_range(LOADS):
                at = k0 + i * COLUMNS + c
                if EVEN:
                    a = tl.load(w + at)
                    b = tl.load(w + inner * width + at)
                    v = tl.load(x + at)
                else:
                    inside = (at < width) & (n + r * WARPS < inner)
                    a = tl.load(w + at, mask=inside, other=0.0)
                    b = tl.load(w + inner * width + at, mask=inside, other=0.0)
                    v = tl.load(x + at, mask=inside, other=0.0)
                v = v.to(tl.float32)
                gate += a.to(tl.float32) * v
                up += b.to(tl.float32) * v
        # Rounded as the reference rounds them.
        g = tl.sum(gate, 1, keep_dims=True).to(x.dtype.element_ty).to(tl.float32)
        u = tl.sum(up, 1, keep_dims=True).to(x.dtype.element_ty).to(tl.float32)
        y = glu(g, u, beta, linear_beta, SITU).to(out.dtype.element_ty)
        tl.store(out, y, mask=n + r * WARPS < inner)
        w += WARPS * width
        out += WARPS


@triton.jit
def _row(w, c, width, here, LOADS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """LOADS pieces of one row of each choice's weights."""
    pieces = ()
    for i in tl.static_range(LOADS):
        at = c + i * COLUMNS
        inside = here
        if not EVEN:
            inside = here & (at < width)
        pieces = pieces + (tl.load(w + at, mask=inside, other=0.0),)  # noqa: RUF005
    return pieces


@triton.jit
def _out_kernel(
    x, w, ids, weights, out, hidden, w_hidden, inner, width, first, experts, hidden_width,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, LOADS: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS columns of a token's weighted sum over its choices, plus those of another product, of which each choice's
    threads take SHARED columns. All but x was there before the kernel that x comes from."""
    token = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, CHOICES)[:, None]
    n = tl.program_id(0) * ROWS
    expert = tl.load(ids + token * TOPK + j, mask=j < TOPK, other=-1) - first
    here = (j < TOPK) & (expert >= 0) & (expert < experts)
    weight = tl.load(weights + token * TOPK + j, mask=here, other=0.0)
    w += (tl.where(here, expert, 0) * width + n) * inner
    x += (token * TOPK + j) * inner
    c = tl.arange(0, COLUMNS)[None, :]
    rows = ()
    for r in tl.static_range(ROWS):
        rows = rows + _row(w + r * inner, c, inner, here & (n + r < width), LOADS, COLUMNS, EVEN)
    if SHARED > 0:
        at = j * SHARED + tl.arange(0, SHARED)[None, :]
        inside = at < hidden_width
        y = tl.load(hidden + token * hidden_width + at, mask=inside, other=0.0).to(tl.float32)
        parts = ()
        for r in tl.static_range(ROWS):
            s = tl.load(w_hidden + (n + r) * hidden_width + at, mask=inside & (n + r < width), other=0.0)
            parts = parts + (tl.sum(s.to(tl.float32) * y, 1, keep_dims=True),)  # noqa: RUF005
    await_inputs(PDL)
    pieces = _row(x, c, inner, here, LOADS, COLUMNS, EVEN)
    for r in tl.static_range(ROWS):
        acc = tl.zeros([CHOICES, COLUMNS], tl.float32)
        for i in tl.static_range(LOADS):
            acc += rows[r * LOADS + i].to(tl.float32) * pieces[i].to(tl.float32)
        part = tl.sum(acc, 1, keep_dims=True) * weight
        if SHARED > 0:
            part += parts[r]
        total = tl.sum(tl.sum(part, 1), 0)
        tl.store(out + token * width + n + r, total.to(out.dtype.element_ty), mask=n + r < width)


def fits(tokens: int, w13: Tensor | Mxfp4Weight) -> bool:
    """Whether so few tokens are served here, by weights [E, 2 I, L]."""
    return tokens <= MOST_TOKENS and isinstance(w13, Tensor) and w13.shape[1] <= 2 * MOST_INNER


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: Glu,
    first: int,
    other: tuple[Tensor, Tensor] | None = None,
    shapes: tuple[Shape, Shape] = (INTO, OUT),
) -> Tensor:
    """See ``triton.experts``. ``other``: see ``triton.experts_plus``; not the work of the kernel just before
    (``launch.await_inputs``), and neither are ids and weights."""
    (tokens, top_k), (count, double, width) = ids.shape, w13.shape
    inner = double // 2
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    s = shapes[0]
    loads = min(LOADS, triton.cdiv(width, COLUMNS))
    rows = s.warps * s.rows
    start.launch(
        _in_kernel,
        (triton.cdiv(inner, rows), tokens * top_k),
        *(x, w13, ids, hidden, x.stride(0), width, inner, first, count, activation.beta, activation.linear_beta),
        TOPK=top_k,
        SITU=activation.kind == "situ",
        ROWS=s.rows,
        LOADS=loads,
        WARPS=s.warps,
        COLUMNS=COLUMNS,
        EVEN=width % (loads * COLUMNS) == 0 and inner % rows == 0,
        num_warps=s.warps,
        maxnreg=s.registers,
    )
    s = shapes[1]
    loads = triton.cdiv(inner, COLUMNS)
    choices = triton.next_power_of_2(top_k)
    y, w = (x, w2) if other is None else other
    start.launch(
        _out_kernel,
        (triton.cdiv(width, s.rows), tokens),
        *(hidden, w2, ids, weights, out, y, w, inner, width, first, count, y.shape[1]),
        TOPK=top_k,
        CHOICES=choices,
        ROWS=s.rows,
        LOADS=loads,
        COLUMNS=COLUMNS,
        SHARED=0 if other is None else triton.next_power_of_2(triton.cdiv(y.shape[1], choices)),
        EVEN=inner % (loads * COLUMNS) == 0,
        num_warps=s.warps,
        maxnreg=s.registers,
    )
    return out
