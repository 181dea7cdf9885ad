"""MXFP4 experts of a decode step: programs draw units of work.

The arithmetic is ``triton_decode``'s. There each expert has programs of its own; where these are little more than a
multiprocessor has room for, the last ones run nearly alone. Here a strip or two of an expert in use are a unit, and a
program draws its next ones while it works; four warps share the columns of a unit, so that units are short, and the
next unit's first tiles are on their way before the last one's end. A single token's choices are weighed and added up in
the second kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.activation.triton import glu
from k3stack.kernels.launch import await_inputs
from k3stack.kernels.moe.triton_decode import STAGE_BYTES, TILE, room_of, words_of
from k3stack.kernels.moe.triton_group import GROUPED, bits_set, in_use, place_of
from k3stack.kernels.moe.triton_strips import (
    adding,
    begin_unit,
    draw,
    place_of_sum,
    publish,
    published,
    sums_of_unit,
    together,
)
from k3stack.kernels.mxfp4.tiles import COLUMNS
from k3stack.kernels.mxfp4.triton import SHIFT
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

MULTIPROCESSORS = 132
STATIC = 48 << 10
"""Bytes of shared memory that a program may have without asking for them at its start."""
NOTES = 16
"""Of these, for the numbers of units drawn."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of one program: ``columns`` warps (2, 4 or 8) share the columns of the same rows, ``rows`` times over, each
    with room for ``stages`` tiles of two strips in shared memory; a thread has at most so many ``registers``, and
    ``programs`` share a multiprocessor."""

    columns: int
    rows: int
    stages: int
    registers: int | None = None
    programs: int = 4


ONE, SOME = Share(4, 1, 4, 128), Share(4, 1, 3, 128)
"""For both products, of one token and of more (``benchmarks.tiles``)."""


@triton.jit
def _share(lists, counts, experts, per, TOPK: tl.constexpr, KEPT: tl.constexpr, LONE: tl.constexpr):
    """This program's first unit, of which each expert in use has ``per``, how far the next one is, and the end of all;
    then what ``_expert`` wants to know. LONE: of one token, ``lists`` are its choices and ``counts`` is the first
    expert here; a program has the same unit of all. Else it draws all but its first two."""
    p = tl.program_id(0)
    if LONE:
        j = tl.arange(0, KEPT)
        chosen = (tl.load(lists + j, mask=j < TOPK, other=0) - counts).to(tl.int32)
        here = ((chosen >= 0) & (chosen < experts) & (j < TOPK)).to(tl.int32)
        return p, per, tl.sum(here, 0) * per, chosen, tl.cumsum(here, 0) * here
    else:
        return p, tl.num_programs(0), tl.load(counts + experts) * per, 0, 0


@triton.jit
def _first_share(ids, first, total, experts, per, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """``_share`` and the first unit's expert, by the choices themselves: their lists are being made."""
    low, high = in_use(ids, first, total, experts, BLOCK, WORDS)
    few = bits_set(low)
    p = tl.program_id(0)
    i = p // per
    expert = place_of(low, i)
    if WORDS == 2:
        expert = tl.where(i < few, expert, 32 + place_of(high, i - few))
    return p, tl.num_programs(0), (few + bits_set(high)) * per, expert


@triton.jit
def _expert(i, more, counts, experts, chosen, order, KEPT: tl.constexpr, LONE: tl.constexpr):
    """The ``i``-th expert in use (any, where there are no ``more``), how many tokens it has, and LONE's choice."""
    if LONE:
        mine = order == i + 1
        return tl.sum(tl.where(mine, chosen, 0), 0), 1, tl.sum(tl.where(mine, tl.arange(0, KEPT), 0), 0)
    else:
        expert = tl.load(counts + experts + 1 + i, mask=more, other=0)
        return expert, tl.load(counts + expert), 0


@triton.jit
def _choices(lists, at, choice, LONE: tl.constexpr):
    """Which choices are in an expert's list at ``at``."""
    if LONE:
        return at * 0 + choice
    else:
        return tl.load(lists + at)


@triton.jit
def _in_turn(c):
    """Where column ``c`` is for the second product: of 128 columns, the first eight of each 32, then the second."""
    return (c & -128) | (c & 24) << 2 | (c & 96) >> 2 | (c & 7)


