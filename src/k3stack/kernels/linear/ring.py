"""Products of at most 64 tokens: the copy engine fills a ring of tiles in shared memory, from which Hopper's matrix
instructions take weights and tokens; the first weights are on their way before the tokens are there.

Written in Gluon, Triton's lower language: in Triton's own the first copies would wait with the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
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
from k3stack.kernels.launch import await_inputs

PANEL = 64
"""Columns that shared memory holds side by side; a tile is of several such panels."""
MOST_TOKENS, FEW = 64, 16
ROWS, WARPS, PROGRAMS, MOST_SHARES = 64, 4, 132, 4
"""Weight rows of a program, which all of its warps take together; programs that run side by side (an H200's
multiprocessors); most that share a tile."""
SHARED = 224 << 10
"""Bytes of a ring."""
LEAST, SHORT, FEW_ROWS = 1 << 21, 4096, (2112, 3072)
"""Smaller weights, shorter rows, and, of few tokens, other numbers of rows are left to ``linear.triton``."""
BRIEF, MANY_ROWS = 768, 4608
"""But rows so short of so many rows are all sent for at once, of few tokens."""
EARLY = 8
"""Of few tokens, panels that are sent for before these are there: all of them hold up the kernel that makes them."""
NEXT = 4 << 10
"""Bytes of shared memory that are left to the programs of the kernel that adds up."""
PANELS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_PANELS = gl.constexpr(PANELS)
_PANEL = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_spaces: dict[torch.device, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True, slots=True)
class Ring:
    """Panels of a tile, tiles, those of them that are sent for before the tokens are there, and programs that share out
    a tile's columns."""

    panels: int
    tiles: int
    early: int
    shares: int = 1


