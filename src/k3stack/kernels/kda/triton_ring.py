"""KDA of chunks, few states from tile to tile: in Gluon, with a ring of tiles that the copy engine fills
(``triton_chunk`` says when).

A long sequence's states take as long as the chain of its tiles, while most of the device is idle. So it is cut into
SEGMENTS. A first kernel takes the first one's tiles and, beside them, of each segment that has one before and one after
it, what it makes of no state, and what it makes of the identity without its values: its transition. From these follow
the states between segments (``join_kernel``), and a second kernel takes all others' tiles side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3stack.kernels import launch as start

COLUMNS = 16
"""Columns of a state that one program carries."""
SLOTS, WARPS = 4, 4
"""Tiles in a program's shared memory; its warps."""
PROGRAMS = 132
"""Most programs: each takes a multiprocessor's shared memory, and an H200 has as many."""
SEGMENTS, LONG, JOIN_WARPS = 4, 64, 8
"""Segments of a long sequence, how many tiles make it one, and warps that join them."""
PANEL = 64
"""Columns that shared memory holds side by side: halves of a head."""
PANELS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
FEW = gl.NVMMASharedLayout(swizzle_byte_width=2 * COLUMNS, element_bitwidth=16, rank=2)
_PANELS = gl.constexpr(PANELS)
_PANEL = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_FEW = gl.constexpr(FEW)


@gluon.jit
def _send_for(w, u, k, tile, own, slot, ws, us, ks, full):
    """Let a tile come to a slot."""
    C: gl.constexpr = us.shape[1]
    SQUARE: gl.constexpr = [2, C, ws.shape[2]]
    mbarrier.expect(full.index(slot), 2 * C * (2 * SQUARE[0] * SQUARE[2] + us.shape[2]))
    to = ws.index(2 * slot)._reinterpret(w.dtype, SQUARE, _PANELS)
    tma.async_copy_global_to_shared(w, [0, tile * C, 0], full.index(slot), to)
    tma.async_copy_global_to_shared(u, [tile * C, own], full.index(slot), us.index(slot))
    to = ks.index(2 * slot)._reinterpret(k.dtype, SQUARE, _PANELS)
    tma.async_copy_global_to_shared(k, [0, tile * C, 0], full.index(slot), to)


@gluon.jit
def _begin(w, u, k, tile, heads, tiles, own, ws, us, ks, full):
    """All slots but one are being filled."""
    STAGES: gl.constexpr = us.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for i in range(STAGES - 1):
        if i < tiles:
            _send_for(w, u, k, tile + i * heads, own, i, ws, us, ks, full)


@gluon.jit
def _job(SEGMENTS: gl.constexpr, REST: gl.constexpr):
    """Sequence, segment, and what a program makes of it: 0 its tiles' results, 1 its last state, 2 its transition."""
    n = gl.program_id(0)
    if SEGMENTS == 1:
        return n, 0, 0
    elif REST:
        return 0, n + 1, 0
    else:
        return 0, (n + 1) // 2, gl.where(n == 0, 0, 2 - n % 2)


