"""Muon for matrices (and stacks of expert matrices), AdamW for the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration over a stack [S, m, n]: singular values go near 1."""
    a, b, c = _COEFFICIENTS
    turned = x.shape[-2] > x.shape[-1]
    if turned:
        x = x.mT
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if turned else x).float()


class Muon:
    """Nesterov momentum, orthogonalised; the update's size matches AdamW's (0.2 root-mean-square at rate 1)."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.02) -> None:
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.state = {p: torch.zeros_like(p) for p in params}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (rows, cols), params in self.groups.items():
            grads = [p.grad for p in params]
            bufs = [self.state[p] for p in params]
            torch._foreach_lerp_(bufs, grads, 1 - self.momentum)
            looked = torch._foreach_lerp(grads, bufs, self.momentum)
            stack = torch.cat([u.reshape(-1, rows, cols) for u in looked])
            update = orthogonalise(stack)
            sizes = [p.numel() // (rows * cols) for p in params]
            parts = [u.view_as(p) for u, p in zip(update.split(sizes), params, strict=True)]
            torch._foreach_mul_(params, 1 - rate * self.decay)
            torch._foreach_add_(params, parts, alpha=-rate * 0.2 * max(rows, cols) ** 0.5)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, the rest for AdamW): embeddings, the head, routers and vectors go to AdamW."""
    matrices, rest = [], []
    for name, p in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        small = p.ndim < 2 or last in ("embed", "head", "router", "conv", "b")
        (rest if small else matrices).append(p)
    return matrices, rest
