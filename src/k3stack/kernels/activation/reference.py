"""Gated activations by their formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def situ_glu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(up / b2)`` in the wide dtype.

    gate_up [..., 2I] holds gate then up -> [..., I] in its dtype.
    """
    gate, up = widen(gate_up).chunk(2, -1)
    sigmoid = 1 / (1 + torch.exp(-gate))
    return (beta * torch.tanh(gate / beta) * sigmoid * linear_beta * torch.tanh(up / linear_beta)).to(gate_up.dtype)


def silu_glu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``; gate_up [..., 2I] -> [..., I]."""
    gate, up = widen(gate_up).chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)`` in the wide dtype; x [T, H, V], gate [T, H V] -> [T, H V] in gate's dtype."""
    return (widen(x.reshape(gate.shape)) / (1 + torch.exp(-widen(gate)))).to(gate.dtype)
