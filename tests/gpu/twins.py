"""What all tests of kernels beside their slow twins share.

Every Triton kernel runs on a GPU, or, in fp32, under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tests.cpu.harness import relative

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.012}
"""Relative L2 distance."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def same(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert mine.dtype == theirs.dtype
    assert float(relative(mine, theirs)) < TOLERANCE[dtype]


def in_parts(x: Tensor, shares: int) -> Tensor:
    """fp32 numbers whose sum over the first dimension is ``x``; they are exact."""
    parts = [(draw(*x.shape, seed=30 + i) * 64).round() / 64 for i in range(shares - 1)]
    return torch.stack([*parts, x.float() - sum(parts, torch.zeros_like(x, dtype=torch.float32))])
