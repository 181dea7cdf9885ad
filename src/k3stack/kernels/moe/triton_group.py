"""Which tokens chose which expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import INTERPRETED, await_inputs

GROUPED = 1024
"""Choices that are looked at in one go."""
HELD = 64
"""Experts here, at most, of which ``in_use`` tells."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def bits_set(v):
    """How many bits of an int32 are set."""
    if _INTERPRETED:
        v = v - ((v >> 1) & 0x55555555)
        v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
        v = (v + (v >> 4)) & 0x0F0F0F0F
        v += v >> 8
        v += v >> 16
        return v & 63
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def place_of(bits, n):
    """The place of the ``n``-th bit that is set of an int32, if there is one."""
    at = 0
    for i in tl.static_range(5):
        half = 16 >> i
        low = bits & ((1 << half) - 1)
        before = bits_set(low)
        over = n >= before
        n = tl.where(over, n - before, n)
        bits = tl.where(over, bits >> half, low)
        at = tl.where(over, at + half, at)
    return at


@triton.jit
def in_use(ids, first, total, experts, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Which experts here are chosen, as bits of two words (WORDS 1: of the lower one; there are no more)."""
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, total, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        own = (tl.load(ids + i, mask=i < total, other=-1) - first).to(tl.int32)
        bit = tl.where((own >= 0) & (own < experts), 1 << (own & 31), 0)
        if WORDS == 1:
            low |= bit
        else:
            low |= tl.where(own < 32, bit, 0)
            high |= tl.where(own < 32, 0, bit)
    return tl.reduce(low, 0, _either), tl.reduce(high, 0, _either) if WORDS == 2 else 0


@triton.jit
def _before(ids, expert, first, total, BLOCK: tl.constexpr):
    """How many of the experts here before this one were chosen."""
    before = 0
    for word in range(expert // 32 + 1):
        bits = 0
        for begin in range(0, total, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            own = (tl.load(ids + i, mask=i < total, other=-1) - first).to(tl.int32)
            hit = (own >= word * 32) & (own < tl.minimum(word * 32 + 32, expert))
            bits |= tl.reduce(tl.where(hit, 1 << (own & 31), 0), 0, _either)
        before += bits_set(bits)
    return before


@triton.jit
def _group_kernel(
    ids, lists, counts, first, total, capacity, BLOCK: tl.constexpr, IN_USE: tl.constexpr, PDL: tl.constexpr
):
    """One expert's choices; IN_USE: and its place among those that have some."""
    await_inputs(PDL)
    expert = tl.program_id(0)
    found = 0
    for begin in range(0, total, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        hit = tl.load(ids + i, mask=i < total, other=-1) == first + expert
        place = found + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(lists + expert.to(tl.int64) * capacity + place, i, mask=hit)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts + expert, found)
    if IN_USE:
        experts = tl.num_programs(0)
        before = _before(ids, expert, first, total, BLOCK)
        tl.store(counts + experts + 1 + before, expert, mask=found > 0)
        tl.store(counts + experts, before + (found > 0).to(tl.int32), mask=expert == experts - 1)
        tl.store(counts + 2 * experts + 1 + tl.arange(0, 2), tl.zeros([2], tl.int32), mask=expert == 0)


def group(ids: Tensor, count: int, first: int, in_use: bool = False) -> tuple[Tensor, Tensor]:
    """Choices by expert: ids [T, k] -> lists int32 [count, T] of indices into the flat ids, counts int32 [count]; with
    ``in_use`` counts [2 count + 3]: then how many experts have some, which these are, and two that are 0, at the
    end."""
    tokens = ids.shape[0]
    lists = torch.empty(count, tokens, dtype=torch.int32, device=ids.device)
    counts = torch.empty(2 * count + 3 if in_use else count, dtype=torch.int32, device=ids.device)
    block = min(GROUPED, triton.next_power_of_2(ids.numel()))
    start.launch(
        _group_kernel,
        (count,),
        *(ids, lists, counts, first, ids.numel(), tokens),
        BLOCK=block,
        IN_USE=in_use,
        num_warps=4,
    )
    return lists, counts
