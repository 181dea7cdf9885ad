"""One forward pass: which tokens of which sequences, and where their states and cache rows lie."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from k3stack.kernels.kda.layout import ChunkTiles, TileLayout, chunk_tiles, tile_layout
from k3stack.kernels.upload import upload, upload_ints


@dataclass(frozen=True, slots=True)
class HostIndex:
    """What the host knows of a batch's device tensors, so that nobody has to fetch it."""

    blocks: list[int]
    """``ForwardBatch.state_blocks``."""
    logits: list[int]
    """``ForwardBatch.logit_index``."""


@dataclass(frozen=True)
class ForwardBatch:
    """R rows (sequences) with their new tokens back to back, unpadded: prefill chunks and decode tokens in any mix.

    A row's state block and the pages up to ``starts + count`` must exist; the state is that after ``starts`` tokens
    (cleared for a fresh sequence) and the cache rows before ``starts`` are in place.
    """

    ids: Tensor
    """int64 [T] token ids."""
    cu: list[int]
    """[R + 1]: row r's tokens are ``cu[r]`` to ``cu[r + 1]`` - 1; every row has at least one."""
    starts: list[int]
    """[R]: position of each row's first new token."""
    state_blocks: Tensor
    """int64 [R]."""
    page_table: Tensor
    """int64 [R, M] page ids; entries past a row's last page are not read."""
    logit_index: Tensor
    """int64 [N]: tokens (0 .. T-1) whose logits are wanted."""
    host: HostIndex | None = None
    """None: it is read from the tensors, which on a GPU makes the host wait."""

    @cached_property
    def step(self) -> Step:
        """What every layer needs to know of the batch, worked out once."""
        return Step(self)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with more than one new token."""

    row: int
    first: int
    """Its first token among the step's."""
    count: int
    start: int
    """Position of that token in the sequence."""
    block: int
    tokens: slice


@dataclass(frozen=True, slots=True)
class Tail:
    """The only tokens whose output anyone reads: each the last of its row. The last layer computes no others."""

    tokens: Tensor
    """int64 [N], in the order of the logits."""
    pages: Tensor
    """int64 [N, M]: their rows' page tables."""
    lengths: list[int]
    """Tokens up to and with each of them."""


class Step:
    """A batch split into decode tokens (rows of one token) and chunks."""

    def __init__(self, batch: ForwardBatch) -> None:
        cu, starts = batch.cu, batch.starts
        counts = [b - a for a, b in itertools.pairwise(cu)]
        host = batch.host or HostIndex(batch.state_blocks.tolist(), batch.logit_index.tolist())
        blocks, device = host.blocks, batch.ids.device
        self.device = device
        self.total = cu[-1]
        self.page_table = batch.page_table
        single = [r for r, n in enumerate(counts) if n == 1]
        self.chunks = [
            Chunk(r, cu[r], n, starts[r], blocks[r], slice(cu[r], cu[r + 1])) for r, n in enumerate(counts) if n > 1
        ]
        self.decode_count = len(single)
        self.decode_blocks = [blocks[r] for r in single]
        self.decode_lengths = [starts[r] + 1 for r in single]
        self.decode_tokens: slice | Tensor = _compact([cu[r] for r in single], device)
        rows = _compact(single, device)
        self.decode_block_index = batch.state_blocks[rows]
        self.decode_pages = batch.page_table[rows]
        self.tail = self._find_tail(batch, counts, host.logits)
        self._slots: tuple[Tensor, Tensor] | None = None
        self._uploaded: dict[str, Tensor] = {}
        self._counts, self._starts, self._cu = counts, starts, cu

    def _find_tail(self, batch: ForwardBatch, counts: list[int], wanted: list[int]) -> Tail | None:
        """None where the last layer needs every token, or some token that is not its row's last."""
        row_of = {end - 1: r for r, end in enumerate(batch.cu[1:])}
        if len(wanted) >= self.total or any(t not in row_of for t in wanted):
            return None
        rows = [row_of[t] for t in wanted]
        pages = batch.page_table[_compact(rows, self.device)]
        return Tail(batch.logit_index, pages, [batch.starts[r] + counts[r] for r in rows])

    @property
    def all_decode(self) -> bool:
        return not self.chunks

    @cached_property
    def tiles(self) -> TileLayout:
        """The chunks' tokens in tiles for batched products (``kernels.kda.cpu``)."""
        return tile_layout(*self._chunk_lists(), self.total).to(self.device)

    @cached_property
    def chunk_tiles(self) -> ChunkTiles:
        """The same for the Triton kernels (``kernels.kda.triton_chunk``)."""
        return chunk_tiles(*self._chunk_lists(), self.device)

    def _chunk_lists(self) -> tuple[list[int], list[int], list[int]]:
        """First token, tokens and state block of every chunk."""
        return [c.first for c in self.chunks], [c.count for c in self.chunks], [c.block for c in self.chunks]

    @property
    def one_chunk(self) -> bool:
        return len(self.chunks) == 1 and not self.decode_count

    def cache_slots(self, page_rows: int) -> tuple[Tensor, Tensor]:
        """(page, row in it) int64 [T] of every new token's cache row; the same for every layer."""
        if self._slots is None:
            self._slots = self._work_out_slots(page_rows)
        return self._slots

    def lengths(self, tail: Tail | None = None) -> Tensor:
        """``decode_lengths`` (or the tail's) int32 on the device."""
        name = "decode" if tail is None else "tail"
        if name not in self._uploaded:
            values = self.decode_lengths if tail is None else tail.lengths
            self._uploaded[name] = upload_ints(values, self.device, torch.int32)
        return self._uploaded[name]

    def _work_out_slots(self, page_rows: int) -> tuple[Tensor, Tensor]:
        table = self.page_table
        if self.all_decode:
            index = upload_ints([s // page_rows for s in self._starts], table.device)
            places = upload_ints([s % page_rows for s in self._starts], table.device)
            return table.gather(1, index.unsqueeze(1)).squeeze(1), places
        counts = torch.tensor(self._counts)
        row = upload(torch.repeat_interleave(torch.arange(len(self._counts)), counts), table.device)
        shift = upload_ints([s - c for s, c in zip(self._starts, self._cu, strict=False)], table.device)
        position = torch.arange(self.total, device=table.device) + shift[row]
        return table[row, position // page_rows], position % page_rows


def _compact(index: list[int], device: torch.device) -> slice | Tensor:
    """A slice where the indices are consecutive, so that selecting them copies nothing."""
    if not index or index == list(range(index[0], index[0] + len(index))):
        return slice(index[0], index[0] + len(index)) if index else slice(0, 0)
    return upload_ints(index, device)
