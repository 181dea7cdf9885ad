"""MXFP4 experts of a decode step of which few are in use: programs share out the work in equal parts.

The arithmetic is ``triton_decode``'s. There each expert has programs of its own; where these are little more than a
multiprocessor has room for, the last ones run nearly alone. Here the strips of all experts in use, one expert's after
the other's, are units, of which each program has its part; four warps share the columns of a unit, so that units are
short, and the next unit's first tiles are on their way before the last one's end. A single token's choices are weighed
and added up in the second kernel.
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
from k3stack.kernels.moe.triton_decode import _STAGE, TILE, _activations, _copy, _four, _room, _take, _tile
from k3stack.kernels.mxfp4.tiles import COLUMNS
from k3stack.kernels.mxfp4.triton import SHIFT
from k3stack.kernels.mxfp4.weight import Mxfp4Weight

MULTIPROCESSORS = 132
STATIC = 48 << 10
"""Bytes of shared memory that a program may have without asking for them at its start."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of one program: ``columns`` warps (1, 2, 4 or 8) share the columns of the same rows, ``rows`` times over, each
    with room for ``stages`` tiles of two strips in shared memory; a thread has at most so many ``registers``, and
    ``programs`` share a multiprocessor."""

    columns: int
    rows: int
    stages: int
    registers: int | None = None
    programs: int = 4


BEST = Share(4, 1, 4, 128)
"""For both products, one token or few (``benchmarks.tiles``)."""


@triton.jit
def _ahead(place, packed, scale, tile, gap, live, lane):
    """Start copying a thread's part of two tiles, ``gap`` apart, to ``place`` in shared memory, where ``live``."""
    # Copies are of four bytes at least: a thread's two scales and its neighbour's.
    pair = lane // 2 * 2
    a = tile.to(tl.int64)
    b = (tile + gap).to(tl.int64)
    codes = packed + (a * 256 + lane * 4), packed + (b * 256 + lane * 4)
    scales = scale + (a * 32 + pair), scale + (b * 32 + pair)
    _copy(place, codes[0], codes[1], scales[0], scales[1], live, lane)


