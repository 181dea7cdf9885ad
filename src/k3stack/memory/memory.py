"""``Memory``: the one face of the arena that scheduling sees. One per data-parallel group.

Rules of the calls (plans run strictly in order on the device, so accounting may run ahead of it):

- ``seq`` is the row's number; it is what ``SetPage`` and ``SetState`` carry. Drop those of a row that is closed in
  the same plan, and do not give its number to another row before the next plan.
- ops go into the plan in the order returned: those of ``open``, ``extend``, ``compact`` and ``advance`` into
  ``before``, those of ``snapshot`` into ``after``.
- ``advance`` for tokens that a plan computes is called after every ``open`` of that same plan (when its result
  arrives, say): what it makes shareable may be matched at once, and must then lie in an earlier plan.
- an answer of None is "not now": nothing has changed, and nothing is raised for want of room.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3stack.errors import BugError
from k3stack.estimate.pools import PoolPlan
from k3stack.memory.answers import NO_BLOCK, NOTHING, Extended, Lookup, MemoryStats, Opened
from k3stack.memory.arena import Arena
from k3stack.memory.ops import ClearState, Op


class _Row:
    __slots__ = ("block", "capacity", "length", "pages")

    def __init__(self, block: int) -> None:
        self.block = block
        self.pages: list[int] = []
        self.capacity = 0
        self.length = 0


class Memory:
    """Blocks, pages and reusable prefixes of one data-parallel group, built from a ``PoolPlan`` alone."""

    def __init__(
        self,
        plan: PoolPlan,
        *,
        prefix_cache: bool = True,
        track_interval: int = 256,
        max_states_per_path: int | None = None,
        decode_snapshots: bool = True,
    ) -> None:
        self.plan = plan
        self.page_tokens = plan.layout.page_tokens
        self._track_interval = track_interval
        self._arena = Arena(plan.blocks, plan.layout.pages_per_block)
        self._rows: dict[int, _Row] = {}
        self._refused = 0

    def lookup(self, ids: Sequence[int]) -> Lookup:
        """The longest prefix of ``ids`` that could be reused now. Changes nothing."""
        return Lookup(0, 0, "nothing is kept yet")

    def open(self, seq: int, ids: Sequence[int]) -> Opened | None:
        """Give a new row its state block and the pages of the longest reusable prefix; None: no room now."""
        if seq in self._rows:
            raise BugError(f"row {seq} is opened but is open already")
        block = self._arena.take_block()
        if block is None:
            self._refused += 1
            return None
        self._rows[seq] = _Row(block)
        return Opened(block, (), 0, (ClearState(block),))

    def extend(self, seq: int, length: int) -> Extended | None:
        """Room for rows up to ``length`` tokens; None: no room now."""
        row = self._rows[seq]
        if length <= row.capacity:
            return NOTHING
        count = -(-(length - row.capacity) // self.page_tokens)
        pages = self._arena.take_pages(count)
        if pages is None:
            self._refused += 1
            return None
        row.pages += pages
        row.capacity += count * self.page_tokens
        return Extended(tuple(pages), ())

    def advance(self, seq: int, ids: Sequence[int], length: int) -> tuple[Op, ...]:
        """Tokens [0, length) of the row are computed and known."""
        self._rows[seq].length = length
        return ()

    def cut(self, seq: int, start: int, end: int) -> int:
        """Where a chunk [start, end) had better end."""
        return end

    def snapshot(self, seq: int, ids: Sequence[int], length: int) -> tuple[Op, ...]:
        """The state is at ``length`` after this plan's forward pass: ops for ``after`` where a snapshot is wanted."""
        return ()

    def wants_decode_snapshot(self, seq: int, length: int) -> bool:
        """True where ``length`` lies on the grid of decode snapshots."""
        return False

    def close(self, seq: int, ids: Sequence[int], *, state_at: int | None, keep: bool = True) -> None:
        """End a row: keep what is reusable, free the rest."""
        row = self._rows.pop(seq)
        self._arena.release_block(row.block)
        for page in row.pages:
            self._arena.release_page(page)

    def compact(self) -> tuple[Op, ...]:
        """Moves that free a block where only sparse slabs are left."""
        return ()

    def flush(self) -> None:
        """Drop everything evictable."""

    def stats(self) -> MemoryStats:
        """Occupancy by kind, and counts since the start."""
        arena = self._arena
        return MemoryStats(
            blocks=arena.blocks, pages_per_block=arena.pages_per_block, page_tokens=self.page_tokens,
            block_bytes=self.plan.layout.block_bytes, blocks_free=arena.free_blocks, blocks_running=arena.states,
            blocks_snapshot=0, blocks_slab=arena.slabs, blocks_reserved=0, blocks_pinned=0,
            pages_running=arena.pages_in_slabs, pages_cached=0, pages_free_in_slabs=arena.free_in_slabs,
            pages_pinned=0, pins=0, running=len(self._rows), nodes=0, opens=0, hits=0, misses=0,
            pages_without_snapshot=0, evicted_misses=0, prompt_tokens=0, cached_tokens=0, tokens_without_snapshot=0,
            refused=self._refused, evicted_snapshots=0, evicted_pages=0, snapshots_taken=0, snapshots_declined=0,
            snapshots_kept_at_close=0, snapshots_consumed=0, moves=0, duplicate_pages=0,
        )  # fmt: skip

    def check(self) -> None:
        """Raise BugError unless free + running + cached + pinned = all and nothing is owned twice."""
        self._arena.check()
        owned = [page for row in self._rows.values() for page in row.pages]
        if sorted(owned) != sorted(self._arena.pages_in_use()):
            raise BugError("pages in use are not the pages of the open rows")
        if sorted(row.block for row in self._rows.values()) != sorted(self._arena.states_in_use()):
            raise BugError("states in use are not the states of the open rows")


__all__ = ["NO_BLOCK", "Memory"]
