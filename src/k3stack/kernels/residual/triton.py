"""The mix in one kernel, with the addition before it and the norm behind it; one for few tokens and one for many."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs, let_come, next_power_of_two
from k3stack.kernels.linear import ring
from k3stack.kernels.sums import add_three, add_two

WARPS = 16
MANY = 1024
"""Tokens from which on the kernel for many is taken."""
MANY_WARPS, REGISTERS, STAGES = 8, 128, 3
"""Of that kernel: warps, registers of a thread (two programs fit a multiprocessor), rows in shared memory."""
SOON = range(ring.FEW + 1, ring.MOST_TOKENS + 1)
"""Tokens whose mix is followed by a product (``linear.ring``) that should come at once."""
NOTHING, ADD, REPLACE = 0, 1, 2
"""What happens to the last row before the mix: nothing, ``+= y``, ``= y``."""


@triton.jit
def _take_in(r, w, best, total, acc, width, eps):
    """One more row ``r`` in the running softmax of scores: best score, sum of weights, weighted sum of rows."""
    product, square = tl.reduce((r * w, r * r), 0, add_two)
    s = product * tl.rsqrt(square / width + eps)
    top = tl.maximum(best, s)
    old = tl.exp(best - top)
    new = tl.exp(s - top)
    return top, total * old + new, acc * old + r * new


@triton.jit
def _finish(
    mean, weight, mixed, normed, token, at, mask, width, norm_eps, NORM: tl.constexpr, MIXED: tl.constexpr
):  # fmt: skip
    """Write the mix and its norm, as far as they are wanted."""
    if MIXED:
        tl.store(mixed + token * width + at, mean, mask=mask)
    if NORM:
        f = mean.to(tl.float32)
        f = (f * tl.rsqrt(tl.sum(f * f, 0) / width + norm_eps)).to(mean.dtype).to(tl.float32)
        out = f * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(normed + token * width + at, out.to(mean.dtype), mask=mask)


@triton.jit
def _mix_kernel(
    bank, y, score, weight, mixed, normed, token_stride, count, width, eps, norm_eps,
    CHANGE: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
    SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program, in one pass over its rows; a row is on its way while the one before it is scored. The norm's
    sum of squares is put together from those of the parts, so that one look at the last row is enough."""
    if SOON:
        let_come(PDL)
    at = tl.arange(0, BLOCK)
    mask = at < width
    w = tl.load(score + at, mask=mask, other=0.0)
    # Not where it is used: nothing else reads it in a step, so that it comes from afar.
    by = tl.load(weight + at, mask=mask, other=0.0) if NORM else w
    token = tl.program_id(0).to(tl.int64)
    rows = bank + token * token_stride
    # EARLY: what a mix wrote has been there for a while; ``y`` alone is new.
    if not EARLY:
        await_inputs(PDL)
    coming = tl.load(rows + at, mask=mask, other=0.0)
    best = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(count - 1):
        value = coming
        coming = tl.load(rows + (j + 1) * width + at, mask=mask, other=0.0)
        best, total, acc = _take_in(value.to(tl.float32), w, best, total, acc, width, eps)
    own = tl.sum(acc * acc, 0)
    if EARLY:
        await_inputs(PDL)
    r = coming.to(tl.float32)
    if CHANGE != 0:
        change = tl.load(y + token * width + at, mask=mask, other=0.0).to(tl.float32)
        r = (change + r if CHANGE == 1 else change).to(coming.dtype).to(tl.float32)
        tl.store(rows + (count - 1) * width + at, r.to(coming.dtype), mask=mask)
    product, square, both = tl.reduce((r * w, r * r, acc * r), 0, add_three)
    s = product * tl.rsqrt(square / width + eps)
    top = tl.maximum(best, s)
    old = tl.exp(best - top)
    new = tl.exp(s - top)
    share = 1 / (total * old + new)
    old *= share
    new *= share
    mean = acc * old + r * new
    if MIXED:
        tl.store(mixed + token * width + at, mean.to(coming.dtype), mask=mask)
    if NORM:
        squares = old * old * own + 2 * old * new * both + new * new * square
        factor = tl.rsqrt(tl.maximum(squares, 0.0) / width + norm_eps)
        tl.store(normed + token * width + at, (mean * factor * by.to(tl.float32)).to(coming.dtype), mask=mask)


@triton.jit
def _mix_many_kernel(
    bank, y, score, weight, mixed, normed, token_stride, count, width, eps, norm_eps,
    CHANGE: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As ``_mix_kernel``, for tokens that fill the device: the changed row comes first, the others are copied to shared
    memory ahead of their use, which leaves registers for a second program."""
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
    acc = value.to(tl.float32)
    product, square = tl.reduce((acc * w, acc * acc), 0, add_two)
    best = product * tl.rsqrt(square / width + eps)
    total = best * 0 + 1
    for j in tl.range(0, count - 1, num_stages=STAGES):
        r = tl.load(rows + j * width + at, mask=mask, other=0.0).to(tl.float32)
        best, total, acc = _take_in(r, w, best, total, acc, width, eps)
    mean = (acc / total).to(bank.dtype.element_ty)
    _finish(mean, weight, mixed, normed, token, at, mask, width, norm_eps, NORM, MIXED)


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
    many: bool | None = None,
    early: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Change the last of ``rows`` [T, n, D] by ``y`` [T, D] in place, mix them (``reference.mix``), and normalise.

    The mix is returned where ``mixed``, ``reference.rms_norm`` of it where a ``weight`` is given. ``many``: with the
    kernel for many tokens; None: as their number says. ``early``: another kernel came between the rows' last change
    and that which makes ``y``: they are read while ``y`` is still to come (``launch.await_inputs``).
    """
    tokens, count, width = rows.shape
    many = tokens >= MANY if many is None else many
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device) if mixed else None
    normed = None if weight is None else torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    block = next_power_of_two(width)
    options: dict[str, Any] = {"EARLY": early, "SOON": tokens in SOON, "num_warps": min(max(block // 512, 1), WARPS)}
    if many:
        options = {"STAGES": STAGES, "maxnreg": REGISTERS, "num_warps": min(max(block // 1024, 1), MANY_WARPS)}
    start.launch(
        _mix_many_kernel if many else _mix_kernel,
        (tokens,),
        *(rows, rows if y is None else y.contiguous(), score, score if weight is None else weight),
        *(rows if out is None else out, rows if normed is None else normed),
        *(rows.stride(0), count, width, eps, norm_eps),
        CHANGE=change,
        NORM=weight is not None,
        MIXED=mixed,
        BLOCK=block,
        **options,
    )
    return out, normed