@triton.jit
def _begin(
    place, packed, scale, tile, gap, tiles, live, thread, KW: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr
):
    """Start copying the first tiles of a unit's strips."""
    if ASM:
        for i in tl.static_range(STAGES):
            inside = live & (thread // 32 % KW + i * KW < tiles)
            _ahead(place + i * _STAGE, packed, scale, tile + i * KW, gap, inside, thread % 32)


@triton.jit
def _sums(
    x, packed, scale, tile, gap, tiles, after, more, place, slot, thread,
    KW: tl.constexpr, PER: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A thread's sums over its warp's tiles of two strips, times tokens; then the next slot. x: int32 pointers to the
    thread's token; tile: the warp's first of one strip, ``gap`` before that of the other; after: the same of the next
    unit, if there are ``more``, whose first tiles are on their way at the end; place: the warp's room, where the first
    tiles are at ``slot``."""
    kw = thread // 32 % KW
    lane = thread % 32
    zero = thread.to(tl.float32) * 0.0
    c = (zero, zero, zero, zero)
    d = (zero, zero, zero, zero)
    x += thread % 4 * 16
    all_of_them = tl.cdiv(tiles, KW) * KW
    # Activations are asked for a step before they are needed.
    values = _activations(x + tl.minimum(kw, tiles - 1) * 64, ASM)
    for step in tl.range(0, tiles, KW):
        now = step + kw
        live = now < tiles
        if not EVEN:
            now = tl.minimum(now, tiles - 1)
        if ASM:
            w = _take(place + slot * _STAGE, lane, STAGES - 1)
            of_a = w[16] >> (lane % 2 * 16)
            of_b = w[17] >> (lane % 2 * 16)
        else:
            a = (tile + now - kw).to(tl.int64)
            b = (tile + now - kw + gap).to(tl.int64)
            codes = packed + a * 256 + lane * 4
            w = _four(codes, 0) + _four(codes, 128) + _four(codes + gap * 256, 0) + _four(codes + gap * 256, 128)
            of_a = tl.load(scale + a * 32 + lane).to(tl.int32)
            of_b = tl.load(scale + b * 32 + lane).to(tl.int32)
        coming = _activations(x + tl.minimum(now + KW, tiles - 1) * 64, ASM)
        c = _tile(w, 0, of_a, live, values, c, PER, EVEN, ASM)
        d = _tile(w, 8, of_b, live, values, d, PER, EVEN, ASM)
        if ASM:
            ahead = step + STAGES * KW
            over = ahead >= all_of_them
            ahead = tl.where(over, ahead - all_of_them, ahead)
            inside = (ahead + kw < tiles) & (more | (ahead > step))
            _ahead(place + slot * _STAGE, packed, scale, tl.where(over, after, tile) + ahead, gap, inside, lane)
            slot = tl.where(slot == STAGES - 1, 0, slot + 1)
        values = coming
    return c, d, slot


@triton.jit
def _alike(v, KW: tl.constexpr, RW: tl.constexpr):
    """Sums of the warps that share rows."""
    total = tl.sum(tl.reshape(v, [RW, KW, 32]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], [RW, KW, 32]), [RW * KW * 32])


@triton.jit
def _of_four(v, i):
    return tl.where(i == 0, v[0], tl.where(i == 1, v[1], tl.where(i == 2, v[2], v[3])))


@triton.jit
def _together(c, d, room, thread, KW: tl.constexpr, RW: tl.constexpr, ASM: tl.constexpr, ADD: tl.constexpr):
    """Sums of the warps that share rows: of each strip as many of a thread's four as ``_place`` says."""
    kw = thread // 32 % KW
    if KW == 1:
        return c, d
    elif ASM:
        to = room + thread * 4
        own = room + (kw % 4 * (KW * RW * 32) + thread // (32 * KW) * (32 * KW) + thread % 32) * 4
        if KW == 2:
            a, b, e, f = tl.inline_asm_elementwise(
                ADD, "=&f,=&f,=&f,=&f,r,r,f,f,f,f,f,f,f,f",
                [to, own, c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]],
                dtype=(tl.float32,) * 4, is_pure=False, pack=1,
            )  # fmt: skip
            return (a, b), (e, f)
        else:
            a, b = tl.inline_asm_elementwise(
                ADD, "=&f,=&f,r,r,f,f,f,f,f,f,f,f",
                [to, own, c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]],
                dtype=(tl.float32,) * 2, is_pure=False, pack=1,
            )  # fmt: skip
            return (a,), (b,)
    else:
        c = (_alike(c[0], KW, RW), _alike(c[1], KW, RW), _alike(c[2], KW, RW), _alike(c[3], KW, RW))
        d = (_alike(d[0], KW, RW), _alike(d[1], KW, RW), _alike(d[2], KW, RW), _alike(d[3], KW, RW))
        if KW == 2:
            return (_of_four(c, kw), _of_four(c, kw + 2)), (_of_four(d, kw), _of_four(d, kw + 2))
        else:
            return (_of_four(c, kw % 4),), (_of_four(d, kw % 4),)


@triton.jit
def _place(thread, J: tl.constexpr, KW: tl.constexpr):
    """Of a thread's ``J``-th sums of ``_together``: row of the strip, token of the eight, and whether it is to store
    them (other warps have the same where more than four share rows)."""
    i = thread // 32 % KW % 4 + J * KW
    return thread % 32 // 4 + i // 2 * 8, thread % 4 * 2 + i % 2, thread // 32 % KW < 4


@triton.jit
def _share(lists, counts, experts, per, TOPK: tl.constexpr, KEPT: tl.constexpr, LONE: tl.constexpr, M: tl.constexpr):
    """This program's units, of which each expert in use has ``per``: the first, the end, and how far apart they are;
    then what ``_expert`` wants to know. LONE: of one token, ``lists`` are its choices and ``counts`` is the first
    expert here; a program has the same unit of all."""
    p = tl.program_id(0)
    if LONE:
        j = tl.arange(0, KEPT)
        chosen = (tl.load(lists + j, mask=j < TOPK, other=0) - counts).to(tl.int32)
        here = ((chosen >= 0) & (chosen < experts) & (j < TOPK)).to(tl.int32)
        return p, tl.sum(here, 0) * per, per, chosen, tl.cumsum(here, 0) * here
    else:
        # Programs that are M apart share a multiprocessor: their work is the same part of all.
        units = tl.load(counts + experts) * per
        programs = tl.num_programs(0)
        p = p % M * (programs // M) + p // M
        return p * units // programs, (p + 1) * units // programs, 1, 0, 0


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
def _in_kernel(
    x, packed, scale, lists, counts, out, x_row, width, inner, capacity, experts, beta, linear_beta, factor,
    TOPK: tl.constexpr, KEPT: tl.constexpr, SITU: tl.constexpr, LONE: tl.constexpr, KW: tl.constexpr,
    RW: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, ROOM: tl.constexpr, ADD: tl.constexpr,
    STAGES: tl.constexpr, M: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 RW inner columns (gate and up, then the activation) of an expert's tokens, 8 at a time, are a unit."""
    await_inputs(PDL)
    per = inner // (16 * RW)
    u, end, by, chosen, order = _share(lists, counts, experts, per, TOPK, KEPT, LONE, M)
    expert, count, choice = _expert(u // per, u < end, counts, experts, chosen, order, KEPT, LONE)
    tiles = width // 128
    gap = inner // 16 * tiles
    thread = tl.arange(0, 32 * KW * RW)
    row = thread // 32 // KW
    room = _room(thread, ROOM, ASM)
    place = room + thread // 32 * (STAGES * _STAGE)
    scratch = room + KW * RW * STAGES * _STAGE
    tile = (expert * (inner // 8) + u % per * RW + row) * tiles + thread // 32 % KW
    _begin(place, packed, scale, tile, gap, tiles, u < end, thread, KW, ASM, STAGES)
    slot = 0
    m0 = 0
    while u < end:
        again = m0 + 8 < count
        next_u = tl.where(again, u, u + by)
        more = next_u < end
        next_expert, next_count, next_choice = _expert(next_u // per, more, counts, experts, chosen, order, KEPT, LONE)
        after = (next_expert * (inner // 8) + next_u % per * RW + row) * tiles + thread // 32 % KW
        own = lists + expert.to(tl.int64) * capacity
        pair = _choices(own, tl.minimum(m0 + thread % 32 // 4, count - 1), choice, LONE)
        c, d, slot = _sums(
            x + (pair // TOPK).to(tl.int64) * x_row, packed, scale, tile, gap, tiles, after, more, place, slot, thread,
            KW, KW * RW, EVEN, ASM, STAGES,
        )  # fmt: skip
        c, d = _together(c, d, scratch, thread, KW, RW, ASM, ADD)
        for j in tl.static_range(len(c)):
            # Rounded as the reference does.
            gate = (c[j] * factor).to(DTYPE).to(tl.float32)
            y = glu(gate, (d[j] * factor).to(DTYPE).to(tl.float32), beta, linear_beta, SITU)
            n, token, mine = _place(thread, j, KW)
            token += m0
            to = _choices(own, tl.minimum(token, count - 1), choice, LONE).to(tl.int64) * inner
            to += (u % per * RW + row) * 16 + n
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
    TOPK: tl.constexpr, KEPT: tl.constexpr, LONE: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, ROOM: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr,
    M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """32 RW columns of the down product of an expert's tokens, 8 at a time, are a unit; LONE: of all its choices here,
    weighed and added up. The first weights are on their way before the activations are waited for: who chose which
    expert was known before the kernel that these come from."""
    per = width // (32 * RW)
    u, end, by, chosen, order = _share(lists, counts, experts, per, TOPK, KEPT, LONE, M)
    expert, count, choice = _expert(u // per, u < end, counts, experts, chosen, order, KEPT, LONE)
    tiles = inner // 128
    thread = tl.arange(0, 32 * KW * RW)
    row = thread // 32 // KW
    room = _room(thread, ROOM, ASM)
    place = room + thread // 32 * (STAGES * _STAGE)
    scratch = room + KW * RW * STAGES * _STAGE
    tile = (expert * (width // 16) + (u % per * RW + row) * 2) * tiles + thread // 32 % KW
    _begin(place, packed, scale, tile, tiles, tiles, u < end, thread, KW, ASM, STAGES)
    share = tl.load(weights + choice) if LONE else 0.0
    await_inputs(PDL)
    zero = thread.to(tl.float32) * 0.0
    total_a = (zero, zero, zero, zero)
    total_b = (zero, zero, zero, zero)
    slot = 0
    m0 = 0
    while u < end:
        again = m0 + 8 < count
        next_u = tl.where(again, u, u + by)
        more = next_u < end
        next_expert, next_count, next_choice = _expert(next_u // per, more, counts, experts, chosen, order, KEPT, LONE)
        after = (next_expert * (width // 16) + (next_u % per * RW + row) * 2) * tiles + thread // 32 % KW
        next_share = tl.load(weights + next_choice) if LONE else 0.0
        own = lists + expert.to(tl.int64) * capacity
        pair = _choices(own, tl.minimum(m0 + thread % 32 // 4, count - 1), choice, LONE)
        c, d, slot = _sums(
            x + pair.to(tl.int64) * (inner // 2), packed, scale, tile, tiles, tiles, after, more, place, slot, thread,
            KW, KW * RW, EVEN, ASM, STAGES,
        )  # fmt: skip
        c, d = _together(c, d, scratch, thread, KW, RW, ASM, ADD)
        for j in tl.static_range(len(c)):
            n, token, mine = _place(thread, j, KW)
            token += m0
            a = (c[j] * factor).to(out.dtype.element_ty)
            b = (d[j] * factor).to(out.dtype.element_ty)
            if LONE:
                total_a = _plus(total_a, j, share * a.to(tl.float32))
                total_b = _plus(total_b, j, share * b.to(tl.float32))
            else:
                to = _choices(own, tl.minimum(token, count - 1), choice, LONE).to(tl.int64) * width
                to += (u % per * RW + row) * 32 + n
                tl.store(out + to, a, mask=(token < count) & mine)
                tl.store(out + to + 16, b, mask=(token < count) & mine)
        if LONE:
            share = next_share
        m0 = tl.where(again, m0 + 8, 0)
        u, expert, count, choice, tile = next_u, next_expert, next_count, next_choice, after
    if LONE:
        for j in tl.static_range(4 // KW if KW < 4 else 1):
            n, token, mine = _place(thread, j, KW)
            to = out + (tl.program_id(0) * RW + row) * 32 + n
            tl.store(to, total_a[j].to(out.dtype.element_ty), mask=(token == 0) & mine)
            tl.store(to + 16, total_b[j].to(out.dtype.element_ty), mask=(token == 0) & mine)


def results(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    groups: tuple[Tensor, Tensor],
    top_k: int,
    share: Share = BEST,
    *,
    asm: bool = True,
) -> Tensor:
    """Each choice's expert output [T top_k, L] in bfloat16; choices of experts elsewhere are left unwritten.

    x bfloat16 [T, L] (rows may lie apart); weights in tiles; groups: of ``triton.group``, with the experts in use.
    Strips that are no multiple of a program's are an error. ``asm`` False: the same arithmetic without inline assembly
    (Triton's interpreter has none).
    """
    out = torch.empty(x.shape[0] * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    _products(x, w13, w2, activation, groups, out, top_k, share, asm)
    return out


def result_of_one(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    choices: tuple[Tensor, Tensor, int],
    share: Share = BEST,
    *,
    asm: bool = True,
) -> Tensor:
    """The weighted sum [1, L] of one token's choices that are here. choices: ids int64 and weights fp32 [1, top_k], and
    the first expert here; the rest as ``results`` has it."""
    out = torch.empty(1, x.shape[1], dtype=x.dtype, device=x.device)
    _products(x, w13, w2, activation, choices, out, choices[0].shape[1], share, asm)
    return out


def _products(
    x: Tensor,
    w13: Mxfp4Weight,
    w2: Mxfp4Weight,
    activation: Glu,
    groups: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, int],
    out: Tensor,
    top_k: int,
    share: Share,
    asm: bool,
) -> None:
    """Both products into ``out``. groups: lists and counts, or ids, weights and the first expert here."""
    tokens, width = x.shape
    count, double, _ = w13.shape
    inner, lone = double // 2, len(groups) == 3
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    # Two activations to a word.
    pairs = x.view(torch.int32)
    factor = 2.0**SHIFT.value
    lists, weights, counts = groups[0], groups[1], groups[-1]
    common = {"TOPK": top_k, "KEPT": triton.next_power_of_2(top_k), "LONE": lone, "M": MULTIPROCESSORS}
    programs = share.programs * MULTIPROCESSORS
    start.launch(
        _in_kernel,
        (inner // (TILE * share.rows) if lone else programs,),
        *(pairs, *_parts(w13), lists, counts, hidden, pairs.stride(0), width),
        *(inner, lists.shape[1], count, activation.beta, activation.linear_beta, factor),
        SITU=activation.kind == "situ",
        **common,
        **_options(share, width, asm),
        DTYPE=tl.bfloat16,
    )
    start.launch(
        _out_kernel,
        (width // (2 * TILE * share.rows) if lone else programs,),
        *(hidden.view(torch.int32), *_parts(w2), lists, counts, weights, out, inner, width),
        *(lists.shape[1], count, factor),
        **common,
        **_options(share, inner, asm),
    )


def _parts(w: Mxfp4Weight) -> tuple[Tensor, Tensor]:
    return w.packed.view(torch.int32), w.scale.view(torch.int16)


def _options(share: Share, width: int, asm: bool) -> dict[str, Any]:
    warps = share.columns * share.rows
    scratch = 32 * 32 * warps if share.columns > 1 else 0
    # A unit's first tiles are copied while the unit before it is under way, no further ahead.
    stages = min(share.stages, triton.cdiv(width, COLUMNS * share.columns))
    stages = min(stages, (STATIC - scratch) // (warps * _STAGE.value))
    room = warps * stages * _STAGE.value + scratch
    return {
        "KW": share.columns,
        "RW": share.rows,
        "EVEN": width % (COLUMNS * share.columns) == 0,
        "ASM": asm,
        "ROOM": f"{{ .shared .align 128 .b8 tiles[{room}]; mov.u32 $0, tiles; }}",
        "ADD": _adding(share),
        "STAGES": stages,
        "num_warps": warps,
        "maxnreg": share.registers,
    }


def _adding(share: Share) -> str:
    """PTX that adds up the eight sums of warps that share rows, of which a thread takes its part."""
    if share.columns == 1:
        return ""
    threads, kept = 32 * share.columns * share.rows, max(4 // share.columns, 1)
    to, own = f"${2 * kept}", f"${2 * kept + 1}"
    lines = ["{ .reg .f32 t; bar.sync 0;"]
    lines += [f"st.shared.f32 [{to} + {i * threads * 4}], ${2 * kept + 2 + i};" for i in range(8)]
    lines.append("bar.sync 0;")
    for i in range(2 * kept):
        at = (i // kept * 4 + i % kept * share.columns) * threads * 4
        lines.append(f"ld.shared.f32 ${i}, [{own} + {at}];")
        for k in range(1, share.columns):
            lines.append(f"ld.shared.f32 t, [{own} + {at + k * 128}]; add.f32 ${i}, ${i}, t;")
    return " ".join([*lines, "}"])
