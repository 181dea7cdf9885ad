"""``Memory``: the one face of the arena that scheduling sees. One per data-parallel group.

Rules of the calls (plans run strictly in order on the device, so accounting may run ahead of it):

- ``seq`` is the row's number; it is what ``SetPage`` and ``SetState`` carry. Drop those of a row that is closed in
  the same plan, and do not give its number to another row before the next plan.
- ops go into the plan in the order returned: those of ``open``, ``extend``, ``compact`` and ``advance`` into
  ``before``, those of ``snapshot`` into ``after``.
- ``advance`` for tokens that a plan computes is called after every ``open`` of that same plan (when its result
  arrives, say): what it makes shareable may be matched at once, and must then lie in an earlier plan.
- ``snapshot`` is called when it is settled that the row computes its part of the plan: after that the row may be
  closed in a later plan only.
- an answer of None is "not now": nothing has changed, and nothing is raised for want of room.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from k3stack.errors import BugError
from k3stack.estimate.pools import PoolPlan
from k3stack.memory.answers import NO_BLOCK, NOTHING, Counters, Extended, Lookup, MemoryStats, Opened
from k3stack.memory.arena import Arena
from k3stack.memory.audit import audit, measure
from k3stack.memory.keeping import Keeper
from k3stack.memory.ops import ClearState, CopyPage, CopyState, Op, SetPage, SetState
from k3stack.memory.pages import Pages
from k3stack.memory.retention import Ranking, Recency, Retention, Worth
from k3stack.memory.reuse import Hit, explain, find
from k3stack.memory.room import Room
from k3stack.memory.rows import NEVER, Row
from k3stack.memory.tree import Ids, Node, PrefixTree, Snapshot


class Memory:
    """Blocks, pages and reusable prefixes of one data-parallel group, built from a ``PoolPlan`` alone.

    ``track_interval``: tokens between snapshots while decoding, and the least a branch point or a chunk's end must
    save over the snapshot before it. ``max_states_per_path``: most snapshots on one prefix (None: as many as their
    worth allows; those behind the tip are the first to go). ``decode_snapshots``: take any while decoding.
    """

    def __init__(
        self,
        plan: PoolPlan,
        *,
        prefix_cache: bool = True,
        track_interval: int = 256,
        max_states_per_path: int | None = None,
        decode_snapshots: bool = True,
        ranking: Ranking | None = None,
    ) -> None:
        layout = plan.layout
        self.plan = plan
        self.prefix_cache = prefix_cache
        self.page_tokens = layout.page_tokens
        # A stage without one kind of layer has zero bytes of it; its P above 1 says that other stages have some.
        self.has_states = layout.state_bytes > 0 or layout.pages_per_block > 1
        self.has_pages = layout.page_bytes > 0 or layout.pages_per_block > 1
        sglang = plan.engine == "sglang"
        self.tracking_slots = max(0, plan.slots_per_request - 3) if sglang and self.has_states else 0
        self.max_running = plan.max_running
        # One of the slots that a request reserves there is for the prefix it began from.
        self._holds_prefix = sglang and plan.slots_per_request >= 3
        self._reserves = sglang
        if sglang and self.has_states and plan.max_states is not None:
            self.max_running = min(plan.max_running, plan.max_states // plan.slots_per_request)
        self._interval = track_interval
        self._grid = lcm(track_interval, self.page_tokens) if sglang else track_interval
        self._decode_snapshots = decode_snapshots and prefix_cache and self.has_states
        self._rows: dict[int, Row] = {}
        self._arena = Arena(plan.blocks, layout.pages_per_block, reserved=_dummy_blocks(plan))
        self._pages = Pages(self._arena, real=self.has_pages, limit=plan.max_pages)
        self._tree = PrefixTree(self.page_tokens, self._pages, branch_grain=layout.page_rows)
        if ranking is None:
            ranking = Recency() if sglang else Worth(self.page_tokens, layout.pages_per_block)
        self._retention = Retention(self._tree, ranking, ghosts=max(64, min(8192, 4 * plan.blocks)))
        self._room = Room(
            self._arena, self._pages, self._tree, self._retention, self._rows,
            page_rows=layout.page_rows, max_states=plan.max_states,
        )  # fmt: skip
        self.counters = Counters()
        self._keeper = Keeper(self._pages, self._tree, self._retention, self._room, self.counters, max_states_per_path)
        self._owed: list[Op] = []  # moves made for a call that was then refused: they go with the next answer

    # What there is

    @property
    def available_pages(self) -> int:
        """Pages that running rows could still get, once all that is merely kept has been evicted."""
        room, arena = self._room, self._arena
        blocks = arena.blocks - arena.reserved - room.held_states - room.locked_snapshots
        pages = blocks * arena.pages_per_block
        if self.plan.max_pages is not None:
            pages = min(pages, self.plan.max_pages)
        return pages - room.running_pages

    @property
    def available_tokens(self) -> int:
        """``available_pages`` in tokens."""
        return self.available_pages * self.page_tokens

    def could_open(self, tokens: int) -> bool:
        """True when an empty memory would hold a row of ``tokens`` tokens: otherwise waiting is in vain."""
        states, pages = (1 + self.tracking_slots if self.has_states else 0), -(-tokens // self.page_tokens)
        if not self.has_pages:
            pages = 0
        plan, arena = self.plan, self._arena
        if plan.max_states is not None and states > plan.max_states:
            return False
        if plan.max_pages is not None and pages > plan.max_pages:
            return False
        return states + -(-pages // arena.pages_per_block) <= arena.blocks - arena.reserved

    def lookup(self, ids: Sequence[int]) -> Lookup:
        """The longest prefix of ``ids`` that could be reused now. Changes nothing."""
        tokens = ids if isinstance(ids, tuple) else tuple(ids)
        if not self.prefix_cache:
            return Lookup(0, 0, "the prefix cache is off")
        hit = self._find(tokens)
        ghost = self._retention.find_ghost(tokens, hit.node.depth)
        return Lookup(hit.position, hit.pages_only, explain(len(tokens), hit, ghost, self.page_tokens))

    def capacity(self, seq: int) -> int:
        """Tokens that the pages of row ``seq`` have room for."""
        return self._rows[seq].capacity

    # A row's life

    def open(self, seq: int, ids: Sequence[int]) -> Opened | None:
        """Give a new row its state block and the pages of the longest reusable prefix (at most all but one token).

        None: no room now, and nothing has changed.
        """
        tokens = ids if isinstance(ids, tuple) else tuple(ids)
        if seq in self._rows or not tokens:
            raise BugError(f"row {seq} is opened but is open already" if tokens else f"row {seq} is opened empty")
        if self._reserves and len(self._rows) >= self.max_running:
            self.counters.refused += 1
            return None
        hit = self._find(tokens)
        row = Row(NO_BLOCK, len(tokens), hit)
        row.lesson = self._retention.learn(hit.snapshot, self._retention.find_ghost(tokens, hit.node.depth))
        self._tree.lock_path(hit.node)
        ops: list[Op] = []
        if not self._take(row, hit, ops):
            self._tree.leaving.append(hit.node)
            self._retention.unlearn(row.lesson)
            self._owed += ops
            self.counters.refused += 1
            return None
        self._rows[seq] = row
        self._place(row, hit)
        pages = tuple(row.pages) if self.has_pages else ()
        return Opened(row.block, pages, hit.position, self._with_owed(ops))

    def _find(self, tokens: Ids) -> Hit:
        if not self.prefix_cache:
            return Hit(self._tree.root, (), None, None, 0, 0, False)
        return find(self._tree, tokens, states=self.has_states)

    def _take(self, row: Row, hit: Hit, ops: list[Op]) -> bool:
        """Blocks, a private copy of the page that ends inside the prefix, and the state; False: no room."""
        states = 1 + self.tracking_slots if self.has_states else 0
        source = hit.source if self.has_pages and hit.tail else None
        if isinstance(source, Node):
            self._tree.lock(source)
        snapshot = hit.snapshot
        # One that needs a page of its own would keep that from running rows, so it is not held.
        hold = snapshot if self._holds_prefix and not hit.tail else None
        if hold is not None:
            self._hold(row, hold)
        spare = snapshot if hold is None else None
        made = self._room.make(states, 1 if source is not None else 0, ops, spare=spare)
        if isinstance(source, Node):
            self._tree.unlock(source)
        if not made:
            if hold is not None:
                self._let_go(hold)
            return spare is not None and self._consume(row, spare, ops)
        if states:
            row.block, *row.tracking = (self._room.take_state() for _ in range(states))
            ops.append(ClearState(row.block) if snapshot is None else CopyState(snapshot.block, row.block))
        if hit.tail:
            row.pages = self._room.take_pages(1)
            if source is not None:
                ops.append(CopyPage(source.page, row.pages[0], self._rows_of(len(hit.tail))))
        return True

    def _consume(self, row: Row, snapshot: Snapshot, ops: list[Op]) -> bool:
        """The snapshot becomes the row's working state: nothing else is left, or all else is worth more."""
        tail, page = bool(snapshot.tail), snapshot.page
        shared = page >= 0 and self._pages.refs[page] > 1
        if shared or self.tracking_slots:
            self._hold(row, snapshot)  # anything may go for the rest but this
            made = self._room.make(self.tracking_slots, int(shared), ops)
            if not made and shared:
                shared = self._pages.refs[snapshot.page] > 1
                made = not shared and self._room.make(self.tracking_slots, 0, ops)
            self._let_go(snapshot)
            row.held = None
            if not made:
                return False
        if shared or (tail and not self.has_pages):
            row.pages = self._room.take_pages(1)
        elif tail:
            self._pages.share(snapshot.page)
            row.pages = [snapshot.page]
            self._room.own_pages += 1
        if shared:
            ops.append(CopyPage(snapshot.page, row.pages[0], self._rows_of(len(snapshot.tail))))
        self._tree.detach(snapshot)
        row.block = snapshot.block
        self._room.held_states += 1
        row.tracking = [self._room.take_state() for _ in range(self.tracking_slots)]
        self.counters.consumed += 1
        return True

    def _place(self, row: Row, hit: Hit) -> None:
        """Where the row stands: its page table, and what comes next."""
        width = self.page_tokens
        row.stand_on(hit.snapshot)
        row.shared = hit.node.depth
        row.pages = self._tree.pages_to(hit.node) + row.pages
        row.capacity = len(row.pages) * width
        row.length = row.kept_to = hit.position
        row.next_event = (row.shared + 1) * width if self.prefix_cache else NEVER
        # A prompt sent again whole finds its pages to the end, but its own snapshot lies one token too deep: from the
        # second time on, one is kept at its last page's start.
        again = row.prompt - 1 - hit.pages_only < width
        if self.has_states and (hit.forked or again) and hit.pages_only - hit.position >= self._interval:
            row.branch = hit.pages_only if hit.pages_only < row.prompt else 0

    def _start(self, row: Row, hit: Hit) -> None:
        """The row's first room is found, so it does start, and counts."""
        count = self.counters
        row.opening = None
        if hit.snapshot is not None:
            hit.snapshot.promised = False
        if row.lesson is not None:
            row.returning = row.lesson.returning
            count.evicted_misses += row.lesson.ghost is not None
            row.lesson = None
        count.opens += 1
        count.prompt_tokens += row.prompt
        count.cached_tokens += hit.position
        if self.has_states:
            count.tokens_without_snapshot += hit.pages_only - hit.position
        if hit.position:
            count.hits += 1
        elif hit.pages_only:
            count.pages_without_snapshot += 1
        else:
            count.misses += 1

    def extend(self, seq: int, length: int) -> Extended | None:
        """Room for rows up to ``length`` tokens; None: no room now, and nothing has changed."""
        row = self._rows[seq]
        if length <= row.capacity:
            if row.opening is not None:
                self._start(row, row.opening)
            return Extended((), self._with_owed([])) if self._owed else NOTHING
        count = -(-(length - row.capacity) // self.page_tokens)
        ops: list[Op] = []
        if not self._room.make(0, count, ops):
            self._owed += ops
            self.counters.refused += 1
            return None
        if row.opening is not None:
            self._start(row, row.opening)
        pages = self._room.take_pages(count)
        row.pages += pages
        row.capacity += count * self.page_tokens
        return Extended(tuple(pages) if self.has_pages else (), self._with_owed(ops))

    def advance(self, seq: int, ids: Sequence[int], length: int) -> tuple[Op, ...]:
        """Tokens [0, length) of the row, ``ids``, are computed in plan order and known.

        Whole pages and snapshots among them become shareable. Returns SetPage where the tree had an equal page
        already: the row goes on with that one and its own is free.
        """
        row = self._rows[seq]
        if length < row.next_event:
            if length > row.length:
                row.length = length
            return ()
        ops: list[Op] = []
        self._keeper.publish(seq, row, ids, length, ops)
        return self._with_owed(ops)

    def cut(self, seq: int, start: int, end: int) -> int:
        """Where a chunk [start, end) had better end: where the prompt leaves what other prompts share, if inside."""
        branch = self._rows[seq].branch
        return branch if start < branch < end else end

    def snapshot(self, seq: int, ids: Sequence[int], length: int) -> tuple[Op, ...]:
        """The state is at ``length`` after this plan's forward pass: ops for ``after`` where a snapshot is wanted.

        Wanted at the prompt's end, at a branch point, at chunk ends and decode steps ``track_interval`` apart; taken
        if a block is free or holds a snapshot that is worth less. ``ids`` may still lack the last token.
        """
        row = self._rows[seq]
        if not self._wanted(row, length):
            return ()
        if self._owed or not self._room.for_snapshot(length - row.kept_to, fork=length == row.branch):
            self.counters.declined += 1
            return ()
        block = self._room.take_state()
        row.pending.append((length, block))
        row.kept_to = length
        row.next_event = min(row.next_event, length)
        self.counters.taken += 1
        return (CopyState(row.block, block),)

    def _wanted(self, row: Row, length: int) -> bool:
        if not (self.prefix_cache and self.has_states) or length <= row.kept_to:
            return False
        if length > row.prompt:
            return self._decode_snapshots and length % self._grid == 0
        return length in (row.prompt, row.branch) or length - row.kept_to >= self._interval

    def wants_decode_snapshot(self, seq: int, length: int) -> bool:
        """True where ``length`` lies on the grid of decode snapshots."""
        return self._decode_snapshots and length % self._grid == 0

    def close(
        self, seq: int, ids: Sequence[int], *, state_at: int | None, keep: bool = True, resume: bool = False
    ) -> None:
        """End a row: keep what is reusable, free the rest.

        ``state_at``: the number of ``ids`` that the state block has consumed once all issued plans have run, or None
        where that is not known. ``keep=False``: what the row computed is worthless (a failed step): nobody shall find
        it. ``resume``: the request will come back soon (preempted), so its snapshot is among the last to be evicted.
        """
        row = self._rows.pop(seq)
        if self._owed:
            self._owed = [op for op in self._owed if not (isinstance(op, SetPage | SetState) and op.row == seq)]
        position = state_at if state_at is not None and 0 < state_at <= len(ids) else None
        if keep and self.prefix_cache:
            computed = min(len(ids), max(row.length, position or 0))
            self._keeper.publish(seq, row, ids, computed, [])
            if position is not None and self.has_states and not self.tracking_slots:
                self._keeper.keep_state(row, ids, position, resume)
        for block in (row.block, *row.tracking, *(b for _, b in row.pending)):
            if block >= 0:
                self._room.release_state(block)
        for page in row.pages[row.shared :]:
            self._pages.drop(page)
        if self.has_pages:
            self._room.own_pages -= len(row.pages) - row.shared
        for first in row.pinned:
            self._arena.unpin(first)
        self._tree.leaving.append(row.node)
        row.stand_on(None)
        if row.held is not None:
            self._let_go(row.held)
        if row.opening is not None and row.lesson is not None:
            self._retention.unlearn(row.lesson)
        if not keep:
            self._keeper.prune(row)
        if not self.has_pages:
            self._room.sweep()

    # Pins and moves

    def pin(self, seq: int) -> None:
        """The row's state and pages, as they are now, keep their place until it is closed (a transfer reads them)."""
        row = self._rows[seq]
        runs = [row.block * self._arena.pages_per_block] if row.block >= 0 else []
        for first in runs + [page for page in row.pages if page >= 0]:
            self._arena.pin(first)
            row.pinned.append(first)

    def compact(self) -> tuple[Op, ...]:
        """Moves that free a block where only sparse slabs are left; empty where there is none to free."""
        ops: list[Op] = []
        self._room.compact(ops)
        return self._with_owed(ops)

    def rest(self) -> None:
        """Work put off so far or needed soon, of a length that goes with contexts or with how much is kept: for when
        the device is busy. Left out, the next call that needs it does it."""
        self._tree.settle()
        self._retention.prepare()

    def flush(self) -> None:
        """Drop everything evictable: all snapshots and pages that no running row holds."""
        self._tree.settle()
        for snapshot in [s for s in self._tree.snapshots if not s.locks]:
            self._room.evict(snapshot)
        while self._tree.orphans:
            self._tree.remove_orphans(1 << 30)
        self._retention.clear()

    def stats(self) -> MemoryStats:
        """Occupancy by kind, and counts since the start."""
        return measure(self._arena, self._tree, self._room, self.plan, len(self._rows), self.counters)

    def check(self) -> None:
        """Raise BugError unless free + running + cached + pinned = all and nothing is owned twice."""
        audit(self._arena, self._pages, self._tree, self._room, self._rows)

    # Inner workings

    def _with_owed(self, ops: list[Op]) -> tuple[Op, ...]:
        if self._owed:
            ops = self._owed + ops
            self._owed = []
        return tuple(ops)

    def _rows_of(self, tokens: int) -> int:
        """Cache rows of one page, on each DCP rank, that ``tokens`` tokens take."""
        return -(-tokens // self.plan.layout.dcp)

    def _hold(self, row: Row, snapshot: Snapshot) -> None:
        if not snapshot.locks:
            self._room.locked_snapshots += 1
        snapshot.locks += 1
        row.held = snapshot

    def _let_go(self, snapshot: Snapshot) -> None:
        snapshot.locks -= 1
        if not snapshot.locks:
            self._room.locked_snapshots -= 1
            self._retention.changed(snapshot)


def _dummy_blocks(plan: PoolPlan) -> int:
    """Behaviour sglang pays for a slot 0 that nobody uses; it is set aside where the plan has a block for it."""
    if plan.engine != "sglang" or plan.max_states is None or plan.max_pages is None:
        return 0
    return min(1, max(0, plan.blocks - plan.max_states - -(-plan.max_pages // plan.layout.pages_per_block)))