@triton.jit
def _in_kernel(
    x, packed, scale, lists, counts, ids, first, total, out, x_row, width, inner, capacity, experts,
    beta, linear_beta, factor, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    TOPK: tl.constexpr, KEPT: tl.constexpr, SITU: tl.constexpr, LONE: tl.constexpr, UNITS: tl.constexpr,
    KW: tl.constexpr, RW: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, ROOM: tl.constexpr, ADD: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 RW inner columns (gate and up, then the activation) of an expert's tokens, 8 at a time, are a unit. But for
    LONE the first weights are on their way before the lists are there."""
    if LONE:
        await_inputs(PDL)
        u, by, end, chosen, order = _share(lists, counts, experts, UNITS, TOPK, KEPT, LONE)
        expert, count, choice = _expert(u // UNITS, u < end, counts, experts, chosen, order, KEPT, LONE)
    else:
        u, by, end, expert = _first_share(ids, first, total, experts, UNITS, BLOCK, WORDS)
        chosen = 0
        order = 0
    tiles = width // 128
    gap = inner // 16 * tiles
    thread = tl.arange(0, 32 * KW * RW)
    row = thread // 32 // KW
    room = room_of(tl.program_id(0), ROOM, ASM)
    place = room + thread // 32 * (STAGES * STAGE_BYTES)
    scratch = room + KW * RW * STAGES * STAGE_BYTES
    note = scratch + KW * RW * 1024
    tile = (expert * (inner // 8) + u % UNITS * RW + row) * tiles + thread // 32 % KW
    begin_unit(place, packed, scale, tile, gap, tiles, u < end, thread, KW, ASM, STAGES)
    if not LONE:
        await_inputs(PDL)
        count = tl.load(counts + expert, mask=u < end, other=0)
        choice = 0
    v = u + by
    turn = 0
    slot = 0
    m0 = 0
    while u < end:
        again = m0 + 8 < count
        next_u = tl.where(again, u, v)
        more = next_u < end
        drawn = 0 if LONE else draw(counts + 2 * experts + 1, again == 0, ASM)
        next_expert, next_count, next_choice = _expert(
            next_u // UNITS, more, counts, experts, chosen, order, KEPT, LONE
        )
        after = (next_expert * (inner // 8) + next_u % UNITS * RW + row) * tiles + thread // 32 % KW
        own = lists + expert.to(tl.int64) * capacity
        at = m0 + thread % 32 // 4
        pair = _choices(own, tl.minimum(at, count - 1), choice, LONE)
        c, d, slot = sums_of_unit(
            x + (pair // TOPK).to(tl.int64) * x_row, at < count, packed, scale, tile, gap, tiles, after, more, place,
            slot, thread, KW, KW * RW, EVEN, ASM, STAGES, False,
        )  # fmt: skip
        if not LONE:
            publish(note + turn * 4, drawn, ASM)
        c, d = together(c, d, scratch, thread, KW, RW, ASM, ADD)
        w = v + by if LONE else 2 * by + published(note + turn * 4, drawn, ASM)
        v = tl.where(again, v, w)
        turn = 1 - turn
        for j in tl.static_range(len(c)):
            # Rounded as the reference does.
            gate = (c[j] * factor).to(DTYPE).to(tl.float32)
            y = glu(gate, (d[j] * factor).to(DTYPE).to(tl.float32), beta, linear_beta, SITU)
            n, token, mine = place_of_sum(thread, j, KW)
            token += m0
            to = _choices(own, tl.minimum(token, count - 1), choice, LONE).to(tl.int64) * inner
            to += _in_turn((u % UNITS * RW + row) * 16 + n)
            tl.store(out + to, y.to(out.dtype.element_ty), mask=(token < count) & mine)
        m0 = tl.where(again, m0 + 8, 0)
        u, expert, count, choice, tile = next_u, next_expert, next_count, next_choice, after


@triton.jit
def _plus(totals, J: tl.constexpr, more):
    """Add to the ``J``-th of four."""
    if J == 0:
        return totals[0] + more, totals[1], totals[2], totals[3]
    elif J == 1:
        return totals[0], totals[1] + more, totals[2], totals[3]
    elif J == 2:
        return totals[0], totals[1], totals[2] + more, totals[3]
    else:
        return totals[0], totals[1], totals[2], totals[3] + more


@triton.jit
def _out_kernel(
    x, packed, scale, lists, counts, weights, out, inner, width, capacity, experts, factor,
    TOPK: tl.constexpr, KEPT: tl.constexpr, LONE: tl.constexpr, UNITS: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, ROOM: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """32 RW columns of the down product of an expert's tokens, 8 at a time, are a unit; LONE: of all its choices here,
    weighed and added up. The first weights are on their way before the activations are waited for: who chose which
    expert was known before the kernel that these come from."""
    u, by, end, chosen, order = _share(lists, counts, experts, UNITS, TOPK, KEPT, LONE)
    expert, count, choice = _expert(u // UNITS, u < end, counts, experts, chosen, order, KEPT, LONE)
    tiles = inner // 128
    thread = tl.arange(0, 32 * KW * RW)
    row = thread // 32 // KW
    room = room_of(tl.program_id(0), ROOM, ASM)
    place = room + thread // 32 * (STAGES * STAGE_BYTES)
    scratch = room + KW * RW * STAGES * STAGE_BYTES
    note = scratch + KW * RW * 1024
    tile = (expert * (width // 16) + (u % UNITS * RW + row) * 2) * tiles + thread // 32 % KW
    begin_unit(place, packed, scale, tile, tiles, tiles, u < end, thread, KW, ASM, STAGES)
    share = tl.load(weights + choice) if LONE else 0.0
    await_inputs(PDL)
    zero = thread.to(tl.float32) * 0.0
    total_a = (zero, zero, zero, zero)
    total_b = (zero, zero, zero, zero)
    v = u + by
    turn = 0
    slot = 0
    m0 = 0
    while u < end:
        again = m0 + 8 < count
        next_u = tl.where(again, u, v)
        more = next_u < end
        drawn = 0 if LONE else draw(counts + 2 * experts + 2, again == 0, ASM)
        next_expert, next_count, next_choice = _expert(
            next_u // UNITS, more, counts, experts, chosen, order, KEPT, LONE
        )
        after = (next_expert * (width // 16) + (next_u % UNITS * RW + row) * 2) * tiles + thread // 32 % KW
        next_share = tl.load(weights + next_choice) if LONE else 0.0
        own = lists + expert.to(tl.int64) * capacity
        at = m0 + thread % 32 // 4
        pair = _choices(own, tl.minimum(at, count - 1), choice, LONE)
        c, d, slot = sums_of_unit(
            x + pair.to(tl.int64) * (inner // 2), at < count, packed, scale, tile, tiles, tiles, after, more, place,
            slot, thread, KW, KW * RW, EVEN, ASM, STAGES, True,
        )  # fmt: skip
        if not LONE:
            publish(note + turn * 4, drawn, ASM)
        c, d = together(c, d, scratch, thread, KW, RW, ASM, ADD)
        w = v + by if LONE else 2 * by + published(note + turn * 4, drawn, ASM)
        v = tl.where(again, v, w)
        turn = 1 - turn
        for j in tl.static_range(len(c)):
            n, token, mine = place_of_sum(thread, j, KW)
            token += m0
            a = (c[j] * factor).to(out.dtype.element_ty)
            b = (d[j] * factor).to(out.dtype.element_ty)
            if LONE:
                total_a = _plus(total_a, j, share * a.to(tl.float32))
                total_b = _plus(total_b, j, share * b.to(tl.float32))
            else:
                to = _choices(own, tl.minimum(token, count - 1), choice, LONE).to(tl.int64) * width
                to += (u % UNITS * RW + row) * 32 + n
                tl.store(out + to, a, mask=(token < count) & mine)
                tl.store(out + to + 16, b, mask=(token < count) & mine)
        if LONE:
            share = next_share
        m0 = tl.where(again, m0 + 8, 0)
        u, expert, count, choice, tile = next_u, next_expert, next_count, next_choice, after
    if LONE:
        for j in tl.static_range(4 // KW if KW < 4 else 1):
            n, token, mine = place_of_sum(thread, j, KW)
            to = out + (tl.program_id(0) * RW + row) * 32 + n
            tl.store(to, total_a[j].to(out.dtype.element_ty), mask=(token == 0) & mine)
            tl.store(to + 16, total_b[j].to(out.dtype.element_ty), mask=(token == 0) & mine)


def results(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    groups: tuple[Tensor, Tensor],
    choices: tuple[Tensor, int],
    share: Share = SOME,
    *,
    asm: bool = True,
) -> Tensor:
    """Each choice's expert output [T top_k, L] in bfloat16; choices of experts elsewhere are left unwritten.

    x bfloat16 [T, L] (rows may lie apart); weights in tiles of at most HELD experts; groups: of ``triton_group.group``,
    with the experts in use, whose kernel came just before; choices: the ids int64 [T, top_k] that it was given, and the
    first expert here. Strips that are no multiple of a program's are an error. ``asm`` False: the same arithmetic
    without inline assembly (Triton's interpreter has none).
    """
    out = torch.empty(choices[0].numel(), x.shape[1], dtype=x.dtype, device=x.device)
    _products(x, w13, w2, activation, groups, choices, out, share, asm)
    return out


def result_of_one(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    choices: tuple[Tensor, Tensor, int],
    share: Share = ONE,
    *,
    asm: bool = True,
) -> Tensor:
    """The weighted sum [1, L] of one token's choices that are here. choices: ids int64 and weights fp32 [1, top_k], and
    the first expert here; the rest as ``results`` has it."""
    out = torch.empty(1, x.shape[1], dtype=x.dtype, device=x.device)
    ids, weights, first = choices
    _products(x, w13, w2, activation, weights, (ids, first), out, share, asm)
    return out


def _products(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    groups: tuple[Tensor, Tensor] | Tensor,
    choices: tuple[Tensor, int],
    out: Tensor,
    share: Share,
    asm: bool,
) -> None:
    """Both products into ``out``. groups: lists and counts, or the weights of a single token's choices."""
    (ids, first), width = choices, x.shape[1]
    count, double, _ = w13.shape
    inner, top_k, lone = double // 2, ids.shape[1], isinstance(groups, Tensor)
    hidden = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    # Two activations to a word.
    pairs = x.view(torch.int32)
    factor = 2.0**SHIFT.value
    lists, counts, weights = (ids, first, groups) if isinstance(groups, Tensor) else (*groups, groups[1])
    common = {"TOPK": top_k, "KEPT": triton.next_power_of_2(top_k), "LONE": lone}
    programs = share.programs * MULTIPROCESSORS
    start.launch(
        _in_kernel,
        (inner // (TILE * share.rows) if lone else programs,),
        *(pairs, *words_of(w13), lists, counts, ids, first, ids.numel(), hidden, pairs.stride(0), width),
        *(inner, lists.shape[1], count, activation.beta, activation.linear_beta, factor),
        BLOCK=min(GROUPED, triton.next_power_of_2(ids.numel())),
        WORDS=1 if count <= 32 else 2,
        SITU=activation.kind == "situ",
        UNITS=inner // (TILE * share.rows),
        **common,
        **_options(share, width, asm),
        DTYPE=tl.bfloat16,
    )
    start.launch(
        _out_kernel,
        (width // (2 * TILE * share.rows) if lone else programs,),
        *(hidden.view(torch.int32), *words_of(w2), lists, counts, weights, out, inner, width),
        *(lists.shape[1], count, factor),
        UNITS=width // (2 * TILE * share.rows),
        **common,
        **_options(share, inner, asm),
    )


def _options(share: Share, width: int, asm: bool) -> dict[str, Any]:
    warps = share.columns * share.rows
    scratch = 32 * 32 * warps + NOTES
    # A unit's first tiles are copied while the unit before it is under way, no further ahead.
    stages = min(share.stages, triton.cdiv(width, COLUMNS * share.columns))
    stages = min(stages, (STATIC - scratch) // (warps * STAGE_BYTES.value))
    room = warps * stages * STAGE_BYTES.value + scratch
    return {
        "KW": share.columns,
        "RW": share.rows,
        "EVEN": width % (COLUMNS * share.columns) == 0,
        "ASM": asm,
        "ROOM": f"{{ .shared .align 128 .b8 tiles[{room}]; mov.u32 $0, tiles; }}",
        "ADD": adding(share.columns, share.rows),
        "STAGES": stages,
        "num_warps": warps,
        "maxnreg": share.registers,
    }
