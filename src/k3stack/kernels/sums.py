"""What ``tl.reduce`` adds up two or three tensors with in one go: threads then meet once instead of once for each."""

from __future__ import annotations

import triton


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f
