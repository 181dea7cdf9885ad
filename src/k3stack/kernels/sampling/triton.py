"""The least weight that is kept, in one kernel and without a sort: the host need not wait to hear how many are needed.

Positive floats are in the order of their bits. The weight sought is the largest one for which as many tokens (top-k),
or as much weight (top-p), lie at it and above; its bits are found two at a time, from the highest down.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start

BLOCK, WARPS = 4096, 16
BITS = tl.constexpr(30)
"""Of weights from 0 to 1: the sign and the highest bit of the exponent are 0."""
ONE = tl.constexpr(0x3F800000)


@triton.jit
def _above(weights, vocab, t1, t2, t3, floor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of a row's weights, or how much weight, lies at three thresholds and above, and at ``floor``."""
    a = tl.zeros([BLOCK], tl.float64)
    b = tl.zeros([BLOCK], tl.float64)
    c = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, vocab, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        w = tl.load(weights + i, mask=i < vocab, other=-1.0)
        value = tl.where(w >= floor, 1.0, 0.0).to(tl.float64) if COUNT else tl.where(w >= floor, w, 0.0).to(tl.float64)
        a += tl.where(w >= t1, value, 0.0)
        b += tl.where(w >= t2, value, 0.0)
        c += tl.where(w >= t3, value, 0.0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _search(weights, vocab, wanted, floor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight at which, and above, ``wanted`` lies (0: none is small enough)."""
    found = 0
    for shift in tl.static_range(BITS - 2, -1, -2):
        step = 1 << shift
        t1 = (found + step).to(tl.float32, bitcast=True)
        t2 = (found + 2 * step).to(tl.float32, bitcast=True)
        t3 = (found + 3 * step).to(tl.float32, bitcast=True)
        a, b, c = _above(weights, vocab, t1, t2, t3, floor, COUNT, BLOCK)
        steps = (a >= wanted).to(tl.int32) + (b >= wanted).to(tl.int32) + (c >= wanted).to(tl.int32)
        found += steps * step
    return tl.minimum(found, ONE).to(tl.float32, bitcast=True)


@triton.jit
def _least_kernel(weights, top_k, top_p, min_p, out, row, vocab, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    weights += n * row
    k = tl.load(top_k + n)
    p = tl.load(top_p + n)
    least = 0.0
    if k > 0:
        least = _search(weights, vocab, k.to(tl.float64), 0.0, True, BLOCK)
    if p < 1.0:
        whole, _, _ = _above(weights, vocab, least, least, least, least, False, BLOCK)
        by_mass = _search(weights, vocab, whole * p, least, False, BLOCK)
        least = tl.maximum(least, by_mass)
    tl.store(out + n, tl.maximum(least, tl.load(min_p + n).to(tl.float32)))


def least_kept(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See ``reference.least_kept``; weights float32, of a row side by side."""
    out = torch.empty(weights.shape[0], dtype=torch.float32, device=weights.device)
    start.launch(
        _least_kernel,
        (weights.shape[0],),
        *(weights, top_k, top_p, min_p, out, weights.stride(0), weights.shape[1]),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
