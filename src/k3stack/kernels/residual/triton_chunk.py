"""The mix of many tokens: each row is read once, the next one while this one is summed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import next_power_of_two


@triton.jit
def _add(a, b, x, y):
    return a + x, b + y


@triton.jit
def _mix_kernel(
    bank, y, score, weight, mixed, normed, token_stride, count, width, eps, norm_eps,
    CHANGE: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a program; the changed row comes first, so that it is known when it is needed."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    rows = bank + token * token_stride
    last = rows + (count - 1) * width
    w = tl.load(score + at, mask=mask, other=0.0)
    value = tl.load(last + at, mask=mask, other=0.0)
    if CHANGE != 0:
        other = tl.load(y + token * width + at, mask=mask, other=0.0)
        if CHANGE == 1:
            other = (other.to(tl.float32) + value.to(tl.float32)).to(value.dtype)
        value = other
        tl.store(last + at, value, mask=mask)
    best = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(count):
        r = value.to(tl.float32)
        value = tl.load(rows + j * width + at, mask=mask & (j < count - 1), other=0.0)
        product, square = tl.reduce((r * w, r * r), 0, _add)
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
    """See ``triton.mix_norm``."""
    tokens, count, width = rows.shape
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
        num_warps=min(max(block // 512, 1), 16),
    )
    return out, normed
