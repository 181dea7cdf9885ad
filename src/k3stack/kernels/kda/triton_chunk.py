"""KDA of chunks in Triton: many sequences at once, states and windows read from and written to arena blocks.

Chunked form of the recurrence over tiles of 64 tokens (``cpu.prefill`` has the formulas), in a handful of kernels: from
the projections to convolved, normalised q, k, v and the running log decay of each tile; everything of a tile that does
not need the state; the states from tile to tile (``triton_carry``); the outputs with their gated norm. All but the
states are kernels of single tiles (``triton_tile``). ``triton_square`` and ``triton_ring`` do parts of it in Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.kda import triton_carry, triton_ring, triton_square, triton_tile
from k3stack.kernels.kda.layout import SUB, ChunkTiles
from k3stack.kernels.kda.triton import L2_EPS


@dataclass(frozen=True, slots=True)
class Rooms:
    """What passes between the kernels, for all tiles and heads [tiles, heads, ...]: in the inputs' dtype, then fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    """beta v; later the corrected values."""
    w: Tensor
    """beta k exp(c) before M is multiplied by it."""
    u: Tensor
    decayed_q: Tensor
    decayed_k: Tensor
    qk: Tensor
    kept: Tensor
    """States before each tile."""
    decay: Tensor
    """The running sum c of a tile's log decay, to base 2."""
    beta: Tensor
    fade: Tensor
    a: Tensor

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, f.name).nbytes for f in fields(self))


WARPS = {"prepare": 4, "inside": 4, "square": 4, "halved": 4, "invert": 1, "solve": 4, "carry": 4, "output": 4}
"""Of each kernel."""
REGISTERS = 128
"""Most of a thread: four programs of four warps then share a multiprocessor."""
SOLVE_NARROW = 8
"""Warps that solve tiles of heads under 64 wide: with four, ptxas 12.8 takes wrong registers for an operand's place."""
CARRY_STAGES = 3
WIDTH = 128
"""Heads' width that the kernels in Gluon are for."""
KEPT_BYTES = 256 << 20
"""Most bytes of rooms that stay from one layer to the next: with more of them, the host has time to ask again."""
PROGRAMS = 264
"""Programs that fill the device, two a multiprocessor."""
FACTOR_LIMIT = 84.0
"""Largest decay (nats) over a sub-chunk that is split into factors at its middle."""


