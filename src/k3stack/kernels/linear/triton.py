"""Products of a few tokens: the weight streams through once, in tiles that many programs share out between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3stack.kernels import launch as start
from k3stack.kernels.launch import await_inputs


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's weight rows, columns of a pass, warps and stages; ``parts``: the warps share out columns, ``k``
    each, instead of rows; ``ahead``: bytes of each row that are called into the cache before the inputs are there."""

    n: int
    k: int
    warps: int
    stages: int
    parts: bool = True
    ahead: int = 0


MOST_TOKENS, FEW = 64, 16
MOST_ROWS, MANY, ONE_EACH = 20000, 4608, 2112
MOST_LONG_ROWS = 8192
"""Rows longer than 4,096 of which more are cuBLAS's: 10,240 x 7,168, a vocabulary's head, 42.4 us against 46.1."""
FLAT, DEEP = Tile(64, 128, 4, 5, parts=False), Tile(64, 128, 4, 7, parts=False)


def tile_of(tokens: int, rows: int, width: int) -> Tile | None:
    """What a product is done with; None: cuBLAS does it.

    As measured on an H200 by ``benchmarks.tiles`` (``estimate/data/tiles_h200.json``).
    """
    if tokens > MOST_TOKENS or rows > (MOST_LONG_ROWS if width > 4096 else MOST_ROWS):
        return None
    if tokens > FEW:
        return FLAT if rows >= MANY and width <= 4096 else None
    if rows >= MANY or 2048 <= width <= 4096:
        return FLAT if width <= 4096 else DEEP
    return Tile(32, 128, 2, 5) if rows > ONE_EACH else Tile(16, 128, 4, 6, ahead=4096)


_AHEAD = tl.constexpr("""
{
.reg .pred p; .reg .b32 t;
mov.u32 t, %tid.x; setp.lt.u32 p, t, $2;
mad.wide.u32 $0, t, $3, $1;
@p cp.async.bulk.prefetch.L2.global [$0], $4;
}
""")