@gluon.jit
def _first(place, slots, row, column, kind, K: gl.constexpr, REST: gl.constexpr):
    """Halves of a segment's first state: the sequence's, none, the identity, or that at the end of the one before."""
    if REST:
        return gl.load(slots), gl.load(slots + K // 2 * K)
    else:
        own = (row[:, None] >= 0) & (column[None, :] >= 0) & (kind == 0)
        low = gl.load(place, mask=own, other=0.0).to(gl.float32)
        high = gl.load(place + K // 2 * K, mask=own, other=0.0).to(gl.float32)
        turns = kind == 2
        low = gl.where(turns & (row[:, None] == column[None, :]), 1.0, low)
        return low, gl.where(turns & (row[:, None] + K // 2 == column[None, :]), 1.0, high)


@gluon.jit
def _store(place, low, high, K: gl.constexpr):
    gl.store(place, low.to(place.dtype.element_ty))
    gl.store(place + K // 2 * K, high.to(place.dtype.element_ty))


@gluon.jit
def _keep(place, slots, low, high, segment, K: gl.constexpr, SEGMENTS: gl.constexpr, REST: gl.constexpr):
    """A segment's last state."""
    if SEGMENTS > 1 and not REST:
        _store(slots, low, high, K)
    elif segment == SEGMENTS - 1:
        _store(place, low, high, K)


@gluon.jit
def _load(fade, row, HALF: gl.constexpr):
    """The decay over a tile, in halves."""
    return gl.load(fade + row), gl.load(fade + HALF + row)


@gluon.jit
def _put(state, low, high):
    """A state's halves in shared memory, for products and copies."""
    KIND: gl.constexpr = state.dtype
    HALF: gl.constexpr = state.shape[0] // 2
    state.slice(0, HALF, dim=0).store(low.to(KIND))
    state.slice(HALF, HALF, dim=0).store(high.to(KIND))
    fence_async_shared()


@gluon.jit
def ring_kernel(
    w, u, k, fade, states, sequences, kept, corrected, between, count, state_block,
    K: gl.constexpr, C: gl.constexpr, VALUES: gl.constexpr, STAGES: gl.constexpr,
    SEGMENTS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """What ``triton_carry.carry_kernel`` does, with one segment bit for bit; w, u, k, kept, corrected: see ``carry``.
    Of several SEGMENTS the first kernel or the REST, ``between`` [SEGMENTS, 2, heads, K, K] them: state, transition.

    States and corrected values go from product to product through shared memory; copies, both ways, and the decay fall
    into the time of products."""
    KIND: gl.constexpr = u.dtype
    HALF: gl.constexpr = K // 2
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    sequence, segment, kind = _job(SEGMENTS, REST)
    head = gl.program_id(1)
    heads = gl.num_programs(1)
    own = gl.program_id(2) * VALUES
    tiles = gl.load(sequences + count + sequence).to(gl.int32)
    first = tiles * segment // SEGMENTS
    tile = (gl.load(sequences + sequence).to(gl.int32) + first) * heads + head
    tiles = tiles * (segment + 1) // SEGMENTS - first
    ws = gl.allocate_shared_memory(KIND, [2 * STAGES, C, HALF], _PANEL)
    us = gl.allocate_shared_memory(KIND, [STAGES, C, VALUES], _FEW)
    ks = gl.allocate_shared_memory(KIND, [2 * STAGES, C, HALF], _PANEL)
    state = gl.allocate_shared_memory(KIND, [2, K, VALUES], _FEW)
    right = gl.allocate_shared_memory(KIND, [2, C, VALUES], _FEW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    _begin(w, u, k, tile, heads, tiles, own, ws, us, ks, full)
    row = gl.arange(0, HALF, gl.SliceLayout(1, STATE))
    column = own + gl.arange(0, VALUES, gl.SliceLayout(0, STATE))
    square = head * K * K + (row[:, None] * K + column[None, :])
    place = states + gl.load(sequences + 4 * count + sequence) * state_block + square
    slots = between + (2 * (segment - 1 if REST else segment) + (kind == 2).to(gl.int32)) * heads * K * K + square
    low, high = _first(place, slots, row, column, kind, K, REST)
    share = gl.where(kind == 2, 0.0, 1.0)
    zero = gl.zeros([C, VALUES], gl.float32, STATE)
    fade += tile.to(gl.int64) * K
    fade_low, fade_high = _load(fade, row, HALF)
    for n in range(tiles):
        slot = n % STAGES
        now = state.index(n % 2)
        _put(now, low, high)
        mbarrier.wait(full.index(slot), n // STAGES % 2)
        gl.thread_barrier()
        d = warpgroup_mma(ws.index(2 * slot), now.slice(0, HALF, dim=0), zero, use_acc=False, is_async=True)
        d = warpgroup_mma(ws.index(2 * slot + 1), now.slice(HALF, HALF, dim=0), d, is_async=True)
        if kind == 0:
            tma.async_copy_shared_to_global(kept, [tile * K, own], now)
        values = us.index(slot).load(STATE).to(gl.float32) * share
        low = low * fade_low[:, None]
        high = high * fade_high[:, None]
        # The last tile's next is itself.
        fade += gl.where(n + 1 < tiles, heads * K, 0)
        fade_low, fade_high = _load(fade, row, HALF)
        d = warpgroup_mma_wait(0, [d])
        then = right.index(n % 2)
        then.store((values - d).to(KIND))
        fence_async_shared()
        tma.store_wait(1)  # the tile before this one is copied out: its places are free from here on
        gl.thread_barrier()
        low = warpgroup_mma(ks.index(2 * slot).permute((1, 0)), then, low, is_async=True)
        high = warpgroup_mma(ks.index(2 * slot + 1).permute((1, 0)), then, high, is_async=True)
        if kind == 0:
            tma.async_copy_shared_to_global(corrected, [tile * C, own], then)
        # All warps have done with the tile before this one.
        if n + STAGES - 1 < tiles:
            to = tile + (STAGES - 1) * heads
            _send_for(w, u, k, to, own, (n + STAGES - 1) % STAGES, ws, us, ks, full)
        tile += heads
        low, high = warpgroup_mma_wait(0, [low, high])
    tma.store_wait(0)
    _keep(place, slots, low, high, segment, K, SEGMENTS, REST)


@triton.jit
def join_kernel(between, K: tl.constexpr, VALUES: tl.constexpr, SEGMENTS: tl.constexpr):
    """Some columns of the states at segments' ends, from the first's on: each one's transition of the state before it,
    and what it makes of none."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    i = tl.arange(0, K)
    at = between + head * K * K + i[:, None] * K
    j = (tl.program_id(1) * VALUES + tl.arange(0, VALUES))[None, :]
    s = tl.load(at + j)
    for _ in tl.static_range(SEGMENTS - 2):
        at += 2 * heads * K * K
        turn = tl.load(at + heads * K * K + i[None, :])
        s = tl.dot(turn, s, tl.load(at + j), input_precision="tf32x3")
        tl.store(at + j, s)


def carry(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    fade: Tensor,
    states: Tensor,
    sequences: Tensor,
    kept: Tensor,
    corrected: Tensor,
) -> None:
    """The states of ``sequences`` (``ChunkTiles.per_sequence``) through their tiles, in place.

    w, u, k [tiles, heads, C, K] in 16 bits and the decay over each tile ``fade`` fp32 [tiles, heads, K] -> ``kept``
    [tiles, heads, K, K], states before each tile, and ``corrected`` [tiles, heads, C, K].
    """
    (n, heads, c, width), count = w.shape, sequences.shape[1]
    columns = width // COLUMNS
    first = 2 * SEGMENTS - 3
    segments = SEGMENTS if count == 1 and n >= LONG and first * heads * columns <= PROGRAMS else 1
    between = fade if segments == 1 else fade.new_empty(segments, 2, heads, width, width)
    boxes = _panels(w, c), _few(u, c), _panels(k, c), fade, states, sequences, _few(kept, width), _few(corrected, c)

    def run(programs: int, rest: bool = False) -> None:
        start.launch(
            ring_kernel,
            (programs, heads, columns),
            *(*boxes, between, count, states.stride(0)),
            K=width,
            C=c,
            VALUES=COLUMNS,
            STAGES=SLOTS,
            SEGMENTS=segments,
            REST=rest,
            num_warps=WARPS,
        )

    if segments == 1:
        run(count)
        return
    run(first)
    start.launch(
        join_kernel, (heads, columns), between, K=width, VALUES=COLUMNS, SEGMENTS=segments, num_warps=JOIN_WARPS
    )
    run(segments - 1, rest=True)


def fits(sequences: int, heads: int, width: int) -> bool:
    """Whether there are so few states. More programs would go one after the other."""
    return sequences * heads * (width // COLUMNS) <= PROGRAMS


def _panels(t: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of ``rows`` whole rows, as two panels."""
    width = t.shape[-1]
    return TensorDescriptor(t, [width // PANEL, t.numel() // width, PANEL], [PANEL, width, 1], [2, rows, PANEL], PANELS)


def _few(t: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of a program's columns of ``rows`` rows."""
    width = t.shape[-1]
    return TensorDescriptor(t, [t.numel() // width, width], [width, 1], [rows, COLUMNS], FEW)
