"""KDA decode of rows that share a step with chunks, as torch operations over all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor


def decode(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, blocks: Tensor) -> Tensor:
    """One token each of R sequences, states updated in place; see ``cpu.decode``. blocks int64 [R] on the device."""
    s = states[blocks].to(q.dtype) * torch.exp(g).unsqueeze(-1)
    d = beta.unsqueeze(-1) * (v - torch.einsum("rhkv,rhk->rhv", s, k))
    s += k.unsqueeze(-1) * d.unsqueeze(-2)
    states[blocks] = s.to(states.dtype)
    return torch.einsum("rhkv,rhk->rhv", s, q * q.shape[-1] ** -0.5)
