"""The mix in one kernel, with the addition before it and the norm behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs, next_power_of_two
from k3stack.kernels.residual import triton_chunk

WARPS = 16
MANY = 1024
"""Tokens from which on a kernel of its own is taken."""
NOTHING, ADD, REPLACE = 0, 1, 2
"""What happens to the last row before the mix: nothing, ``+= y``, ``= y``."""


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _mix_kernel(
    bank, y, score, weight, mixed, normed, token_stride, count, width, eps, norm_eps,
    CHANGE: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program, in one pass over its rows; a row is on its way while the one before it is scored."""
    at = tl.arange(0, BLOCK)
    mask = at < width
    w = tl.load(score + at, mask=mask, other=0.0)
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    rows = bank + token * token_stride
    coming = tl.load(rows + at, mask=mask, other=0.0)
    if CHANGE != 0:
        change = tl.load(y + token * width + at, mask=mask, other=0.0).to(tl.float32)
    best = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(count):
        value = coming
        coming = tl.load(rows + (j + 1) * width + at, mask=mask & (j + 1 < count), other=0.0)
        r = value.to(tl.float32)
        if CHANGE != 0:  # noqa: SIM102  known when compiled; the inner one is not
            if j == count - 1:
                r = (change + r if CHANGE == 1 else change).to(value.dtype).to(tl.float32)
                tl.store(rows + j * width + at, r.to(value.dtype), mask=mask)
        product, square = tl.reduce((r * w, r * r), 0, _add_both)
        s = product * tl.rsqrt(square / width + eps)
        top = tl.maximum(best, s)
        old = tl.exp(best - top)
        new = tl.exp(s - top)
        acc = acc * old + r * new
        total = total * old + new
        best = top
    mean = (acc / total).to(bank.dtype.element_ty)
    if MIXED:
        tl.store(mixed + token * width + at, mean, mask=mask)
    if NORM:
        f = mean.to(tl.float32)
        f = (f * tl.rsqrt(tl.sum(f * f, 0) / width + norm_eps)).to(mean.dtype).to(tl.float32)
        out = f * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(normed + token * width + at, out.to(mean.dtype), mask=mask)


def mix(rows: Tensor, score: Tensor, eps: float) -> Tensor:
    """See ``reference.mix``."""
    mixed, _ = mix_norm(rows, None, NOTHING, score, eps, None, 0.0, mixed=True)
    assert mixed is not None
    return mixed


def mix_norm(
    rows: Tensor,
    y: Tensor | None,
    change: int,
    score: Tensor,
    eps: float,
    weight: Tensor | None,
    norm_eps: float,
    *,
    mixed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Change the last of ``rows`` [T, n, D] by ``y`` [T, D] in place, mix them (``reference.mix``), and normalise.

    The mix is returned where ``mixed``, ``reference.rms_norm`` of it where a ``weight`` is given.
    """
    tokens, count, width = rows.shape
    if tokens >= MANY:
        return triton_chunk.mix_norm(rows, y, change, score, eps, weight, norm_eps, mixed=mixed)
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device) if mixed else None
    normed = None if weight is None else torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    block = next_power_of_two(width)
    start.launch(
        _mix_kernel,
        (tokens,),
        *(rows, rows if y is None else y.contiguous(), score, score if weight is None else weight),
        *(rows if out is None else out, rows if normed is None else normed),
        *(rows.stride(0), count, width, eps, norm_eps),
        CHANGE=change,
        NORM=weight is not None,
        MIXED=mixed,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), WARPS),
    )
    return out, normed
