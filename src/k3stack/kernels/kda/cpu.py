"""KDA in torch: chunked prefill of many sequences at once, decode in place in the arena's state blocks."""

from __future__ import annotations

import itertools
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.kda.layout import SUB, TileLayout

FACTOR_LIMIT = {torch.float32: 84.0, torch.float64: 600.0}
"""Largest decay (nats) over a sub-chunk of which exp and 1 / exp are both finite, with room for a key of length 1."""
CONV_VALUES = 1 << 17
"""Values of a slice of the convolution: its few passes find them in the second-level cache."""


def conv_chunk(raw: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    """One sequence's short convolution and SiLU; ``window`` [taps - 1, C] is read and then overwritten in place.

    raw [T, C], weight [taps, C] -> [T, C] in weight's dtype. See ``reference.short_conv``. Goes in slices of tokens
    that stay in the CPU's cache.
    """
    taps, (count, channels) = weight.shape[0], raw.shape
    out = weight.new_empty(count, channels)
    step = max(1, CONV_VALUES // channels)
    before = window
    for a in range(0, count, step):
        part = raw[a : a + step]
        x = torch.cat([before, part]).to(weight.dtype)
        n = part.shape[0]
        y = torch.mul(x[:n], weight[0], out=out[a : a + n])
        for j in range(1, taps):
            y.addcmul_(x[j : j + n], weight[j])
        F.silu(y, inplace=True)
        before = raw[a + step - taps + 1 : a + step] if step >= taps else torch.cat([before, part])[1 - taps :]
    window.copy_(raw[count - taps + 1 :] if count >= taps else torch.cat([window, raw])[count:])
    return out


def conv_decode(raw: Tensor, weight: Tensor, windows: Tensor, blocks: list[int]) -> Tensor:
    """One token each of R sequences. raw [R, C], windows [blocks, taps - 1, C] (updated in place) -> [R, C] in
    weight's dtype. Windows are copied by stretches of neighbouring blocks: a gather by index takes several times as
    long."""
    taps, channels = weight.shape
    x = weight.new_empty(raw.shape[0], taps, channels)
    x[:, -1] = raw
    for a, b in _runs(tuple(blocks)):
        window = windows[blocks[a] : blocks[a] + b - a]
        x[a:b, :-1] = window
        window.copy_(x[a:b, 1:])
    return F.silu(x.mul_(weight).sum(1), inplace=True)


def log_decay(z: Tensor, exp_a: Tensor, lower_bound: float | None) -> Tensor:
    """See ``reference.log_decay``."""
    if lower_bound is not None:
        return torch.sigmoid(z * exp_a.unsqueeze(-1)).mul_(lower_bound)
    return F.softplus(z, threshold=40.0).mul_(exp_a.neg().unsqueeze(-1))


def decode(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, blocks: list[int]) -> Tensor:
    """One token each of R sequences, states updated in place.

    q, k, g [R, H, K], v [R, H, V], beta [R, H], states [blocks, H, K, V] -> [R, H, V]. Both the prediction and the
    output are read from the decayed state: with D = diag(exp g), ``S' = D S + k d^T`` gives
    ``o = (D S)^T q + (k . q) d``. Decaying comes first because it is what streams the states from memory fastest; the
    other two passes find them in the cache. States of a narrower dtype are rounded once a step, when they are written.
    """
    if states.dtype != q.dtype:
        index = torch.tensor(blocks, device=states.device)
        own = states[index].to(q.dtype)
        out = decode(q, k, v, g, beta, own, list(range(len(blocks))))
        states[index] = own.to(states.dtype)
        return out
    decay, runs = torch.exp(g).unsqueeze(-1), _runs(tuple(blocks))
    used = [states[blocks[a] : blocks[a] + b - a] for a, b in runs]
    for state, part in zip(used, _parts(decay, runs), strict=True):
        state.mul_(part)
    predicted, seen = _read(torch.stack((k, q), 2), states, blocks).unbind(2)
    d = torch.sub(v, predicted).mul_(beta.unsqueeze(-1))
    out = torch.addcmul(seen, torch.linalg.vecdot(k, q).unsqueeze(-1), d).mul_(q.shape[-1] ** -0.5)
    for state, key, change in zip(used, _parts(k.unsqueeze(-1), runs), _parts(d.unsqueeze(2), runs), strict=True):
        state.addcmul_(key, change)
    return out


def _parts(x: Tensor, runs: tuple[tuple[int, int], ...]) -> list[Tensor]:
    return [x] if len(runs) == 1 else [x[a:b] for a, b in runs]


def _read(reads: Tensor, states: Tensor, blocks: list[int]) -> Tensor:
    """Products of reads [R, H, N, K] with the states of R blocks: [R, H, N, V].

    A product of few rows with a state is bound by reading the state. As sums of the state's rows, weighted by the
    reads, all of them are one call that copies no state and streams each once: about three times as fast as a batched
    product a sequence.
    """
    heads, width, values = states.shape[1:]
    if states.stride(0) % values:
        return reads @ states[torch.tensor(blocks, device=states.device)]
    stride = states.stride(0) // values
    table = states.as_strided(((states.shape[0] - 1) * stride + heads * width, values), (values, 1))
    rows, starts = _state_rows(tuple(blocks), stride, heads, reads.shape[2], width, states.device)
    # What F.embedding_bag calls for sums, after ten microseconds of looking at its arguments.
    sums = torch.embedding_bag(table, rows, starts, False, 0, False, reads.view(-1))[0]
    return sums.view(*reads.shape[:3], values)


@lru_cache(maxsize=4)
def _state_rows(
    blocks: tuple[int, ...], stride: int, heads: int, reads: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[R * H * reads * K]: rows of every head's state, among the rows of all blocks that are ``stride`` rows apart; and
    [R * H * reads]: where each read's begin."""
    first = (torch.tensor(blocks, device=device) * stride).view(-1, 1)
    rows = (first + torch.arange(heads * width, device=device)).view(-1, heads, 1, width)
    flat = rows.expand(-1, -1, reads, -1).reshape(-1)
    return flat, torch.arange(0, flat.shape[0], width, device=device)


@lru_cache(maxsize=4)
def _runs(blocks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(first, end) of the stretches of ``blocks`` that count up by one."""
    ends = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    return tuple(itertools.pairwise([0, *ends, len(blocks)]))


def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, layout: TileLayout, out: Tensor
) -> None:
    """Chunks of several sequences, states updated in place.

    q, k, g [T, H, K], v [T, H, V], beta [T, H] (all tokens of the step), states [blocks, H, K, V]; the outputs of the
    layout's tokens are written to their rows of ``out`` [T, H, V].

    Chunked form of the recurrence: with c the running sum of g in the tile and A[i, j] = beta_i sum_k k_i k_j
    exp(c_i - c_j) (j < i), the corrected values are ``Vn = (I + A)^-1 beta (v - (k exp c) S0)``. Only differences
    of c that are <= 0 are exponentiated across sub-chunks, so gates at their bound for the whole run stay finite.
    """
    q, k, v, g, beta = (_tiles(x, layout) for x in (q, k, v, g, beta.unsqueeze(-1)))
    kk, qk, reads, k_out, decay = _inside(q, k, g)
    eye = torch.eye(layout.tile, dtype=k.dtype, device=k.device).expand_as(kk)
    solve = torch.linalg.solve_triangular(kk.mul_(beta), eye, upper=False, unitriangular=True)
    solve.mul_(beta.transpose(-1, -2))
    result = _scan(v, solve, reads, qk, k_out, decay, states, layout)
    _untile(result.mul_(q.shape[-1] ** -0.5), layout, out)


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


def _inside(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything of a tile that does not need the state, from q, k, g [tiles, H, C, K].

    Returns kk [.., C, C] (strictly lower), qk [.., C, C] (lower), the rows that read the state [.., 2 C, K] (k exp(c),
    then q exp(c)), k exp(c_C - c) [.., C, K] and exp(c_C) [.., K].
    """
    n, h, c, width = k.shape
    blocks = c // SUB
    shape = (n, h, blocks, SUB, width)
    q, k, g = q.view(shape), k.view(shape), g.view(shape)
    in_block, between_blocks = _sums(blocks, g.dtype, g.device)
    sums = in_block @ g
    total = sums[:, :, :, SUB - 1].clone()
    grown, faded = sums.exp_().split(SUB, dim=3)
    gaps = torch.exp((between_blocks.view(-1, blocks) @ total).view(n, h, blocks + 1, blocks, 1, width))
    reads = k.new_empty(n, h, 2, blocks, SUB, width)
    torch.mul(k, grown, out=reads[:, :, 0])
    torch.mul(q, grown, out=reads[:, :, 1])
    diagonal = reads @ (k / grown).transpose(-1, -2).unsqueeze(2)
    steep = total.amin(-1) < -FACTOR_LIMIT[k.dtype]
    if steep.any():
        for i, rows in enumerate((k, q)):
            diagonal[:, :, i][steep] = _columns(rows[steep], k[steep], g[steep])
    to_end = faded * k
    products = k.new_zeros(n, h, 2, c, c)
    for a in range(blocks):
        rows = slice(a * SUB, (a + 1) * SUB)
        products[:, :, 0, rows, rows] = diagonal[:, :, 0, a].tril(-1)
        products[:, :, 1, rows, rows] = diagonal[:, :, 1, a].tril()
        if a:
            columns = (to_end[:, :, :a] * gaps[:, :, a, :a]).view(n, h, a * SUB, width)
            seen = reads[:, :, :, a].reshape(n, h, 2 * SUB, width) @ columns.transpose(-1, -2)
            products[:, :, :, rows, : a * SUB] = seen.view(n, h, 2, SUB, a * SUB)
    before = F.pad(total[:, :, :-1].cumsum(2), (0, 0, 1, 0))
    reads.mul_(torch.exp(before).view(n, h, 1, blocks, 1, width))
    k_out = to_end.mul_(gaps[:, :, blocks]).view(n, h, c, width)
    kk, qk = products.unbind(2)
    return kk, qk, reads.view(n, h, 2 * c, width), k_out, torch.exp(total.sum(2))


def _columns(rows: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """[n, SUB, SUB] products of rows and keys [n, SUB, K] of a sub-chunk under any decay g, column by column, from
    sums that begin after the column's key."""
    columns = []
    later = g.clone()
    for j in range(SUB):
        later[:, j] = 0
        columns.append(torch.linalg.vecdot(rows, torch.exp(later.cumsum(1)) * k[:, j : j + 1]))
    return torch.stack(columns, dim=-1)


def _scan(
    v: Tensor,
    solve: Tensor,
    reads: Tensor,
    qk: Tensor,
    k_out: Tensor,
    decay: Tensor,
    states: Tensor,
    layout: TileLayout,
) -> Tensor:
    """Carry the states through the tiles, step by step; returns outputs [tiles, H, C, V]."""
    c = layout.tile
    blocks = torch.tensor(layout.blocks, device=states.device)
    s = states[blocks].to(v.dtype)
    heads, width, values = s.shape[1:]
    out = torch.empty_like(v)
    at = 0
    for n in layout.active:
        tile = slice(at, at + n)
        live = s[:n]
        seen = reads[tile] @ live
        corrected = solve[tile] @ (v[tile] - seen[:, :, :c])
        torch.add(seen[:, :, c:], qk[tile] @ corrected, out=out[tile])
        live.mul_(decay[tile].unsqueeze(-1))
        flat = live.view(n * heads, width, values)
        keys = k_out[tile].view(n * heads, c, width).transpose(1, 2)
        flat.baddbmm_(keys, corrected.view(n * heads, c, values))
        at += n
    states[blocks] = s.to(states.dtype)
    return out
