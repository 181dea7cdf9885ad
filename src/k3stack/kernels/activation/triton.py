"""Gated activations in Triton. Shapes and meaning as in ``reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs

BLOCK = 1024


@triton.jit
def glu(gate, up, beta, linear_beta, SITU: tl.constexpr):
    """SiTU or SiLU of fp32 ``gate`` times ``up``; tanh(x) is 2 sigmoid(2 x) - 1."""
    sigmoid = 1 / (1 + tl.exp(-gate))
    if SITU:
        tanh_gate = 2 / (1 + tl.exp(-2 * gate / beta)) - 1
        tanh_up = 2 / (1 + tl.exp(-2 * up / linear_beta)) - 1
        return beta * linear_beta * tanh_gate * sigmoid * tanh_up
    else:
        return gate * sigmoid * up


@triton.jit
def _glu_kernel(gate_up, out, width, beta, linear_beta, SITU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    y = glu(gate, up, beta, linear_beta, SITU)
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(x, gate, out, x_row, x_head, gate_row, heads, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < width
    value = tl.load(x + row * x_row + head * x_head + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + head * width + at, mask=mask, other=0.0).to(tl.float32)
    y = value / (1 + tl.exp(-g))
    tl.store(out + (row * heads + head) * width + at, y.to(out.dtype.element_ty), mask=mask)


def situ_glu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See ``reference.situ_glu``."""
    return _glu(gate_up, beta, linear_beta, situ=True)


def silu_glu(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_glu``."""
    return _glu(gate_up, 1.0, 1.0, situ=False)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See ``reference.output_gate``; x [T, H, V] may lie in any order of its first two axes."""
    rows, heads, width = x.shape
    out = torch.empty(rows, heads * width, dtype=gate.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    start.launch(
        _gate_kernel,
        (rows, heads),
        *(x, gate, out, x.stride(0), x.stride(1), gate.stride(0), heads, width),
        BLOCK=block,
        num_warps=1,
    )
    return out


def _glu(gate_up: Tensor, beta: float, linear_beta: float, *, situ: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    rows = out.numel() // width
    start.launch(
        _glu_kernel,
        (rows, triton.cdiv(width, BLOCK)),
        *(gate_up, out, width, beta, linear_beta),
        SITU=situ,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
