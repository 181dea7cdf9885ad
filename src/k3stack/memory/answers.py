"""What ``Memory`` answers with: plain frozen values, no references into its books."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from k3stack.memory.ops import Op

NO_BLOCK = -1
"""Stands for a state block or page where the model has no layer of that kind (zero bytes of it)."""


class Lookup(NamedTuple):
    """How much of a prompt could be reused now."""

    cached: int
    """Tokens up to the deepest position that has both its pages and a snapshot (at most prompt - 1)."""
    pages_only: int
    """Tokens whose pages are here, snapshot or not."""
    reason: str
    """For an operator: why it is not more."""


class Opened(NamedTuple):
    """A row has its memory."""

    state_block: int
    """NO_BLOCK where the model keeps no state."""
    pages: tuple[int, ...]
    """Page table of the reused prefix; empty where nothing is reused or the model has no cache rows."""
    cached: int
    """Tokens of the prompt that need not be computed."""
    ops: tuple[Op, ...]
    """Moves that made room, then what restores or clears the state and copies a page that ends inside the prefix."""


class Extended(NamedTuple):
    """A row has room for more tokens: ``pages`` join its table."""

    pages: tuple[int, ...]
    ops: tuple[Op, ...]


NOTHING = Extended((), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """One moment of the arena and the prefix tree, and counts since the start.

    Blocks: ``blocks_free + blocks_running + blocks_snapshot + blocks_slab + blocks_reserved + blocks_pinned`` =
    ``blocks``. Pages: ``pages_running + pages_cached + pages_pinned`` are in use in slabs, ``pages_free_in_slabs`` are
    not; free blocks hold ``blocks_free * pages_per_block`` more.
    """

    version: int = 1
    blocks: int
    pages_per_block: int
    page_tokens: int
    block_bytes: int
    blocks_free: int
    blocks_running: int
    """States of running rows: working, tracking (behaviour sglang), and snapshots still in flight."""
    blocks_snapshot: int
    blocks_slab: int
    blocks_reserved: int
    """The dummy slot of behaviour sglang."""
    blocks_pinned: int
    """States that nobody owns any more and that only a pin keeps."""
    pages_running: int
    pages_cached: int
    pages_free_in_slabs: int
    pages_pinned: int
    """Pages that nobody owns any more and that only a pin keeps. Pinned pages with an owner count as the owner's."""
    pins: int
    """Pinned runs, with or without an owner."""
    running: int
    """Open rows."""
    nodes: int
    """Full pages in the prefix tree."""
    opens: int
    """Rows that were opened and got room to start: hits + misses + pages_without_snapshot."""
    hits: int
    """Opens that reused at least one token."""
    misses: int
    """Opens whose first page was not here."""
    pages_without_snapshot: int
    """Opens that found pages of their prefix but no snapshot on them, and so reused nothing."""
    evicted_misses: int
    """Of the opens, those that returned to a prefix whose snapshot had been evicted (a part of all three above)."""
    prompt_tokens: int
    cached_tokens: int
    tokens_without_snapshot: int
    """Tokens whose pages were here but had to be computed again for want of a snapshot, hits included."""
    refused: int
    """Calls to open and extend that were answered with None."""
    evicted_snapshots: int
    evicted_pages: int
    snapshots_taken: int
    snapshots_declined: int
    """Snapshots the policy wanted but had no room worth taking for."""
    snapshots_kept_at_close: int
    snapshots_consumed: int
    """Snapshots that became the working state of the row that hit them, for want of a free block."""
    snapshots_superseded: int
    """Dropped for a deeper one of the same row, or over the cap on snapshots of one path."""
    moves: int
    """Pages moved to free a block."""
    duplicate_pages: int
    """Pages of running rows given up for an equal page that the tree already had."""


class Counters:
    """Counts since the start; ``MemoryStats`` explains them."""

    def __init__(self) -> None:
        self.opens = self.hits = self.misses = self.pages_without_snapshot = self.evicted_misses = 0
        self.prompt_tokens = self.cached_tokens = self.tokens_without_snapshot = 0
        self.refused = self.duplicate_pages = 0
        self.taken = self.declined = self.kept_at_close = self.consumed = self.superseded = 0
