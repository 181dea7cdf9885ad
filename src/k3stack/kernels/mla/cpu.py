"""MLA in torch: expanded keys and values for long chunks, the absorbed form for decode and short chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.kernels.norm.cpu import rms_norm
from k3stack.kernels.precision import widen

QUERY_TILE = 256
"""Queries whose scores are in memory at once."""
ABSORBED_UP_TO = 128
"""Chunks up to this many tokens use the absorbed form: expanding a row costs as much as about 170 absorbed queries."""


def attend(q: Tensor, rows: Tensor, kv_b: Tensor, start: int) -> Tensor:
    """Causal attention of one sequence's chunk; see ``reference.attend`` for shapes."""
    if q.shape[0] <= ABSORBED_UP_TO:
        return _absorbed(q, rows, kv_b, start)
    return _expanded(q, rows, kv_b, start)


def decode(q: Tensor, rows: Tensor, page_table: Tensor, lengths: list[int], kv_b: Tensor) -> Tensor:
    """One token each of R sequences over their pages.

    q [R, H, nope + shared], rows [pages, page rows, latent + shared] (one layer's cache, the new rows written),
    page_table int64 [R, M], lengths: rows to attend to, the new one included -> [R, H, v].
    """
    latent, page_rows = kv_b.shape[2], rows.shape[1]
    nope = q.shape[-1] - (rows.shape[2] - latent)
    wide = absorb(q, kv_b, nope)
    context = wide.new_empty(*q.shape[:2], latent)
    by_pages: dict[int, list[int]] = {}
    for r, length in enumerate(lengths):
        by_pages.setdefault(-(-length // page_rows), []).append(r)
    for pages, members in by_pages.items():
        one_group = len(members) == len(lengths)
        index = slice(None) if one_group else torch.tensor(members, device=q.device)
        seen = widen(rows[page_table[index, :pages]].view(len(members), pages * page_rows, rows.shape[2]))
        counts = [lengths[r] for r in members]
        shortest, longest = min(counts), max(counts)
        seen = seen[:, :longest]
        scores = torch.bmm(wide[index], seen.transpose(1, 2))
        if shortest < longest:
            # Rows after the last one hold anything, NaN included: neither scores nor values may see them.
            ends = torch.tensor(counts, device=q.device).view(-1, 1)
            past = torch.arange(shortest, longest, device=q.device) >= ends
            scores[:, :, shortest:].masked_fill_(past.unsqueeze(1), float("-inf"))
            seen[:, shortest:].masked_fill_(past.unsqueeze(2), 0.0)
        context[index] = torch.bmm(torch.softmax(scores, dim=-1), seen[:, :, :latent])
    return _project(context.transpose(0, 1), kv_b, nope, q.dtype)


def absorb(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """Queries against cache rows: [T, H, nope + shared] -> scaled [T, H, latent + shared], wide."""
    latent = kv_b.shape[2]
    q = widen(q) * q.shape[-1] ** -0.5
    out = q.new_empty(*q.shape[:2], latent + q.shape[-1] - nope)
    out[..., :latent] = torch.bmm(q[..., :nope].transpose(0, 1), widen(kv_b[:, :nope])).transpose(0, 1)
    out[..., latent:] = q[..., nope:]
    return out


def _project(context: Tensor, kv_b: Tensor, nope: int, dtype: torch.dtype) -> Tensor:
    """Latent contexts [H, T, latent] to head outputs [T, H, v]."""
    return torch.bmm(context, widen(kv_b[:, nope:]).transpose(1, 2)).transpose(0, 1).to(dtype)


def _absorbed(q: Tensor, rows: Tensor, kv_b: Tensor, start: int) -> Tensor:
    count, heads = q.shape[:2]
    latent = kv_b.shape[2]
    nope = q.shape[-1] - (rows.shape[1] - latent)
    seen = widen(rows)
    scores = torch.matmul(absorb(q, kv_b, nope).transpose(0, 1), seen.T)
    _mask_future(scores, start)
    context = torch.matmul(torch.softmax(scores, dim=-1), seen[:, :latent])
    return _project(context.view(heads, count, latent), kv_b, nope, q.dtype)


def _expanded(q: Tensor, rows: Tensor, kv_b: Tensor, start: int) -> Tensor:
    count, heads, width = q.shape
    latent = kv_b.shape[2]
    nope = width - (rows.shape[1] - latent)
    total = rows.shape[0]
    expanded = (rows[:, :latent] @ kv_b.view(-1, latent).T).view(total, heads, -1).transpose(0, 1)
    keys = torch.cat([expanded[..., :nope], rows[:, latent:].expand(heads, -1, -1)], dim=-1)
    values = expanded[..., nope:]
    q = (q * width**-0.5).transpose(0, 1)
    out = q.new_empty(count, heads, values.shape[-1])
    for first in range(0, count, QUERY_TILE):
        last = min(first + QUERY_TILE, count)
        seen = start + last
        scores = widen(torch.bmm(q[:, first:last], keys[:, :seen].transpose(1, 2)))
        _mask_future(scores, start + first)
        p = torch.softmax(scores, dim=-1).to(q.dtype)
        out[first:last] = torch.bmm(p, values[:, :seen]).transpose(0, 1)
    return out


def _mask_future(scores: Tensor, start: int) -> None:
    """scores [H, T, S] of queries at positions start..: later keys get -inf, in place."""
    count, seen = scores.shape[1:]
    if count > 1:
        hidden = torch.ones(count, seen - start, dtype=torch.bool, device=scores.device).triu_(1)
        scores[:, :, start:].masked_fill_(hidden, float("-inf"))


def write_rows(kv: Tensor, weight: Tensor, eps: float, rows: Tensor, pages: Tensor, places: Tensor) -> None:
    """Write the cache rows of T tokens: kv [T, latent + shared] with its latent normalised by ``weight`` [latent].

    rows [pages, page rows, latent + shared]; pages, places int64 [T]: where each token's row lies.
    """
    latent = weight.shape[0]
    rows[pages, places] = torch.cat([rms_norm(kv[:, :latent], weight, eps), kv[:, latent:]], dim=1).to(rows.dtype)
