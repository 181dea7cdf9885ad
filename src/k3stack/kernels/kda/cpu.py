"""KDA in torch: chunked prefill of many sequences at once, decode in place in the arena's state blocks."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.kda.layout import SUB, TileLayout

FACTOR_LIMIT = {torch.float32: 120.0, torch.float64: 1200.0}
"""Largest decay (nats) over a sub-chunk that is split into two factors of half of it each without overflow."""


def conv_chunk(raw: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    """One sequence's short convolution and SiLU; ``window`` [taps - 1, C] is read and then overwritten in place.

    raw [T, C], weight [taps, C] -> [T, C] in weight's dtype. See ``reference.short_conv``.
    """
    taps, count = weight.shape[0], raw.shape[0]
    x = torch.cat([window, raw])
    window.copy_(x[count:])
    x = x.to(weight.dtype)
    y = x[:count] * weight[0]
    for j in range(1, taps):
        y.addcmul_(x[j : j + count], weight[j])
    return F.silu(y, inplace=True)


def conv_decode(raw: Tensor, weight: Tensor, windows: Tensor, blocks: Tensor) -> Tensor:
    """One token each of R sequences. raw [R, C], windows [blocks, taps - 1, C] (updated in place), blocks int64 [R]."""
    x = torch.cat([windows[blocks], raw.unsqueeze(1)], dim=1)
    windows[blocks] = x[:, 1:]
    return F.silu((x.to(weight.dtype) * weight).sum(1), inplace=True)


def log_decay(z: Tensor, exp_a: Tensor, lower_bound: float | None) -> Tensor:
    """See ``reference.log_decay``."""
    if lower_bound is not None:
        return torch.sigmoid(z * exp_a[:, None]).mul_(lower_bound)
    return F.softplus(z, threshold=40.0).mul_(-exp_a[:, None])


def decode(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, blocks: list[int]) -> Tensor:
    """One token each of R sequences, states updated in place.

    q, k, g [R, H, K], v [R, H, V], beta [R, H], states [blocks, H, K, V] -> [R, H, V]. Both the prediction and the
    output are read from the old state in one product: with D = diag(exp g), ``S' = D S + k d^T`` gives
    ``o = S^T (exp(g) q) + (k . q) d``.
    """
    decay = torch.exp(g)
    q = q * q.shape[-1] ** -0.5
    reads = torch.stack([k, q], dim=2).mul_(decay.unsqueeze(2))
    kq = torch.linalg.vecdot(k, q).unsqueeze(-1)
    out = torch.empty_like(v)
    for r, block in enumerate(blocks):
        s = states[block]
        seen = torch.bmm(reads[r], s)
        d = (v[r] - seen[:, 0]).mul_(beta[r].unsqueeze(-1))
        torch.addcmul(seen[:, 1], kq[r], d, out=out[r])
        s.mul_(decay[r].unsqueeze(-1)).baddbmm_(k[r].unsqueeze(-1), d.unsqueeze(1))
    return out


def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, layout: TileLayout, out: Tensor
) -> None:
    """Chunks of several sequences, states updated in place.

    q, k, g [T, H, K], v [T, H, V], beta [T, H] (all tokens of the step), states [blocks, H, K, V]; the outputs of the
    layout's tokens are written to their rows of ``out`` [T, H, V].

    Chunked form of the recurrence: with c the running sum of g in the tile and A[i, j] = beta_i sum_k k_i k_j
    exp(c_i - c_j) (j < i), the corrected values solve ``(I + A) Vn = beta (v - (k exp c) S0)``. Only differences
    of c that are <= 0 are exponentiated across sub-chunks, so gates at their bound for the whole run stay finite.
    """
    q = _tiles(q * q.shape[-1] ** -0.5, layout)
    k, v, g, beta = (_tiles(x, layout) for x in (k, v, g, beta.unsqueeze(-1)))
    kk, qk, k_in, q_in, k_out, decay = _inside(q, k, g)
    kk.mul_(beta)
    solved = torch.linalg.solve_triangular(kk, torch.cat([v, k_in], dim=-1).mul_(beta), upper=False, unitriangular=True)
    values = v.shape[-1]
    fresh, reads = solved[..., :values], torch.cat([solved[..., values:], q_in], dim=-2)
    result = _scan(fresh, reads, qk, k_out.transpose(-1, -2), decay, states, layout)
    _untile(result, layout, out)


def _tiles(x: Tensor, layout: TileLayout) -> Tensor:
    """[T, H, K] -> [tiles, H, tile, K], filled with zeros."""
    if layout.tokens is None or layout.places is None:
        tiled = x.view(layout.tiles, layout.tile, *x.shape[1:])
    else:
        flat = x.new_zeros(layout.tiles * layout.tile, *x.shape[1:])
        flat[layout.places] = x[layout.tokens]
        tiled = flat.view(layout.tiles, layout.tile, *x.shape[1:])
    return tiled.transpose(1, 2).contiguous()


def _untile(result: Tensor, layout: TileLayout, out: Tensor) -> None:
    flat = result.transpose(1, 2).reshape(-1, *out.shape[1:])
    if layout.tokens is None or layout.places is None:
        out.copy_(flat)
    else:
        out[layout.tokens] = flat[layout.places]


@cache
def _sums(blocks: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """0/1 matrices that add up log decays; sums over other ranges than a prefix, not differences of prefix sums,
    because a difference would carry the rounding of a decay that has long faded everything.

    First [2 SUB, SUB]: token by token, up to and with it, and after it, in its sub-chunk. Second
    [blocks + 1, blocks, blocks]: entry (a, b) adds the sub-chunks strictly between b and a (a = blocks: to the end).
    """
    ones = torch.ones(SUB, SUB, dtype=dtype, device=device)
    between = torch.zeros(blocks + 1, blocks, blocks, dtype=dtype, device=device)
    for a in range(blocks + 1):
        for b in range(a):
            between[a, b, b + 1 : a] = 1
    return torch.cat([ones.tril(), ones.triu(1)]), between


def _inside(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything of a tile that does not need the state; all [tiles, H, C, K].

    Returns kk [.., C, C] (strictly lower), qk [.., C, C] (lower), k exp(c), q exp(c), k exp(c_C - c) and exp(c_C).
    """
    n, h, c, width = k.shape
    blocks = c // SUB
    shape = (n, h, blocks, SUB, width)
    in_block, between_blocks = _sums(blocks, g.dtype, g.device)
    g = g.view(shape)
    sums = in_block @ g
    local, total = sums[:, :, :, :SUB], sums[:, :, :, SUB - 1]
    gaps = torch.exp((between_blocks.view(-1, blocks) @ total).view(n, h, blocks + 1, blocks, 1, width))
    both = torch.cat([k.view(shape), q.view(shape)], dim=3)
    grown, faded = torch.exp(sums).split(SUB, dim=3)
    from_start = both * torch.cat([grown, grown], dim=3)
    to_end = k.view(shape) * faded
    diagonal = _diagonal(both, k.view(shape), g, local, total)
    kk, qk = k.new_zeros(n, h, c, c), k.new_zeros(n, h, c, c)
    for a in range(blocks):
        rows = slice(a * SUB, (a + 1) * SUB)
        kk[..., rows, rows] = diagonal[:, :, a, :SUB].tril(-1)
        qk[..., rows, rows] = diagonal[:, :, a, SUB:].tril()
        if a:
            columns = (to_end[:, :, :a] * gaps[:, :, a, :a]).view(n, h, a * SUB, width)
            both_rows = from_start[:, :, a] @ columns.transpose(-1, -2)
            kk[..., rows, : a * SUB] = both_rows[:, :, :SUB]
            qk[..., rows, : a * SUB] = both_rows[:, :, SUB:]
    before = F.pad(total[:, :, :-1].cumsum(2), (0, 0, 1, 0))
    from_start.mul_(torch.exp(before).unsqueeze(3))
    k_in = from_start[:, :, :, :SUB].reshape(n, h, c, width)
    q_in = from_start[:, :, :, SUB:].reshape(n, h, c, width)
    k_out = to_end.mul_(gaps[:, :, blocks]).view(n, h, c, width)
    return kk, qk, k_in, q_in, k_out, torch.exp(total.sum(2))


