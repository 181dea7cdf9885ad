"""The arena: blocks of P pages that hold either one request's state or a slab of cache pages.

Every allocation is a *run* of pages inside one block: P pages for a state, 1 for a cache page, anything between for
what needs a little room beside a state. A block that holds runs shorter than itself is a *slab*. Slabs fill fullest
first, so that the sparse ones empty by themselves; a slab returns to the arena with its last page. Where a whole
block is wanted and only sparse slabs are left, ``evacuate`` says which pages to move. A *pinned* run (its address is
registered elsewhere) never moves, and when it is released it stays out of use until it is unpinned.

Only block and page numbers are kept here, no owner: ``Memory`` knows whose they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3stack.errors import BugError

FREE, STATE, SLAB, RESERVED = range(4)
"""What a block is used for."""


class Arena:
    """``blocks`` blocks of ``pages_per_block`` pages; the first ``reserved`` of them are never handed out."""

    def __init__(self, blocks: int, pages_per_block: int, *, reserved: int = 0) -> None:
        self.blocks = blocks
        self.pages_per_block = pages_per_block
        self.reserved = reserved
        self._all_free = (1 << pages_per_block) - 1
        self._kind = [RESERVED] * reserved + [FREE] * (blocks - reserved)
        self._free = list(range(blocks - 1, reserved - 1, -1))
        # Slabs: a bit mask of free pages each, and buckets of slabs by the number of pages in use. Bit u of
        # _buckets_used is set where bucket u has a slab, so the fullest slab with room is found without a scan.
        self._mask: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._bucket: list[dict[int, None]] = [{} for _ in range(pages_per_block + 1)]
        self._buckets_used = 0
        self._lengths: dict[int, int] = {}  # first page -> length, for runs longer than a page and shorter than a block
        self._pins: dict[int, int] = {}  # first page of a pinned run -> how often it is pinned
        self._pins_in: dict[int, int] = {}  # block -> pinned runs in it
        self._released: dict[int, int] = {}  # first page -> length, released while pinned
        self.free_in_slabs = 0
        self.pages_in_slabs = 0
        """Pages in use in slabs."""
        self.states = 0
        """Blocks in use as states."""

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def slabs(self) -> int:
        return len(self._mask)

    @property
    def pinned_pages(self) -> int:
        """Pages of slabs that nobody owns any more and that only their pin keeps from being free."""
        return sum(n for first, n in self._released.items() if self._kind[first // self.pages_per_block] == SLAB)

    @property
    def pinned_blocks(self) -> int:
        """States that nobody owns any more and that only their pin keeps."""
        return sum(1 for first in self._released if self._kind[first // self.pages_per_block] == STATE)

    @property
    def pins(self) -> int:
        """Pinned runs, owned or not."""
        return len(self._pins)

    def room_for_pages(self) -> int:
        """Pages that could be handed out one by one now."""
        return self.free_in_slabs + len(self._free) * self.pages_per_block

    # Blocks

    def take_block(self) -> int | None:
        """A block for a state, or None."""
        if not self._free:
            return None
        block = self._free.pop()
        self._kind[block] = STATE
        self.states += 1
        return block

    def release_block(self, block: int) -> None:
        """Give a state's block back."""
        if self._kind[block] != STATE:
            raise BugError(f"block {block} is released as a state but holds none")
        self.states -= 1
        first = block * self.pages_per_block
        if first in self._pins:
            self._released[first] = self.pages_per_block
            return
        self._kind[block] = FREE
        self._free.append(block)

    # Pages

    def take_pages(self, count: int) -> list[int] | None:
        """``count`` cache pages, fullest slab first, or None (and then nothing is taken)."""
        if count > self.free_in_slabs and count > self.room_for_pages():
            return None
        pages: list[int] = []
        per_block = self.pages_per_block
        while len(pages) < count:
            block = self._fullest()
            if block is None:
                block = self._open_slab()
            mask = self._mask[block]
            want = min(count - len(pages), per_block - self._used[block])
            base = block * per_block
            for _ in range(want):
                low = mask & -mask
                pages.append(base + low.bit_length() - 1)
                mask ^= low
            self._mask[block] = mask
            self._refile(block, want)
        return pages

    def release_page(self, page: int) -> None:
        """Give one cache page back."""
        self.pages_in_slabs -= 1
        if self._pins and page in self._pins:
            self._check_in_use(page, 1)
            self._released[page] = 1
            return
        self._free_pages(page, 1)

    def take_run(self, length: int) -> int | None:
        """``length`` neighbouring pages inside one block (the first page's number), or None."""
        if not 1 <= length <= self.pages_per_block:
            raise BugError(f"a run of {length} pages does not lie inside a block of {self.pages_per_block}")
        if length == self.pages_per_block and length > 1:
            block = self.take_block()
            return None if block is None else block * self.pages_per_block
        first = self._find_run(length)
        if first is None:
            if not self._free:
                return None
            first = self._open_slab() * self.pages_per_block
        self._occupy(first, length)
        return first

    def release_run(self, first: int, length: int) -> None:
        """Give back what ``take_run(length)`` returned."""
        if length == self.pages_per_block and length > 1:
            self.release_block(first // self.pages_per_block)
            return
        if self._lengths.get(first, 1) != length:
            raise BugError(f"the run at page {first} has {self._lengths.get(first, 1)} pages, not {length}")
        self._check_in_use(first, length)
        self.pages_in_slabs -= length
        if first in self._pins:
            self._released[first] = length
            return
        self._lengths.pop(first, None)
        self._free_pages(first, length)

    # Pins

    def pin(self, first: int) -> None:
        """The run that begins at page ``first`` (a state: its block's first page) must not move until unpinned."""
        block = first // self.pages_per_block
        if self._kind[block] == SLAB:
            self._check_in_use(first, 1)
        elif self._kind[block] != STATE:
            raise BugError(f"page {first} is pinned but free")
        if first not in self._pins:
            self._pins[first] = 0
            self._pins_in[block] = self._pins_in.get(block, 0) + 1
        self._pins[first] += 1

    def unpin(self, first: int) -> None:
        """Undo one ``pin``; a run released meanwhile becomes free with its last pin."""
        count = self._pins.get(first, 0)
        if not count:
            raise BugError(f"page {first} is unpinned but not pinned")
        if count > 1:
            self._pins[first] = count - 1
            return
        block = first // self.pages_per_block
        del self._pins[first]
        self._pins_in[block] -= 1
        if not self._pins_in[block]:
            del self._pins_in[block]
        length = self._released.pop(first, 0)
        if length and self._kind[block] == STATE:
            self._kind[block] = FREE
            self._free.append(block)
        elif length:
            self._lengths.pop(first, None)
            self._free_pages(first, length)

    # Moves

    def sparsest_slab(self) -> int | None:
        """The slab with the fewest pages in use, none of them pinned, whose pages fit into the other slabs' gaps."""
        for bucket in self._bucket[1:-1]:
            for block in bucket:
                if block in self._pins_in:
                    continue
                gaps = self.free_in_slabs - (self.pages_per_block - self._used[block])
                if self._used[block] <= gaps:
                    return block
        return None

    def evacuate(self, block: int) -> list[tuple[int, int, int]] | None:
        """Move every run of slab ``block`` into other slabs and free it.

        Returns (source page, destination page, pages) in the order to copy, or None when a run finds no gap (then
        nothing has changed). Lengths are 1 for cache pages.
        """
        moves: list[tuple[int, int, int]] = []
        own = self._used[block]
        self._unfile(block)
        for first, length in self._runs_in(block):
            to = self._find_run(length)
            if to is None:
                self._file(block)
                for _, undo, n in moves:
                    self._lengths.pop(undo, None)
                    self.pages_in_slabs -= n
                    self._free_pages(undo, n)
                return None
            self._occupy(to, length)
            moves.append((first, to, length))
        for first, _, _ in moves:
            self._lengths.pop(first, None)
        self.pages_in_slabs -= own
        self.free_in_slabs -= self.pages_per_block - own
        self._close_slab(block)
        return moves

    # Inner workings

    def _fullest(self) -> int | None:
        """The fullest slab that has room, or None."""
        with_room = self._buckets_used & self._all_free  # bits 0 .. P-1: not the full slabs
        if not with_room:
            return None
        return next(reversed(self._bucket[with_room.bit_length() - 1]))

    def _open_slab(self) -> int:
        block = self._free.pop()
        self._kind[block] = SLAB
        self._mask[block] = self._all_free
        self._used[block] = 0
        self._bucket[0][block] = None
        self._buckets_used |= 1
        self.free_in_slabs += self.pages_per_block
        return block

    def _close_slab(self, block: int) -> None:
        del self._mask[block], self._used[block]
        self._kind[block] = FREE
        self._free.append(block)

    def _unfile(self, block: int) -> None:
        used = self._used[block]
        bucket = self._bucket[used]
        del bucket[block]
        if not bucket:
            self._buckets_used &= ~(1 << used)

    def _file(self, block: int) -> None:
        used = self._used[block]
        self._bucket[used][block] = None
        self._buckets_used |= 1 << used

    def _refile(self, block: int, taken: int) -> None:
        """``taken`` more pages of the slab are in use (its mask says so already)."""
        self._unfile(block)
        self._used[block] += taken
        self.free_in_slabs -= taken
        self.pages_in_slabs += taken
        self._file(block)

    def _occupy(self, first: int, length: int) -> None:
        block, bit = divmod(first, self.pages_per_block)
        self._mask[block] &= ~(((1 << length) - 1) << bit)
        if length > 1:
            self._lengths[first] = length
        self._refile(block, length)

    def _free_pages(self, first: int, length: int) -> None:
        """Mark pages of a slab free; with its last page the slab returns to the arena."""
        block, bit = divmod(first, self.pages_per_block)
        bits = ((1 << length) - 1) << bit
        mask = self._mask.get(block)
        if mask is None or mask & bits:
            raise BugError(f"pages {first}..{first + length - 1} are released but not in use")
        self._unfile(block)
        used = self._used[block] - length
        if used:
            self._used[block] = used
            self._mask[block] = mask | bits
            self.free_in_slabs += length
            self._file(block)
            return
        self.free_in_slabs -= self.pages_per_block - length
        self._close_slab(block)

    def _find_run(self, length: int) -> int | None:
        """First page of ``length`` free neighbours in the fullest slab that has them, or None."""
        buckets = self._buckets_used & ((1 << (self.pages_per_block - length + 1)) - 1)
        while buckets:
            used = buckets.bit_length() - 1
            for block in reversed(self._bucket[used]):
                mask = self._mask[block]
                for shift in range(1, length):
                    mask &= self._mask[block] >> shift
                if mask:
                    return block * self.pages_per_block + (mask & -mask).bit_length() - 1
            buckets ^= 1 << used
        return None

    def _runs_in(self, block: int) -> Iterator[tuple[int, int]]:
        first, end = block * self.pages_per_block, (block + 1) * self.pages_per_block
        mask = self._mask[block]
        page = first
        while page < end:
            length = 1
            if not mask >> (page - first) & 1:
                length = self._lengths.get(page, 1)
                yield page, length
            page += length

    def _check_in_use(self, first: int, length: int) -> None:
        block, bit = divmod(first, self.pages_per_block)
        bits = ((1 << length) - 1) << bit
        if self._mask.get(block, bits) & bits or any(p in self._released for p in range(first, first + length)):
            raise BugError(f"pages {first}..{first + length - 1} are not in use")

    # Conservation

    def pages_in_use(self) -> Iterator[int]:
        """Every page of every slab that is in use, those that only a pin holds included."""
        for block in self._mask:
            for first, length in self._runs_in(block):
                yield from range(first, first + length)

    def states_in_use(self) -> Iterator[int]:
        """Every block that holds a state, those that only a pin holds included."""
        return (block for block, kind in enumerate(self._kind) if kind == STATE)

    def released_under_pin(self, first: int) -> bool:
        """True when the run at page ``first`` has no owner and waits for its pin to end."""
        return first in self._released

    def check(self) -> None:
        """Raise BugError unless the books agree with themselves: free + states + slabs + reserved = all."""
        kinds = [0, 0, 0, 0]
        for kind in self._kind:
            kinds[kind] += 1
        pinned_states, pinned_pages = self.pinned_blocks, self.pinned_pages
        in_use = sum(self._used.values())
        masks = sum(mask.bit_count() for mask in self._mask.values())
        problems = [
            kinds[FREE] != len(self._free) or len(set(self._free)) != len(self._free),
            kinds[STATE] != self.states + pinned_states,
            kinds[SLAB] != len(self._mask) or self._mask.keys() != self._used.keys(),
            kinds[RESERVED] != self.reserved,
            in_use != self.pages_in_slabs + pinned_pages,
            masks != self.free_in_slabs or masks + in_use != len(self._mask) * self.pages_per_block,
            any(
                self._used[b] != u or not u or self._mask[b].bit_count() != self.pages_per_block - u
                for u, bucket in enumerate(self._bucket)
                for b in bucket
            ),
            sum(len(bucket) for bucket in self._bucket) != len(self._mask),
            any(bool(self._buckets_used >> u & 1) != bool(bucket) for u, bucket in enumerate(self._bucket)),
        ]
        if any(problems):
            wrong = [i for i, bad in enumerate(problems) if bad]
            raise BugError(
                f"arena books do not balance (rules {wrong}): kinds {kinds}, states {self.states}, "
                f"pages in use {in_use}, booked {self.pages_in_slabs} + {pinned_pages} pinned, "
                f"free in slabs {self.free_in_slabs}"
            )
