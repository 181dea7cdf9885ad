"""MLA in torch: expanded keys and values for long chunks, the absorbed form for decode and short chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from k3stack.kernels.norm.cpu import rms_norm
from k3stack.kernels.precision import widen

QUERY_TILE = 64
"""Queries whose scores are in memory at once."""
SCORE_BYTES = 4 << 20
"""Scores that the CPU's cache holds. Measured on a Zen 4 core, 8 heads of 2,048 queries over 8,192 keys take 866 ms
with 256 queries and all heads at once, 501 ms with 64 queries, 393 ms with 64 queries of one head."""
GATHER_BYTES = 8 << 20
"""Cache rows that decode gathers at once: more would leave the CPU's cache before they are read."""
FP8_MOST = 448.0
"""Largest number of fp8_e4m3."""
SHARED_ROWS = 512
"""Cache rows from which on sequences that begin with the same pages read them together. Measured on a Zen 4 core with
30 decoding rows that share 8,192: 22 ms instead of 43."""


def attend_chunks(
    queries: Sequence[Tensor], rows: Tensor, page_table: Tensor, starts: Sequence[int], kv_b: Tensor
) -> list[Tensor]:
    """``attend`` for chunks of several sequences over their pages: cache rows of pages that they have in common are
    expanded once. queries: [T, H, nope + shared] of each; rows, page_table as in ``decode``; starts: of each."""
    width, page_rows = queries[0].shape[2], rows.shape[1]
    least = absorbed_up_to(width, rows.shape[2], kv_b)
    found: dict[int, Tensor] = {}
    expands = [i for i, q in enumerate(queries) if q.shape[0] > least]
    groups = _sharing(page_table[expands], [starts[i] + 1 for i in expands], page_rows) if len(expands) > 1 else []
    for members, pages in groups:
        if not pages:
            continue
        head = _expand(_rows_of(rows, page_table[expands[members[0]], :pages]), kv_b, width)
        for i in (expands[m] for m in members):
            end = -(-(starts[i] + queries[i].shape[0]) // page_rows)
            start = starts[i] - pages * page_rows
            own = _rows_of(rows, page_table[i, pages:end])[: start + queries[i].shape[0]]
            found[i] = _expanded(queries[i], own, kv_b, start, head)
    for i, q in enumerate(queries):
        if i not in found:
            end = starts[i] + q.shape[0]
            found[i] = attend(q, _rows_of(rows, page_table[i, : -(-end // page_rows)])[:end], kv_b, starts[i])
    return [found[i] for i in range(len(queries))]


def attend(q: Tensor, rows: Tensor, kv_b: Tensor, start: int) -> Tensor:
    """Causal attention of one sequence's chunk; see ``reference.attend`` for shapes."""
    if q.shape[0] <= absorbed_up_to(q.shape[2], rows.shape[1], kv_b):
        return _absorbed(q, rows, kv_b, start)
    return _expanded(q, rows, kv_b, start)


def absorbed_up_to(width: int, row_width: int, kv_b: Tensor) -> int:
    """Tokens of a chunk up to which the absorbed form is faster; ``width`` of a query, ``row_width`` of a cache row.

    Expanding a row costs latent (nope + v) products a head, once; each absorbed query then costs more than an
    expanded one by (row + latent) - (width + v). A quarter less than where both are equal, because large products
    run faster than many small ones.
    """
    out, latent = kv_b.shape[1:]
    v = out - (width - (row_width - latent))
    more = row_width + latent - width - v
    return out * latent * 3 // (4 * more) if more > 0 else 1 << 30


def decode(q: Tensor, rows: Tensor, page_table: Tensor, lengths: list[int], kv_b: Tensor) -> Tensor:
    """One token each of R sequences over their pages.

    q [R, H, nope + shared], rows [pages, page rows, latent + shared] (one layer's cache, the new rows written),
    page_table int64 [R, M], lengths: rows to attend to, the new one included -> [R, H, v].
    """
    latent, page_rows = kv_b.shape[2], rows.shape[1]
    nope = q.shape[-1] - (rows.shape[2] - latent)
    kv_b = widen(kv_b)
    wide = absorb(q, kv_b, nope)
    context = wide.new_empty(*q.shape[:2], latent)
    for members, pages in _sharing(page_table, lengths, page_rows):
        head = widen(_rows_of(rows, page_table[members[0], :pages])) if pages else None
        for part in _alike(members, lengths, pages, page_rows, rows.shape[2] * wide.element_size()):
            neighbours = part[-1] - part[0] == len(part) - 1
            index = slice(part[0], part[-1] + 1) if neighbours else torch.tensor(part, device=q.device)
            counts = [lengths[r] - pages * page_rows for r in part]
            own = _rows_of(rows, page_table[index, pages : -(-lengths[part[0]] // page_rows)])
            own = widen(own[:, : max(counts)])
            context[index] = _attend_rows(wide[index], head, own, counts, latent)
    return _project(context.transpose(0, 1), kv_b, nope, q.dtype)


def _rows_of(rows: Tensor, pages: Tensor) -> Tensor:
    """Cache rows of ``pages`` [..., M]: [..., M * page rows, latent + shared], a copy. Whole pages are picked: indexing
    by a table copies value by value and takes three times as long."""
    flat = rows.as_strided((rows.shape[0], rows.shape[1] * rows.shape[2]), (rows.stride(0), 1))
    return flat.index_select(0, pages.reshape(-1)).view(*pages.shape[:-1], -1, rows.shape[2])


def _sharing(page_table: Tensor, lengths: list[int], page_rows: int) -> list[tuple[list[int], int]]:
    """Rows in groups, and how many first pages all of a group have in common (0, or enough to read them together);
    at least the last page with anything in it is a row's own."""
    least = -(-SHARED_ROWS // page_rows)
    long = [r for r, length in enumerate(lengths) if length > least * page_rows]
    if len(long) < 2:
        return [(list(range(len(lengths))), 0)]
    found: list[tuple[list[int], int]] = []
    by_page: dict[int, list[int]] = {}
    for r, page in zip(long, page_table[long, least - 1].tolist(), strict=True):
        by_page.setdefault(page, []).append(r)
    for members in by_page.values():
        if len(members) < 2:
            continue
        most = (min(lengths[r] for r in members) - 1) // page_rows
        same = (page_table[members, :most] == page_table[members[0], :most]).all(0)
        pages = int(same.long().cumprod(0).sum())
        if pages >= least:
            found.append((members, pages))
    taken = {r for members, _ in found for r in members}
    rest = [r for r in range(len(lengths)) if r not in taken]
    return [*found, (rest, 0)] if rest else found


def _alike(members: list[int], lengths: list[int], shared: int, page_rows: int, row_bytes: int) -> Iterator[list[int]]:
    """``members`` in parts with equally many pages after the ``shared`` ones, none of which gathers too much."""
    by_pages: dict[int, list[int]] = {}
    for r in members:
        by_pages.setdefault(-(-lengths[r] // page_rows) - shared, []).append(r)
    for pages, alike in by_pages.items():
        step = max(1, GATHER_BYTES // (pages * page_rows * row_bytes))
        for a in range(0, len(alike), step):
            yield alike[a : a + step]


def _attend_rows(wide: Tensor, head: Tensor | None, own: Tensor, counts: list[int], latent: int) -> Tensor:
    """Contexts [R, H, latent] of absorbed queries [R, H, W] over the rows ``head`` [S, W] that all share and then
    each over the first ``counts`` rows of its own [R, max(counts), W]; later rows of ``own`` are overwritten."""
    shortest, longest = min(counts), max(counts)
    scores = torch.bmm(wide, own.transpose(1, 2))
    if shortest < longest:
        # Rows after the last one hold anything, NaN included: neither scores nor values may see them.
        ends = torch.tensor(counts, device=wide.device).view(-1, 1)
        past = torch.arange(shortest, longest, device=wide.device) >= ends
        scores[:, :, shortest:].masked_fill_(past.unsqueeze(1), float("-inf"))
        own[:, shortest:].masked_fill_(past.unsqueeze(2), 0.0)
    if head is None:
        return torch.bmm(torch.softmax(scores, dim=-1), own[:, :, :latent])
    together = wide.new_empty(*wide.shape[:2], head.shape[0] + longest)
    flat = together.view(-1, together.shape[2])
    torch.mm(wide.reshape(-1, wide.shape[2]), head.T, out=flat[:, : head.shape[0]])
    together[:, :, head.shape[0] :] = scores
    p = torch.softmax(flat, dim=-1)
    seen = torch.mm(p[:, : head.shape[0]], head[:, :latent]).view(*wide.shape[:2], latent)
    return seen.baddbmm_(p.view(together.shape)[:, :, head.shape[0] :], own[:, :, :latent])


def absorb(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """Queries against cache rows: [T, H, nope + shared] -> scaled [T, H, latent + shared], wide. kv_b wide, too."""
    latent = kv_b.shape[2]
    q = widen(q) * q.shape[-1] ** -0.5
    out = q.new_empty(*q.shape[:2], latent + q.shape[-1] - nope)
    out[..., :latent] = torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope]).transpose(0, 1)
    out[..., latent:] = q[..., nope:]
    return out


def _project(context: Tensor, kv_b: Tensor, nope: int, dtype: torch.dtype) -> Tensor:
    """Latent contexts [H, T, latent] to head outputs [T, H, v]. kv_b wide."""
    out = torch.bmm(context, kv_b[:, nope:].transpose(1, 2)).transpose(0, 1)
    return out.to(dtype, memory_format=torch.contiguous_format)


def _absorbed(q: Tensor, rows: Tensor, kv_b: Tensor, start: int) -> Tensor:
    count, heads = q.shape[:2]
    latent = kv_b.shape[2]
    nope = q.shape[-1] - (rows.shape[1] - latent)
    seen, kv_b = widen(rows), widen(kv_b)
    scores = torch.matmul(absorb(q, kv_b, nope).transpose(0, 1), seen.T)
    _mask_future(scores, start)
    context = torch.matmul(torch.softmax(scores, dim=-1), seen[:, :latent])
    return _project(context.view(heads, count, latent), kv_b, nope, q.dtype)


def _expand(rows: Tensor, kv_b: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Keys [H, S, nope + shared] and values [H, S, v] of cache rows [S, latent + shared]."""
    heads, _, latent = kv_b.shape
    nope = width - (rows.shape[1] - latent)
    rows = rows.to(kv_b.dtype)
    expanded = (rows[:, :latent] @ kv_b.view(-1, latent).T).view(rows.shape[0], heads, -1).transpose(0, 1)
    keys = torch.cat([expanded[..., :nope], rows[:, latent:].expand(heads, -1, -1)], dim=-1)
    return keys, expanded[..., nope:]


def _expanded(q: Tensor, rows: Tensor, kv_b: Tensor, start: int, head: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``head``: expanded rows that come before ``rows``; ``start`` counts from after them."""
    count, heads, width = q.shape
    keys, values = _expand(rows, kv_b, width)
    before = head[0].shape[1] if head is not None else 0
    q = (q * width**-0.5).transpose(0, 1)
    out = q.new_empty(count, heads, values.shape[-1])
    # Scores of all heads at once, or, where they would leave the CPU's cache, of one head a thread.
    few = heads * QUERY_TILE * (before + rows.shape[0]) * q.element_size() <= SCORE_BYTES
    together = heads if few else torch.get_num_threads()
    for first_head in range(0, heads, together):
        h = slice(first_head, first_head + together)
        for first in range(0, count, QUERY_TILE):
            last = min(first + QUERY_TILE, count)
            seen = start + last
            scores = torch.bmm(q[h, first:last], keys[h, :seen].transpose(1, 2))
            if head is not None:
                scores = torch.cat([torch.bmm(q[h, first:last], head[0][h].transpose(1, 2)), scores], dim=-1)
            scores = widen(scores)
            _mask_future(scores, before + start + first)
            p = torch.softmax(scores, dim=-1).to(q.dtype)
            seen_values = torch.bmm(p[:, :, before:], values[h, :seen])
            if head is not None:
                seen_values = torch.baddbmm(seen_values, p[:, :, :before], head[1][h])
            out[first:last, h] = seen_values.transpose(0, 1)
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
    values = torch.cat([rms_norm(kv[:, :latent], weight, eps), kv[:, latent:]], dim=1)
    if rows.dtype.itemsize == 1:
        # Scale 1; what is out of range becomes the largest number, as on a GPU (older versions of torch make it NaN).
        values = values.clamp(-FP8_MOST, FP8_MOST)
    rows[pages, places] = values.to(rows.dtype)
