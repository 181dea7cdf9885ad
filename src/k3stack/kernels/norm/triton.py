"""Norms in Triton, one program a row. Shapes and meaning as in ``reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs, next_power_of_two


@triton.jit
def rms(value, weight, width, eps):
    """The norm of one row, rounded before and after its weight."""
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    rounded = (wide * scale).to(value.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(value.dtype)


@triton.jit
def _rms_norm_kernel(x, weight, out, stride, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    w = tl.load(weight + at, mask=mask, other=0.0)
    await_inputs(PDL)
    value = tl.load(x + row * stride + at, mask=mask, other=0.0)
    tl.store(out + row * width + at, rms(value, w, width, eps), mask=mask)


@triton.jit
def _add_norm_kernel(x, y, weight, out, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < width
    w = tl.load(weight + at, mask=mask, other=0.0)
    row = tl.program_id(0).to(tl.int64) * width + at
    value = tl.load(x + row, mask=mask, other=0.0)
    await_inputs(PDL)
    added = value.to(tl.float32) + tl.load(y + row, mask=mask, other=0.0).to(tl.float32)
    value = added.to(value.dtype)
    tl.store(x + row, value, mask=mask)
    tl.store(out + row, rms(value, w, width, eps), mask=mask)


@triton.jit
def _head_norm_kernel(
    x,
    gate,
    weight,
    out,
    x_row,
    x_head,
    gate_row,
    gate_head,
    heads,
    width,
    eps,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < width
    value = tl.load(x + row * x_row + head * x_head + at, mask=mask, other=0.0).to(tl.float32)
    to = out + (row * heads + head) * width + at
    if GATED:
        g = tl.load(gate + row * gate_row + head * gate_head + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=mask, other=0.0)
        y = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * w / (1 + tl.exp(-g))
        tl.store(to, y.to(out.dtype.element_ty), mask=mask)
    else:
        y = value * tl.rsqrt(tl.sum(value * value, 0) + eps)
        tl.store(to, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``; the rows of x [T, D] may lie apart."""
    width = x.shape[-1]
    flat = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, width)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_two(width)
    start.launch(
        _rms_norm_kernel,
        (flat.shape[0],),
        *(flat, weight, out, flat.stride(0), width, eps),
        BLOCK=block,
        num_warps=warps(block),
    )
    return out.view(x.shape)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm`` of ``x`` [T, D] after ``y`` is added to it in place. x is contiguous, and not the work of the kernel
    just before (``launch.await_inputs``)."""
    tokens, width = x.shape
    out = torch.empty_like(x)
    block = next_power_of_two(width)
    start.launch(
        _add_norm_kernel, (tokens,), *(x, y.contiguous(), weight, out, width, eps), BLOCK=block, num_warps=warps(block)
    )
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.gated_rms_norm``; x and gate [T, H, K] whose last axis is contiguous."""
    return _per_head(x, gate, weight, eps, gate.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See ``reference.l2_norm``; x [T, H, K] whose last axis is contiguous."""
    return _per_head(x, None, None, eps, torch.float32)


def _per_head(x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    rows, heads, width = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    other = x if gate is None else gate
    start.launch(
        _head_norm_kernel,
        (rows, heads),
        *(x, other, x if weight is None else weight, out),
        *(x.stride(0), x.stride(1), other.stride(0), other.stride(1), heads, width, eps),
        GATED=gate is not None,
        BLOCK=next_power_of_two(width),
        num_warps=1,
    )
    return out


def warps(block: int) -> int:
    """Warps for a program that holds ``block`` values of one row."""
    return min(max(block // 512, 1), 8)
