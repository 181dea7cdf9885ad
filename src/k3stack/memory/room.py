"""Making room: pages nobody needs, moves out of sparse slabs, then snapshots by rank.

Everything that is not held by a running row can go, and pages can be moved, so whether a demand can be met is known
beforehand from three counts; only then is anything evicted.
"""

from __future__ import annotations

from k3stack.errors import BugError
from k3stack.memory.arena import Arena
from k3stack.memory.ops import CopyPage, Op, SetPage
from k3stack.memory.pages import Pages
from k3stack.memory.retention import Retention
from k3stack.memory.rows import Row
from k3stack.memory.tree import PrefixTree, Snapshot

SETTLED_AT_ONCE = 16
"""Nodes of closed rows' paths that are unlocked before each eviction: what nobody needs is at the paths' ends, and a
long path is not to hold up a plan."""


class Room:
    """Supplies blocks and pages, at the cost of what is merely kept."""

    def __init__(
        self,
        arena: Arena,
        pages: Pages,
        tree: PrefixTree,
        retention: Retention,
        rows: dict[int, Row],
        *,
        page_rows: int,
        max_states: int | None,
    ) -> None:
        self._arena = arena
        self._pages = pages
        self._tree = tree
        self._retention = retention
        self._rows = rows
        self._page_rows = page_rows
        self.max_states = max_states
        self.held_states = 0
        """Blocks of running rows: working, tracking, pending snapshots."""
        self.locked_snapshots = 0
        """Snapshots that a running row keeps from being evicted."""
        self.own_pages = 0
        """Pages that running rows hold outside the tree."""
        self.evicted_snapshots = 0
        self.evicted_pages = 0
        self.moves = 0

    @property
    def running_pages(self) -> int:
        """Pages that running rows need: their own, and those of tree nodes on their paths."""
        self._tree.settle()
        return self.own_pages + self._tree.locked if self._pages.real else 0

    def could(self, blocks: int, pages: int) -> bool:
        """True when ``blocks`` and ``pages`` could be supplied after evicting all that is evictable (pins apart)."""
        while not self._could(blocks, pages):
            if not self._tree.leaving:
                return False
            self._tree.settle(SETTLED_AT_ONCE)
        return True

    def _could(self, blocks: int, pages: int) -> bool:
        arena = self._arena
        states = self.held_states + self.locked_snapshots + blocks
        if self.max_states is not None and states > self.max_states:
            return False
        needed = self.own_pages + self._tree.locked + pages if self._pages.real else 0
        if self._pages.limit is not None and needed > self._pages.limit:
            return False
        return states + -(-needed // arena.pages_per_block) <= arena.blocks - arena.reserved

    def make(self, blocks: int, pages: int, ops: list[Op], spare: Snapshot | None = None) -> bool:
        """See that ``blocks`` free blocks and, beside them, ``pages`` free pages exist; moves are added to ``ops``.

        False: impossible, or (``spare`` given) the next to go would be ``spare``, or it is all that is left.
        """
        if not self.could(blocks, pages):
            return False
        while True:
            short_of_states = self._short_of_states(blocks)
            short_of_pages = self._pages_short(blocks, pages)
            if not short_of_states and not short_of_pages and self._arena.free_blocks >= blocks:
                return True
            self._tree.settle(SETTLED_AT_ONCE)
            if not short_of_states:
                if not short_of_pages and self.compact(ops):
                    continue
                if self._tree.orphans:
                    self.evicted_pages += self._tree.remove_orphans(short_of_pages or self._arena.pages_per_block)
                    continue
            if not self._evict(spare, pages):
                if not self._tree.leaving:
                    return False
                self._tree.settle()

    def _short_of_states(self, blocks: int) -> bool:
        return self.max_states is not None and self._arena.states + blocks > self.max_states

    def _pages_short(self, blocks: int, pages: int) -> int:
        """How many more pages must become free for ``pages`` beside ``blocks``."""
        if not pages or not self._pages.real:
            return 0
        arena, limit = self._arena, self._pages.limit
        spare_blocks = max(0, arena.free_blocks - blocks)
        short = pages - arena.free_in_slabs - spare_blocks * arena.pages_per_block
        if limit is not None:
            short = max(short, arena.pages_in_slabs + pages - limit)
        return max(0, short)

    def _evict(self, spare: Snapshot | None, pages: int) -> bool:
        # Under a cap on pages a state's block is of no help where pages are short.
        limit = self._pages.limit
        capped = limit is not None and pages > 0 and self._arena.pages_in_slabs + pages > limit
        victim = self._retention.victim_with_pages() if capped else self._retention.victim()
        if victim is None or victim is spare:
            return False
        self.evict(victim)
        return True

    def evict(self, snapshot: Snapshot) -> None:
        """Drop a snapshot; its block is free at once, pages that only it needed are orphans."""
        self._retention.evicted(snapshot)
        self.drop(snapshot)
        self.evicted_snapshots += 1

    def drop(self, snapshot: Snapshot) -> None:
        """Take a snapshot out of the tree and free its block."""
        self._tree.detach(snapshot)
        self._arena.release_block(snapshot.block)
        self.sweep()

    def sweep(self) -> None:
        """Where nodes take no memory nothing would ever evict those that are of no use: drop them now."""
        if not self._pages.real:
            self._tree.settle()
            while self._tree.orphans:
                self._tree.remove_orphans(1 << 30)

    def take_state(self) -> int:
        """A block for a running row, for which room has been made."""
        block = self._arena.take_block()
        if block is None:
            raise BugError("room was made for a state block, and none is free")
        self.held_states += 1
        return block

    def release_state(self, block: int) -> None:
        """A running row's block is free again."""
        self._arena.release_block(block)
        self.held_states -= 1

    def take_pages(self, count: int) -> list[int]:
        """Pages for a running row, for which room has been made."""
        pages = self._pages.take(count)
        if pages is None:
            raise BugError(f"room was made for {count} pages, and they are not free")
        if self._pages.real:
            self.own_pages += count
        return pages

    def for_snapshot(self, gain: int, *, fork: bool) -> bool:
        """See that a block is free for a snapshot ``gain`` tokens beyond the one before it: one that is free already,
        or that of snapshots worth less. Never moves pages: a snapshot is copied after the forward pass, moves are made
        before it."""
        while self._arena.free_blocks < 1 or self._short_of_states(1):
            if not self.could(1, 0):
                return False
            self._tree.settle(SETTLED_AT_ONCE)
            victim = self._retention.victim()
            if victim is None or not self._retention.better(gain, fork, victim):
                return False
            self.evict(victim)
        return True

    # Moves

    def compact(self, ops: list[Op]) -> bool:
        """Free one block by moving the pages of the sparsest slab, where the other slabs have gaps for them."""
        arena = self._arena
        slab = arena.sparsest_slab()
        moves = arena.evacuate(slab) if slab is not None else None
        if moves is None:
            return False
        own = self._own_pages_in(slab) if slab is not None else {}
        for src, dst, _ in moves:
            ops.append(CopyPage(src, dst, self._page_rows))
            self._pages.moved(src, dst)
            node = self._tree.moved(src, dst)
            if node is not None and node.locks:
                self._retable(src, dst, node.depth - 1, node.locks, ops)
            elif src in own:
                seq, index = own[src]
                self._rows[seq].pages[index] = dst
                ops.append(SetPage(seq, index, dst))
        self.moves += len(moves)
        return True

    def _own_pages_in(self, slab: int) -> dict[int, tuple[int, int]]:
        """Page -> (row, index) of the pages in ``slab`` that rows hold outside the tree."""
        per_block = self._arena.pages_per_block
        return {
            row.pages[index]: (seq, index)
            for seq, row in self._rows.items()
            for index in range(row.shared, len(row.pages))
            if row.pages[index] // per_block == slab
        }

    def _retable(self, src: int, dst: int, index: int, rows: int, ops: list[Op]) -> None:
        """Tell the ``rows`` running rows whose page table has ``src`` at ``index``."""
        for seq, row in self._rows.items():
            if index < row.shared and row.pages[index] == src:
                row.pages[index] = dst
                ops.append(SetPage(seq, index, dst))
                rows -= 1
                if not rows:
                    return