def _diagonal(both: Tensor, k: Tensor, g: Tensor, local: Tensor, total: Tensor) -> Tensor:
    """[.., 2 SUB, SUB]: products of a sub-chunk's keys and queries with its own keys under their decay.

    Where the decay over the sub-chunk allows it, exp(c_i - c_j) is split at the middle of the range. Sub-chunks where
    it does not (an unbounded gate) are computed again, column by column, from sums that begin after the key.
    """
    shifted = local - (total * 0.5).unsqueeze(3)
    rise = torch.exp(shifted)
    product = (both * torch.cat([rise, rise], dim=3)) @ (k * torch.exp(-shifted)).transpose(-1, -2)
    steep = total.amin(-1) < -FACTOR_LIMIT[k.dtype]
    if steep.any():
        product[steep] = _columns(both[steep], k[steep], g[steep])
    return product


def _columns(both: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The products of ``_diagonal`` for sub-chunks of any decay; all [n, SUB or 2 SUB, K]."""
    columns = []
    later = g.clone()
    for j in range(SUB):
        later[:, j] = 0
        fade = torch.exp(later.cumsum(1)) * k[:, j : j + 1]
        columns.append(torch.linalg.vecdot(both, torch.cat([fade, fade], dim=1)))
    return torch.stack(columns, dim=-1)


def _scan(
    fresh: Tensor, reads: Tensor, qk: Tensor, k_out: Tensor, decay: Tensor, states: Tensor, layout: TileLayout
) -> Tensor:
    """Carry the states through the tiles, step by step; returns outputs [tiles, H, C, V]."""
    c = layout.tile
    blocks = torch.tensor(layout.blocks, device=states.device)
    s = states[blocks]
    heads, width, values = s.shape[1:]
    out = torch.empty_like(fresh)
    at = 0
    for n in layout.active:
        tile = slice(at, at + n)
        live = s[:n]
        seen = reads[tile] @ live
        corrected = fresh[tile] - seen[:, :, :c]
        torch.add(seen[:, :, c:], qk[tile] @ corrected, out=out[tile])
        live.mul_(decay[tile].unsqueeze(-1))
        flat = live.view(n * heads, width, values)
        flat.baddbmm_(k_out[tile].reshape(n * heads, width, c), corrected.reshape(n * heads, c, values))
        at += n
    states[blocks] = s
    return out
