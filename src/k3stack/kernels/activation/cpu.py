"""Gated activations as whole-tensor torch operations. Shapes and meaning as in ``reference``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.precision import widen


def situ_glu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See ``reference.situ_glu``."""
    gate, up = widen(gate_up).chunk(2, -1)
    y = torch.tanh(gate * (1 / beta)).mul_(torch.sigmoid(gate))
    y.mul_(torch.tanh(up * (1 / linear_beta))).mul_(beta * linear_beta)
    return y.to(gate_up.dtype)


def silu_glu(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_glu``."""
    wide = widen(gate_up)
    half = wide.shape[-1] // 2
    gate, up = wide.narrow(-1, 0, half), wide.narrow(-1, half, half)
    return F.silu(gate, inplace=wide is not gate_up).mul_(up).to(gate_up.dtype)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See ``reference.output_gate``."""
    return (widen(x.reshape(gate.shape)) * torch.sigmoid(widen(gate))).to(gate.dtype)