def state_columns(states: int, width: int) -> int:
    """Columns of a state that one program carries: few while there are too few states to fill the device."""
    return min(16 if states * (width // 16) <= PROGRAMS else 64, width)


def chunks(
    raw: Tensor,
    f: Tensor,
    gate: Tensor,
    b: Tensor,
    conv: Tensor,
    exp_a: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    windows: Tensor,
    states: Tensor,
    tiles: ChunkTiles,
    lower_bound: float | None,
    eps: float,
    out: Tensor,
) -> None:
    """Chunks of many sequences, from the projections to the gated norm's output; states and windows in place.

    raw [T, 3 P], f [T, P] (before dt_bias), gate [T, P], b [T, H] (rows may lie apart), conv [taps, 3 P], exp_a [H],
    dt_bias [P], norm [K] fp32, windows [blocks, taps - 1, 3 P], states [blocks, H, K, K] -> rows of ``out`` [T, P] of
    the tokens that ``tiles`` names; the others stay.
    """
    heads, k = b.shape[1], states.shape[2]
    n = tiles.tiles
    factored = lower_bound is not None and -lower_bound * SUB <= FACTOR_LIMIT
    rooms = rooms_for(tiles, heads, k, raw)
    sizes: dict[str, Any] = {"K": k, "C": tiles.tile}
    precision = {"PRECISION": "ieee" if raw.dtype == torch.float32 else "tf32"}
    start.launch(
        triton_tile.prepare_kernel,
        (n, heads, 4),
        *(raw, f, b, conv, exp_a, dt_bias, windows, tiles.per_tile),
        *(rooms.q, rooms.k, rooms.v, rooms.decay, rooms.beta),
        *(raw.stride(0), f.stride(0), b.stride(0), windows.stride(0), heads * k, n, k**-0.5),
        *(0.0 if lower_bound is None else lower_bound, L2_EPS),
        **sizes,
        TAPS=conv.shape[0],
        BOUNDED=lower_bound is not None,
        RUN=max(tiles.tile * k // 1024, 1),
        num_warps=WARPS["prepare"],
        maxnreg=REGISTERS,
    )
    _within(rooms, sizes | precision, factored=factored)
    _solve(rooms, sizes | precision)
    _carry(rooms, states, tiles, sizes, precision)
    taps = conv.shape[0]
    start.launch(
        triton_tile.output_kernel,
        (n, heads),
        *(rooms.decayed_q, rooms.qk, rooms.kept, rooms.v, gate, norm, tiles.per_tile, out, raw, windows),
        *(gate.stride(0), out.stride(0), raw.stride(0), windows.stride(0), heads * k, n, eps),
        **sizes,
        SUB=SUB,
        TAPS=taps,
        ROWS=start.next_power_of_two(taps),
        **precision,
        num_warps=WARPS["output"],
    )


def rooms_for(tiles: ChunkTiles, heads: int, k: int, raw: Tensor) -> Rooms:
    """Uninitialised; those of the layer before, where they are few enough to be kept: all kernels come one by one."""
    name = ("kda rooms", heads, k, raw.dtype)
    if name in tiles.kept:
        kept: Rooms = tiles.kept[name]
        return kept
    n, c = tiles.tiles, tiles.tile

    def room(*shape: int, dtype: torch.dtype = raw.dtype) -> Tensor:
        return torch.empty(n, heads, *shape, dtype=dtype, device=raw.device)

    def wide(*shape: int) -> Tensor:
        return room(*shape, dtype=torch.float32)

    same = (room(c, k) for _ in range(7))
    rooms = Rooms(*same, room(c, c), room(k, k), wide(c, k), wide(c), wide(k), wide(c, c))
    if rooms.nbytes <= KEPT_BYTES:
        tiles.kept[name] = rooms
    return rooms


def _within(r: Rooms, constants: dict[str, Any], *, factored: bool) -> None:
    """What needs no state: from q, k, v, c, beta of all tiles to q k^T, the decayed q and k, exp(c_C)."""
    (n, heads), k, c = r.q.shape[:2], constants["K"], constants["C"]
    operands = r.q, r.k, r.decay, r.beta, r.a, r.qk, r.decayed_q, r.decayed_k, r.w, r.fade
    if _for_hopper(r):
        start.launch(
            triton_square.square_kernel,
            (4, n, heads),
            *operands,
            K=k,
            C=c,
            SUB=SUB,
            FACTORED=factored,
            num_warps=WARPS["square"],
        )
        return
    start.launch(
        triton_tile.inside_kernel if factored else triton_tile.halved_kernel,
        (4, n, heads) if factored else (n, heads),
        *operands,
        **constants,
        **({"SUB": SUB} if factored else {"LEVELS": c.bit_length() - 1}),
        num_warps=WARPS["inside" if factored else "halved"],
        num_stages=1,
    )


def _solve(r: Rooms, constants: dict[str, Any]) -> None:
    """The inverse of I + A, w and u."""
    grid, c = r.q.shape[:2], constants["C"]
    start.launch(triton_tile.invert_kernel, (*grid, c // SUB), r.a, C=c, SUB=SUB, num_warps=WARPS["invert"])
    start.launch(
        triton_tile.solve_kernel,
        (*grid,),
        *(r.a, r.w, r.v, r.u),
        **constants,
        SUB=SUB,
        num_warps=WARPS["solve"] if constants["K"] >= 64 else SOLVE_NARROW,
    )


def _carry(r: Rooms, states: Tensor, tiles: ChunkTiles, sizes: dict[str, Any], precision: dict[str, Any]) -> None:
    """The states from tile to tile. The values have been used up: their room takes the corrected ones.

    The ring is for few states, which leave most of the device idle and take as long as the chain of their tiles. Of the
    plain kernel's programs a multiprocessor has several at once.
    """
    sequences, (heads, k) = tiles.per_sequence.shape[1], states.shape[1:3]
    operands = r.w, r.u, r.decayed_k, r.fade, states, tiles.per_sequence, r.kept, r.v
    if _for_hopper(r) and triton_ring.fits(sequences, heads, k):
        triton_ring.carry(*operands)
        return
    values = state_columns(sequences * heads, k)
    start.launch(
        triton_carry.carry_kernel,
        (sequences, heads, k // values),
        *(*operands, sequences, states.stride(0)),
        **sizes,
        VALUES=values,
        **precision,
        num_warps=WARPS["carry"],
        num_stages=CARRY_STAGES,
    )


def _for_hopper(r: Rooms) -> bool:
    """Whether the kernels in Gluon take them. Other widths and float32 are for those in Triton, as is its interpreter,
    which has no Gluon."""
    return r.q.shape[-1] == WIDTH and r.q.dtype != torch.float32 and not start.INTERPRETED
