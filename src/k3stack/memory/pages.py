"""Cache pages with reference counts, on top of the arena.

A page can have several holders: the row that writes it, the tree's node once it is full, and snapshots whose
position lies inside it (they need its first rows only, and those never change). It is free when the last lets go.
"""

from __future__ import annotations

from k3stack.memory.answers import NO_BLOCK
from k3stack.memory.arena import Arena


class Pages:
    """Reference-counted pages. ``real`` is False where the model has no cache rows: every page is NO_BLOCK then."""

    def __init__(self, arena: Arena, *, real: bool, limit: int | None) -> None:
        self._arena = arena
        self.real = real
        self.limit = limit
        """Most pages in use at once, or None."""
        self.refs = [0] * (arena.blocks * arena.pages_per_block) if real else []

    def room(self) -> int:
        """Pages that ``take`` would give now."""
        if not self.real:
            return 1 << 60
        room = self._arena.room_for_pages()
        return room if self.limit is None else min(room, self.limit - self._arena.pages_in_slabs)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages with one holder each, or None and nothing is taken."""
        if not self.real:
            return [NO_BLOCK] * count
        if self.limit is not None and self._arena.pages_in_slabs + count > self.limit:
            return None
        pages = self._arena.take_pages(count)
        if pages is not None:
            refs = self.refs
            for page in pages:
                refs[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder."""
        if page >= 0:
            self.refs[page] += 1

    def drop(self, page: int) -> bool:
        """One holder fewer; True when the page became free."""
        if page < 0:
            return False
        refs = self.refs[page] - 1
        self.refs[page] = refs
        if refs:
            return False
        self._arena.release_page(page)
        return True

    def moved(self, src: int, dst: int) -> None:
        """The arena has moved a page: its holders hold ``dst`` now."""
        self.refs[dst] = self.refs[src]
        self.refs[src] = 0