def ring_of(tokens: int, rows: int, width: int, width2: int = 0) -> Ring | None:
    """What a product is done with, as measured on an H200; ``width2``: a second one is added to it. None: others are
    faster."""
    if tokens > MOST_TOKENS or rows > ROWS * PROGRAMS or rows * width < LEAST:
        return None
    few = tokens <= FEW
    panels = 4 if few else 2
    if few and not width2 and width <= BRIEF and rows >= MANY_ROWS:
        panels = math.gcd(width // PANEL, panels)
        tiles = width // (PANEL * panels)
        return Ring(panels, tiles, tiles)
    if not width2 and (width <= SHORT or (few and not FEW_ROWS[0] <= rows < FEW_ROWS[1])):
        return None
    tiles = SHARED // _tile_bytes(tokens, panels)
    shares = 1 if few or width2 else min(PROGRAMS // triton.cdiv(rows, ROWS), MOST_SHARES)
    return Ring(panels, tiles, EARLY // panels if few else tiles, shares)


def apart_of(tokens: int, rows: int, width: int) -> Ring | None:
    """``ring_of`` where others add up the shares; of few tokens by two programs a multiprocessor."""
    if tokens > MOST_TOKENS or rows > ROWS * PROGRAMS or width <= SHORT or rows * width < LEAST:
        return None
    each = 2 if tokens <= FEW else 1
    shares = min(each * PROGRAMS // triton.cdiv(rows, ROWS), MOST_SHARES)
    if shares == 1:
        return None
    panels = 4 if tokens <= FEW // 2 else 2
    tiles = (SHARED // each - NEXT) // _tile_bytes(tokens, panels)
    return Ring(panels, tiles, EARLY // panels if tokens <= FEW else tiles, shares)


def _tile_bytes(tokens: int, panels: int) -> int:
    return (ROWS + _rows_of(tokens)) * PANEL * 2 * panels


def _rows_of(tokens: int) -> int:
    """Rows of the tokens' tiles."""
    return max(8, start.next_power_of_two(tokens))


@gluon.jit
def _send_for(
    one, two, row, panel, panels, ring, full, slot, ROWS: gl.constexpr, DEEP: gl.constexpr, TWO: gl.constexpr
):  # fmt: skip
    """Let ROWS rows, DEEP panels of them from ``panel`` on, come to a place of the ring: of ``one``, which has
    ``panels`` panels, or of ``two`` behind it."""
    to = ring.index(slot * DEEP)._reinterpret(gl.bfloat16, [DEEP, ROWS, 64], _PANELS)
    if not TWO or panel < panels:
        tma.async_copy_global_to_shared(one, [panel, row, 0], full.index(slot), to)
    else:
        tma.async_copy_global_to_shared(two, [panel - panels, row, 0], full.index(slot), to)


@gluon.jit
def _send_for_weights(
    w, w2, first, panel, panels, ring, full, slot,
    ROWS: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """The place is full once they and the tokens' part have come."""
    mbarrier.expect(full.index(slot), (ROWS + BT) * 128 * DEEP)
    _send_for(w, w2, first, panel, panels, ring, full, slot, ROWS, DEEP, TWO)


@gluon.jit
def _add_up(
    mine, partial, done, out, tile, share, first, tokens, rows,
    ROWS: gl.constexpr, BT: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """The program that comes last adds up the sums of all shares of a tile, always in the same order."""
    WARPS: gl.constexpr = gl.num_warps()
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BT, BT // 4], [WARPS, 1], [1, 0])
    n = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    t = gl.arange(0, BT, gl.SliceLayout(0, FLAT))
    at = partial + tile * (SHARES * ROWS * BT) + n[:, None] * BT + t[None, :]
    gl.store(at + share * (ROWS * BT), gl.convert_layout(mine, FLAT))
    gl.thread_barrier()
    if gl.atomic_add(done + tile, 1, sem="acq_rel", scope="gpu") == SHARES - 1:
        total = gl.zeros([ROWS, BT], gl.float32, FLAT)
        for s in gl.static_range(SHARES):
            total += gl.load(at + s * (ROWS * BT), cache_modifier=".cg")
        OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
        _store(gl.convert_layout(total, OUT), out, first, tokens, rows, OUT)
        gl.store(done + tile, 0)


@gluon.jit
def _store(y, out, first, tokens, rows, LAYOUT: gl.constexpr):
    n = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    t = gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    live = (n < rows)[:, None] & (t < tokens)[None, :]
    gl.store(out + t[None, :] * rows + n[:, None], y.to(out.dtype.element_ty), mask=live)


@gluon.jit(do_not_specialize=["tokens", "rows", "steps", "steps2"])
def _ring_kernel(
    w, x, w2, x2, out, partial, done, tokens, rows, steps, steps2,
    ROWS: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, TILES: gl.constexpr, SHARES: gl.constexpr,
    EARLY: gl.constexpr, APART: gl.constexpr, TWO: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """ROWS weight rows with all tokens, over one of SHARES of the columns: w x plus w2 x2 (``steps2`` 0: w x). APART:
    the shares' sums lie one behind the other, for others to add up."""
    tile = gl.program_id(0) // SHARES
    share = gl.program_id(0) % SHARES
    first = tile * ROWS
    begin = share * (steps + steps2) // SHARES
    n = (share + 1) * (steps + steps2) // SHARES - begin
    begin *= DEEP
    panels = steps * DEEP
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [TILES * DEEP, ROWS, 64], _PANEL)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [TILES * DEEP, BT, 64], _PANEL)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for i in range(gl.minimum(EARLY, n)):
        _send_for_weights(w, w2, first, begin + i * DEEP, panels, w_ring, full, i, ROWS, BT, DEEP, TWO)
    await_inputs(PDL)
    for i in range(gl.minimum(EARLY, n)):
        _send_for(x, x2, 0, begin + i * DEEP, panels, x_ring, full, i, BT, DEEP, TWO)
    for i in range(EARLY, gl.minimum(TILES, n)):
        _send_for_weights(w, w2, first, begin + i * DEEP, panels, w_ring, full, i, ROWS, BT, DEEP, TWO)
        _send_for(x, x2, 0, begin + i * DEEP, panels, x_ring, full, i, BT, DEEP, TWO)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    acc = gl.zeros([ROWS, BT], gl.float32, ACC)
    slot = 0
    phase = 0
    for i in range(n):
        mbarrier.wait(full.index(slot), phase)
        for p in gl.static_range(DEEP):
            a = w_ring.index(slot * DEEP + p)
            b = x_ring.index(slot * DEEP + p).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        gl.thread_barrier()
        if i + TILES < n:
            panel = begin + (i + TILES) * DEEP
            _send_for_weights(w, w2, first, panel, panels, w_ring, full, slot, ROWS, BT, DEEP, TWO)
            _send_for(x, x2, 0, panel, panels, x_ring, full, slot, BT, DEEP, TWO)
        slot += 1
        if slot == TILES:
            slot = 0
            phase ^= 1
    if APART:
        _store(acc, out + share * tokens * rows, first, tokens, rows, ACC)
    elif SHARES > 1:
        _add_up(acc, partial, done, out, tile, share, first, tokens, rows, ROWS, BT, SHARES)
    else:
        _store(acc, out, first, tokens, rows, ACC)


def fits(*tensors: Tensor) -> bool:
    """Whether the copy engine takes them: rows of whole panels, that begin at multiples of 16 bytes."""
    return all(
        t.stride(1) == 1 and t.shape[1] % PANEL == 0 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0
        for t in tensors
    )


def product(
    x: Tensor,
    weight: Tensor,
    ring: Ring,
    out_dtype: torch.dtype | None = None,
    second: tuple[Tensor, Tensor] | None = None,
    apart: bool = False,
) -> Tensor:
    """See ``reference.linear``; bfloat16, at most 64 tokens, ``fits`` of all. ``second`` (x, weight): their product is
    added before the sum is rounded. ``apart``: [shares, T, out] in fp32, still to be added up."""
    (tokens, width), rows = x.shape, weight.shape[0]
    if apart:
        out = torch.empty(ring.shares, tokens, rows, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(tokens, rows, dtype=out_dtype or x.dtype, device=x.device)
    x2, weight2 = second or (x, weight)
    token_rows, step = _rows_of(tokens), PANEL * ring.panels
    tiles = triton.cdiv(rows, ROWS)
    given = [(weight, ROWS), (x, token_rows), (weight2, ROWS), (x2, token_rows)]
    start.launch(
        _ring_kernel,
        (tiles * ring.shares,),
        *(_described(t, n, ring.panels) for t, n in given),
        *(out, *_space(x.device), tokens, rows),
        *(triton.cdiv(width, step), 0 if second is None else triton.cdiv(x2.shape[1], step)),
        ROWS=ROWS,
        BT=token_rows,
        DEEP=ring.panels,
        TILES=ring.tiles,
        SHARES=ring.shares,
        EARLY=ring.early,
        APART=apart,
        TWO=second is not None,
        num_warps=WARPS,
    )
    return out


def _described(t: Tensor, rows: int, panels: int) -> TensorDescriptor:
    """Boxes of ``panels`` panels of ``rows`` rows each; beyond the tensor's end they are filled with zeros."""
    shape, strides = [t.shape[1] // PANEL, t.shape[0], PANEL], [PANEL, t.stride(0), 1]
    return TensorDescriptor(t, shape, strides, [panels, rows, PANEL], PANELS)


def _space(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums, and how many programs are done with each tile (0 between two kernels). Products of a device share
    them: they run one after the other."""
    if device not in _spaces:
        _spaces[device] = (
            torch.empty(PROGRAMS * ROWS * MOST_TOKENS, dtype=torch.float32, device=device),
            torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        )
    return _spaces[device]
