"""The device arena: the flat buffer that the accounting in ``memory`` describes, and the copies it orders."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from k3stack.errors import BugError
from k3stack.estimate.pools import PoolPlan

POISON = 0xFF
"""Byte that marks memory nobody has written: all ones is NaN in every floating-point format used here."""


class DeviceArena:
    """One flat uint8 buffer of ``plan.arena_bytes``; pages and states lie in it as ``BlockLayout`` says."""

    def __init__(self, plan: PoolPlan, device: torch.device) -> None:
        self.layout = plan.layout
        self.blocks = plan.blocks
        self.buffer = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=device)
        layout = plan.layout
        self.page_count = plan.blocks * layout.pages_per_block if layout.page_bytes else 0
        self._states = self.buffer.view(plan.blocks, layout.block_bytes)[:, : layout.state_bytes]
        self._pages = self.buffer[: self.page_count * layout.page_bytes].view(
            self.page_count, layout.cache_layers, layout.page_rows, layout.row_bytes
        )

    def clear_state(self, block: int) -> None:
        """Zero recurrent state and window of every layer in ``block``."""
        self._states[self._block(block)].zero_()

    def copy_state(self, src: int, dst: int) -> None:
        """Copy a whole state between blocks."""
        self._states[self._block(dst)].copy_(self._states[self._block(src)])

    def copy_page(self, src: int, dst: int, rows: int) -> None:
        """Copy the first ``rows`` cache rows of every MLA layer between pages."""
        self._pages[self._page(dst), :, :rows].copy_(self._pages[self._page(src), :, :rows])

    def poison_rows(self, page: int, first_row: int) -> None:
        """Overwrite the rows of ``page`` from ``first_row`` on, so that reading what was never written shows."""
        self._pages[self._page(page), :, first_row:].fill_(POISON)

    def poison_block(self, block: int) -> None:
        """Overwrite all of ``block``, be it a state or pages."""
        self.buffer.view(self.blocks, -1)[self._block(block)].fill_(POISON)

    def check_pages(self, pages: Iterable[int]) -> None:
        """Raise BugError for a page outside the arena: on the device it would corrupt or crash without a word."""
        for page in pages:
            self._page(page)

    def _block(self, block: int) -> int:
        if not 0 <= block < self.blocks:
            raise BugError(f"block {block} lies outside an arena of {self.blocks} blocks")
        return block

    def _page(self, page: int) -> int:
        if not 0 <= page < self.page_count:
            raise BugError(f"page {page} lies outside an arena of {self.page_count} pages")
        return page