@triton.jit
def _call_ahead(w, rows, row_bytes, count, PDL: tl.constexpr):
    """Call the first ``count`` bytes of each of ``rows`` rows into the cache; a thread a row."""
    if PDL:
        tl.inline_asm_elementwise(
            _AHEAD, "=l,l,r,r,r", [w.to(tl.int64), rows, row_bytes, count], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def added_up(at, mask, apart, SHARES: tl.constexpr):
    """The sum of SHARES values, ``apart`` from one another, always in the same order; 0 where masked."""
    value = tl.load(at, mask=mask, other=0.0)
    for s in tl.static_range(1, SHARES):
        value += tl.load(at + s * apart, mask=mask, other=0.0)
    return value


@triton.jit
def _by_rows(
    x, w, n, t, here, x_row, w_row, tokens, width,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BN, BT], each warp with rows of its own."""
    k = tl.arange(0, BK)
    from_w = w + n[:, None] * w_row + k[None, :]
    from_x = x + t[None, :] * x_row + k[:, None]
    n_here = (n < here)[:, None]
    t_here = (t < tokens)[None, :]
    acc = tl.zeros([BN, BT], tl.float32)
    await_inputs(PDL)
    for k0 in range(0, width, BK):
        if EVEN:
            a = tl.load(from_w + k0, mask=n_here, other=0.0)
            b = tl.load(from_x + k0, mask=t_here, other=0.0)
        else:
            a = tl.load(from_w + k0, mask=n_here & (k0 + k < width)[None, :], other=0.0)
            b = tl.load(from_x + k0, mask=t_here & (k0 + k < width)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _two_by_rows(
    x, w, x2, w2, n, t, here, x_row, w_row, x2_row, w2_row, tokens, width, width2,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``_by_rows``, of two products, the second after the first in one loop; both widths are multiples of BK."""
    k = tl.arange(0, BK)
    n_here = (n < here)[:, None]
    t_here = (t < tokens)[None, :]
    acc = tl.zeros([BN, BT], tl.float32)
    await_inputs(PDL)
    for k0 in range(0, width + width2, BK):
        second = k0 >= width
        at = k0 - tl.where(second, width, 0)
        from_w = tl.where(second, w2, w) + n[:, None] * tl.where(second, w2_row, w_row)
        from_x = tl.where(second, x2, x) + t[None, :] * tl.where(second, x2_row, x_row)
        a = tl.load(from_w + (at + k)[None, :], mask=n_here, other=0.0)
        b = tl.load(from_x + (at + k)[:, None], mask=t_here, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _by_columns(
    x, w, n, t, here, x_row, w_row, tokens, width,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BN, BT], each warp with columns of its own and so a chain of sums of its own: with long rows one chain over all
    columns would take longer than reading the weights does."""
    part = tl.arange(0, PARTS)[:, None, None] * BK
    k = tl.arange(0, BK)
    w_at = part + k[None, None, :]
    x_at = part + k[None, :, None]
    from_w = w + n[None, :, None] * w_row + w_at
    from_x = x + t[None, None, :] * x_row + x_at
    n_here = (n < here)[None, :, None]
    t_here = (t < tokens)[None, None, :]
    acc = tl.zeros([PARTS, BN, BT], tl.float32)
    await_inputs(PDL)
    for k0 in range(0, width, PARTS * BK):
        if EVEN:
            a = tl.load(from_w + k0, mask=n_here, other=0.0)
            b = tl.load(from_x + k0, mask=t_here, other=0.0)
        else:
            a = tl.load(from_w + k0, mask=n_here & (k0 + w_at < width), other=0.0)
            b = tl.load(from_x + k0, mask=t_here & (k0 + x_at < width), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit
def _skinny_kernel(
    x, w, plus, out, x_row, w_row, tokens, rows, width,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    EVEN: tl.constexpr, PLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Products of BN weight rows with all tokens."""
    first = tl.program_id(0) * BN
    here = tl.minimum(BN, rows - first)
    w += first.to(tl.int64) * w_row
    if AHEAD > 0:
        _call_ahead(w, here, w_row * 2, AHEAD, PDL)
    n = tl.arange(0, BN)
    t = tl.arange(0, BT)
    if PARTS == 1:
        y = _by_rows(x, w, n, t, here, x_row, w_row, tokens, width, BT, BN, BK, EVEN, PDL)
    else:
        y = _by_columns(x, w, n, t, here, x_row, w_row, tokens, width, BT, BN, BK, PARTS, EVEN, PDL)
    at = t[None, :] * rows + first + n[:, None]
    live = (n < here)[:, None] & (t < tokens)[None, :]
    if PLUS:
        y += tl.load(plus + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _two_kernel(
    x, w, x2, w2, out, x_row, w_row, x2_row, w2_row, tokens, rows, width, width2,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums of two products of BN weight rows with all tokens."""
    first = tl.program_id(0) * BN
    here = tl.minimum(BN, rows - first)
    w += first.to(tl.int64) * w_row
    w2 += first.to(tl.int64) * w2_row
    if AHEAD > 0:
        _call_ahead(w, here, w_row * 2, AHEAD, PDL)
    n = tl.arange(0, BN)
    t = tl.arange(0, BT)
    y = _two_by_rows(
        x, w, x2, w2, n, t, here, x_row, w_row, x2_row, w2_row, tokens, width, width2, BT, BN, BK, PDL
    )  # fmt: skip
    live = (n < here)[:, None] & (t < tokens)[None, :]
    tl.store(out + t[None, :] * rows + first + n[:, None], y.to(out.dtype.element_ty), mask=live)


def linear(
    x: Tensor, weight: Tensor, tile: Tile, out_dtype: torch.dtype | None = None, plus: Tensor | None = None
) -> Tensor:
    """See ``reference.linear``; x [T, in] whose rows may lie apart. ``plus`` [T, out] is added before it is rounded."""
    tokens, width = x.shape
    out = torch.empty(tokens, weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    parts = tile.warps if tile.parts else 1
    k = min(tile.k, max(triton.next_power_of_2(triton.cdiv(width, parts)), 16))
    start.launch(
        _skinny_kernel,
        (triton.cdiv(weight.shape[0], tile.n),),
        *(x, weight, x if plus is None else plus.contiguous(), out),
        *(x.stride(0), weight.stride(0), tokens, weight.shape[0], width),
        BT=max(16, triton.next_power_of_2(tokens)),
        BN=tile.n,
        BK=k,
        PARTS=parts,
        AHEAD=min(tile.ahead, width * weight.itemsize) // 16 * 16,
        EVEN=width % (k * parts) == 0,
        PLUS=plus is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def fits_both(x: Tensor, x2: Tensor, tile: Tile) -> bool:
    """Whether ``linear_both`` takes inputs that wide."""
    return not tile.parts and x.shape[1] % tile.k == 0 and x2.shape[1] % tile.k == 0


def linear_both(x: Tensor, weight: Tensor, x2: Tensor, weight2: Tensor, tile: Tile) -> Tensor:
    """``linear`` of the first two plus that of the others, rounded once. Widths are multiples of the tile's columns."""
    tokens, width = x.shape
    out = torch.empty(tokens, weight.shape[0], dtype=x.dtype, device=x.device)
    start.launch(
        _two_kernel,
        (triton.cdiv(weight.shape[0], tile.n),),
        *(x, weight, x2, weight2, out, x.stride(0), weight.stride(0), x2.stride(0), weight2.stride(0)),
        *(tokens, weight.shape[0], width, x2.shape[1]),
        BT=max(16, triton.next_power_of_2(tokens)),
        BN=tile.n,
        BK=tile.k,
        AHEAD=min(tile.ahead, width * weight.itemsize) // 16 * 16,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
