"""A decode step whose tensors stay where they are: what a CUDA graph is captured over.

It may hold fewer rows than it has room for. A row that only fills up has length 0, block -1 and no pages: kernels
leave the arena alone for it, and its logits mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.models.batch import ForwardBatch


class DecodeStep:
    """``batch.Step`` of R rows of one token each, by device tensors alone."""

    all_decode, one_chunk = True, False
    chunks: tuple[()] = ()
    tail = None

    def __init__(self, blocks: Tensor, page_table: Tensor, lengths: Tensor) -> None:
        self.total = self.decode_count = blocks.shape[0]
        self.decode_block_index, self.decode_pages = blocks, page_table
        self._lengths = lengths
        self._slots: tuple[Tensor, Tensor] | None = None

    def lengths(self, tail: None = None) -> Tensor:
        """Tokens up to and with the new one, int32 [R]."""
        return self._lengths

    def cache_slots(self, page_rows: int) -> tuple[Tensor, Tensor]:
        """(page, row in it) int64 [R] of the new token's cache row; page -1 for a row that only fills up."""
        if self._slots is None:
            position = (self._lengths - 1).long()
            page = self.decode_pages.gather(1, (position // page_rows).clamp_(min=0).unsqueeze(1)).squeeze(1)
            self._slots = torch.where(position >= 0, page, -1), position % page_rows
        return self._slots

    def forget(self) -> None:
        """Work the slots out anew: in a graph they must be part of what is captured."""
        self._slots = None


class DecodeBatch:
    """Room for ``rows`` decode rows with page tables of ``pages`` entries; takes the place of a ``ForwardBatch``."""

    logit_index = None
    """Logits of every row are wanted."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        self.rows, self.pages = rows, pages
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, pages, dtype=torch.int64, device=device)
        self.blocks = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.step = DecodeStep(self.blocks, self.page_table, self.lengths)

    def fill(self, batch: ForwardBatch, lengths: Tensor) -> None:
        """Take the rows of ``batch`` (decode rows all, at most ``rows``); lengths int64 [R] on the device."""
        count, width = batch.page_table.shape
        self.ids[:count].copy_(batch.ids)
        # Rows that fill up repeat the first one's token, so that they choose the experts of one token at most.
        self.ids[count:] = batch.ids[:1]
        self.page_table[:count, :width].copy_(batch.page_table)
        self.blocks[:count].copy_(batch.state_blocks)
        self.blocks[count:] = -1
        self.lengths[:count].copy_(lengths)
        self.lengths[count:] = 0
