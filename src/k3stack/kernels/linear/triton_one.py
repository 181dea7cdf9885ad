"""Products of one token: plain sums, no matrix instructions.

A warp, or some that share it, takes a row of the weight with 16 bytes a thread and load. All of a program's loads are
on their way before the input is there, so that the device's memory is not idle while the kernel before ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs

COLUMNS = 256
"""Of one warp's load: 32 threads, 8 each."""
LEAST, MOST = 2048, 4096
"""Columns of the weights that are multiplied here: with shorter rows, or several loads after another for one row,
matrix instructions are as fast on an H200."""
MOST_ROWS = 20000


@dataclass(frozen=True, slots=True)
class Form:
    """Of a program: rows of each warp (of those that share them), warps, and how many share a row."""

    rows: int
    warps: int
    spread: int


ONE = Form(1, 4, 1)


def form_of(rows: int, width: int) -> Form | None:
    """How a weight [rows, width] is multiplied with one token; None: not here."""
    return ONE if width % COLUMNS == 0 and LEAST <= width <= MOST and rows <= MOST_ROWS else None


@triton.jit
def _one_kernel(
    x, w, plus, out, w_row, rows,
    ROWS: tl.constexpr, LOADS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr, PLUS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Products of AT_ONCE rows, ROWS times; all weights are in registers before the first sum."""
    n = tl.program_id(0) * (AT_ONCE * ROWS) + tl.arange(0, AT_ONCE)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    w += n.to(tl.int64) * w_row + c
    weights = ()
    for r in tl.static_range(ROWS):
        here = n + r * AT_ONCE < rows
        for i in tl.static_range(LOADS):
            piece = tl.load(w + r * AT_ONCE * w_row + i * COLUMNS, mask=here, other=0.0)
            weights = weights + (piece,)  # noqa: RUF005
    await_inputs(PDL)
    # Every warp's own, so that all are laid out alike.
    x += n * 0 + c
    inputs = ()
    for i in tl.static_range(LOADS):
        inputs = inputs + (tl.load(x + i * COLUMNS),)  # noqa: RUF005
    for r in tl.static_range(ROWS):
        acc = tl.zeros([AT_ONCE, COLUMNS], tl.float32)
        for i in tl.static_range(LOADS):
            acc += weights[r * LOADS + i].to(tl.float32) * inputs[i].to(tl.float32)
        y = tl.sum(acc, 1, keep_dims=True)
        at = n + r * AT_ONCE
        if PLUS:
            y += tl.load(plus + at, mask=at < rows, other=0.0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=at < rows)


def linear(
    x: Tensor, weight: Tensor, form: Form, out_dtype: torch.dtype | None = None, plus: Tensor | None = None
) -> Tensor:
    """See ``triton.linear``, with one token."""
    rows, width = weight.shape
    out = torch.empty(1, rows, dtype=out_dtype or x.dtype, device=x.device)
    at_once, columns = form.warps // form.spread, COLUMNS * form.spread
    start.launch(
        _one_kernel,
        (triton.cdiv(rows, form.rows * at_once),),
        *(x, weight, x if plus is None else plus.contiguous(), out, weight.stride(0), rows),
        ROWS=form.rows,
        LOADS=width // columns,
        AT_ONCE=at_once,
        COLUMNS=columns,
        PLUS=plus is not None,
        num_warps=form.warps,
    )
    return out
