"""What running rows leave in the prefix tree: full pages, snapshots, and the state they end with."""

from __future__ import annotations

from collections.abc import Sequence

from k3stack.memory.answers import NO_BLOCK, Counters
from k3stack.memory.ops import Op, SetPage
from k3stack.memory.pages import Pages
from k3stack.memory.retention import Retention
from k3stack.memory.room import Room
from k3stack.memory.rows import Row
from k3stack.memory.tree import Ids, Node, PrefixTree, Snapshot


class Keeper:
    """Moves pages and states from rows to the tree."""

    def __init__(
        self,
        pages: Pages,
        tree: PrefixTree,
        retention: Retention,
        room: Room,
        counters: Counters,
        max_per_path: int | None,
    ) -> None:
        self._pages = pages
        self._tree = tree
        self._retention = retention
        self._room = room
        self.counters = counters
        self._max_per_path = max_per_path

    def publish(self, seq: int, row: Row, ids: Sequence[int], length: int, ops: list[Op]) -> None:
        """Full pages up to ``length`` enter the tree, and pending snapshots whose ids are known now."""
        tree, width = self._tree, self._tree.page_tokens
        row.length = max(row.length, length)
        pages, node, at = row.pages, row.node, row.shared
        is_tuple = isinstance(ids, tuple)
        while (at + 1) * width <= length:
            part = ids[at * width : (at + 1) * width]
            key: Ids = part if is_tuple else tuple(part)  # type: ignore[assignment]
            page = pages[at]
            known = node.children.get(key)
            if known is None:
                node = tree.add(node, key, page)
            else:
                node = known
                tree.lock(node)
                if page >= 0:
                    self._give_up(page, node)
                    pages[at] = node.page
                    ops.append(SetPage(seq, at, node.page))
            at += 1
        if self._pages.real:
            self._room.own_pages -= at - row.shared
        row.node, row.shared = node, at
        if row.pending:
            due = [p for p in row.pending if p[0] <= length]
            row.pending = [p for p in row.pending if p[0] > length]
            for position, block in due:
                self._attach(row, ids, position, block)
        row.next_event = min([(row.shared + 1) * width, *(p for p, _ in row.pending)])

    def _give_up(self, page: int, node: Node) -> None:
        """A row's own page equals ``node``'s: snapshots that need its first rows take them from there."""
        for snapshot in list(self._tree.tails_at.get(page, ())):
            self._tree.retarget(snapshot, node.page)
        self._pages.drop(page)
        self.counters.duplicate_pages += 1

    def _attach(self, row: Row, ids: Sequence[int], position: int, block: int) -> Snapshot:
        """The state in ``block``, held by the row, becomes the snapshot at ``position``, if there is none yet."""
        depth, rest = divmod(position, self._tree.page_tokens)
        node = row.node
        while node.depth > depth and node.parent is not None:
            node = node.parent
        tail = tuple(ids[position - rest : position])
        existing = self._tree.find(node, tail)
        if existing is not None:
            existing.last = self._retention.now
            row.stand_on(existing)
            self._room.release_state(block)
            return existing
        snapshot = self._tree.attach(node, tail, block, row.pages[depth] if rest else NO_BLOCK)
        self._room.held_states -= 1
        snapshot.last = self._retention.now
        snapshot.returning = row.returning
        snapshot.uses = 2 if position == row.branch else 0
        row.taken.append(snapshot)
        row.stand_on(snapshot)
        parent = snapshot.parent
        if parent is not None and parent is row.decode_snapshot and not parent.uses and len(parent.children) == 1:
            self._supersede(parent)
        row.decode_snapshot = snapshot if position > row.prompt else None
        self._trim_path(snapshot)
        self._retention.changed(snapshot)
        parent = snapshot.parent
        if parent is not None and parent is not self._tree.top:
            self._retention.changed(parent)
        return snapshot

    def _trim_path(self, tip: Snapshot) -> None:
        """Evict the shallowest snapshot behind ``tip`` that no branch needs, while there are more than allowed."""
        if self._max_per_path is None:
            return
        path, step = [tip], tip.parent
        while step is not None and step is not self._tree.top:
            path.append(step)
            step = step.parent
        for snapshot in reversed(path[1:]):
            if len(path) <= self._max_per_path:
                return
            if len(snapshot.children) == 1 and snapshot.uses < 2 and not snapshot.locks:
                self._supersede(snapshot)
                path.remove(snapshot)

    def _supersede(self, snapshot: Snapshot) -> None:
        self._room.drop(snapshot)
        self.counters.superseded += 1

    def keep_state(self, row: Row, ids: Sequence[int], position: int, resume: bool) -> None:
        """At the end the working state itself becomes the snapshot: nothing is copied."""
        block, row.block = row.block, NO_BLOCK
        snapshot = self._attach(row, ids, position, block)
        snapshot.promised = snapshot.promised or resume
        self.counters.kept_at_close += snapshot.block == block

    def prune(self, row: Row) -> None:
        """Remove what only this row, which is closed, brought to the tree."""
        self._tree.settle()
        for snapshot in row.taken:
            if snapshot.parent is not None and not snapshot.locks:
                self._room.drop(snapshot)
        node = row.node
        while node.depth > row.matched and node.parent is not None and node in self._tree.orphans:
            parent = node.parent
            self._tree.remove(node)
            node = parent
