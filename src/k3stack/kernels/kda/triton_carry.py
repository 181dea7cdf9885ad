"""KDA of chunks, the states from tile to tile: in Triton for any case, in Gluon for few states (``triton_chunk``)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_TILES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_FEW = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@triton.jit
def carry_kernel(
    w, u, k, fade, states, sequences, kept, corrected, count, state_block,
    K: tl.constexpr, C: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state through the tiles of one sequence: the state before each, corrected values."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.load(sequences + sequence)
    tiles = tl.load(sequences + count + sequence)
    block = tl.load(sequences + 4 * count + sequence)
    i = tl.arange(0, K)
    r = tl.arange(0, C)
    j = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    place = states + block * state_block + head * K * K + i[:, None] * K + j[None, :]
    s = tl.load(place).to(tl.float32)
    for n in range(tiles):
        tile = (first + n) * heads + head
        at = tile * C * K + r[:, None] * K
        wt = tl.load(w + at + i[None, :])
        ut = tl.load(u + at + j[None, :])
        kt = tl.load(k + at + i[None, :])
        faded = tl.load(fade + tile * K + i)
        rounded = s.to(wt.dtype)
        tl.store(kept + tile * K * K + i[:, None] * K + j[None, :], rounded)
        d = (ut.to(tl.float32) - tl.dot(wt, rounded, input_precision=PRECISION)).to(wt.dtype)
        tl.store(corrected + at + j[None, :], d)
        s = tl.dot(tl.trans(kt), d, s * faded[:, None], input_precision=PRECISION)
    tl.store(place, s.to(states.dtype.element_ty))


@gluon.jit
def _places(ROWS: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Places of [ROWS, COLUMNS] of rows of K."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return row[:, None] * K + column[None, :]


@gluon.jit
def _ask(w, u, k, fade, tile, own, slot, ws, us, ks, fades):
    """Have a tile copied to a slot."""
    C: gl.constexpr = ws.shape[1]
    K: gl.constexpr = ws.shape[2]
    V: gl.constexpr = us.shape[2]
    at = tile * C * K
    square = _places(C, K, K, _WIDE)
    async_copy.async_copy_global_to_shared(ws.index(slot), w + at + square)
    async_copy.async_copy_global_to_shared(us.index(slot), u + (at + own) + _places(C, V, K, _FEW))
    async_copy.async_copy_global_to_shared(ks.index(slot), k + at + square)
    async_copy.async_copy_global_to_shared(fades.index(slot), fade + tile * K + gl.arange(0, K, _LINE))
    async_copy.commit_group()


@gluon.jit
def ring_kernel(
    w, u, k, fade, states, sequences, kept, corrected, count, state_block,
    K: gl.constexpr, C: gl.constexpr, VALUES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What ``carry_kernel`` does, bit for bit, with the next tiles in shared memory (STAGES slots) and states and
    corrected values handed from product to product there: stores, copies and the decay fall into products' time."""
    KIND: gl.constexpr = w.dtype.element_ty
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    SMALL: gl.constexpr = gl.NVMMASharedLayout(2 * VALUES, 16, 2)
    sequence = gl.program_id(0)
    head = gl.program_id(1)
    heads = gl.num_programs(1)
    first = gl.load(sequences + sequence)
    tiles = gl.load(sequences + count + sequence)
    block = gl.load(sequences + 4 * count + sequence)
    own = gl.program_id(2) * VALUES
    ws = gl.allocate_shared_memory(KIND, [STAGES, C, K], _TILES)
    us = gl.allocate_shared_memory(KIND, [STAGES, C, VALUES], SMALL)
    ks = gl.allocate_shared_memory(KIND, [STAGES, C, K], _TILES)
    fades = gl.allocate_shared_memory(gl.float32, [STAGES, K], _FLAT)
    state = gl.allocate_shared_memory(KIND, [K, VALUES], SMALL)
    right = gl.allocate_shared_memory(KIND, [C, VALUES], SMALL)
    last = (first + tiles - 1) * heads + head
    tile = first * heads + head
    for i in gl.static_range(STAGES - 1):
        _ask(w, u, k, fade, gl.minimum(tile + i * heads, last), own, i, ws, us, ks, fades)
    place = states + block * state_block + head * K * K + own + _places(K, VALUES, K, STATE)
    s = gl.load(place).to(gl.float32)
    zero = gl.zeros([C, VALUES], gl.float32, STATE)
    slot = 0
    free = STAGES - 1
    for _ in range(tiles):
        state.store(s.to(KIND))
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        values = us.index(slot).load(STATE).to(gl.float32)
        d = warpgroup_mma(ws.index(slot), state, zero, use_acc=False, is_async=True)
        to = kept + tile * K * K + own
        gl.store(to + _places(K, VALUES, K, _FEW), state.load(_FEW))
        s = s * fades.index(slot).load(gl.SliceLayout(1, STATE))[:, None]
        d = warpgroup_mma_wait(0, [d])
        right.store((values - d).to(KIND))
        fence_async_shared()
        gl.thread_barrier()
        s = warpgroup_mma(ks.index(slot).permute((1, 0)), right, s, is_async=True)
        to = corrected + tile * C * K + own
        gl.store(to + _places(C, VALUES, K, _FEW), right.load(_FEW))
        # All warps have done with the tile before this one.
        ahead = gl.minimum(tile + (STAGES - 1) * heads, last)
        _ask(w, u, k, fade, ahead, own, free, ws, us, ks, fades)
        free = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        tile += heads
        s = warpgroup_mma_wait(0, [s])
    async_copy.wait_group(0)
    gl.store(place, s.to(states.dtype.element_ty))
