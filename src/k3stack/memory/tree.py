"""The prefix tree: full pages as nodes, snapshots of the state at positions on them.

A node is one full page of one prefix: its key is the page's token ids, its path from the root is the prefix. A
snapshot lies at a node's end (empty ``tail``) or up to a page further (``tail``: the ids between), and then it also
holds the page that has those rows. A prefix is reusable up to a snapshot: rows of the pages before it, and the state.

Rows that run on a path lock every node of it, so unlocked nodes form whole subtrees (``settle`` first: the paths of
closed rows are unlocked late). Snapshots form a tree of their
own (``parent``: the next shallower one on the path), from which their worth is read. Unlocked leaves without a
snapshot are of use to nobody but as a hint where prompts branch: ``orphans``, the first to be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from k3stack.errors import BugError
from k3stack.memory.answers import NO_BLOCK
from k3stack.memory.pages import Pages

Ids = tuple[int, ...]


class Node:
    """One full page of a prefix. The root has depth 0, no key and no page."""

    __slots__ = ("children", "depth", "key", "locks", "page", "parent", "snapshots")

    def __init__(self, parent: Node | None, key: Ids, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = parent.depth + 1 if parent is not None else 0
        """Pages from the root to this page's end."""
        self.children: dict[Ids, Node] = {}
        self.snapshots: dict[int, dict[Ids, Snapshot]] | None = None
        """By length of tail, then by tail; None where there are none."""
        self.locks = 0

    def all_snapshots(self) -> list[Snapshot]:
        """The snapshots at this node and up to a page beyond."""
        return [s for tails in (self.snapshots or {}).values() for s in tails.values()]


class Snapshot:
    """A kept state. ``page`` holds the rows of ``tail`` (NO_BLOCK where the tail is empty)."""

    __slots__ = (
        "block", "children", "ghost", "last", "locks", "node", "page", "parent", "position", "promised", "returning",
        "rows", "tail", "uses",
    )  # fmt: skip

    def __init__(self, node: Node, tail: Ids, position: int, block: int, page: int) -> None:
        self.node = node
        self.tail = tail
        self.position = position
        self.block = block
        self.page = page
        self.parent: Snapshot | None = None
        self.children: dict[Snapshot, None] = {}
        self.locks = 0
        """Rows that keep it from being evicted."""
        self.rows = 0
        """Running rows whose deepest snapshot it is."""
        # What retention goes by:
        self.last = 0
        """The open that last hit it, or took it."""
        self.uses = 0
        """How many rows have begun from it; one that was taken where two prompts part counts both."""
        self.returning = False
        """Its path has been returned to before."""
        self.promised = False
        """A preempted request will return to it."""
        self.ghost: tuple[int, int] | None = None
        """What will be remembered of it once it is evicted, where that was worked out ahead."""

    @property
    def gain(self) -> int:
        """Tokens that it saves over the next shallower snapshot."""
        return self.position - (self.parent.position if self.parent is not None else 0)


class Match(NamedTuple):
    """What the tree has of a prompt."""

    node: Node
    """The deepest node whose whole prefix the prompt begins with."""
    snapshot: Snapshot | None
    """The deepest snapshot within the limit."""
    inside: int
    """Further tokens, inside a page, that some page below ``node`` shares (looked for only where pages are wide)."""


class PrefixTree:
    """Nodes, snapshots, locks. It drops pages it no longer needs; state blocks are the caller's to release."""

    def __init__(self, page_tokens: int, pages: Pages, *, branch_grain: int) -> None:
        self.page_tokens = page_tokens
        self._pages = pages
        self._grain = branch_grain
        self.root = Node(None, (), NO_BLOCK)
        self.top = Snapshot(self.root, (), 0, NO_BLOCK, NO_BLOCK)
        """Stands for the empty prefix, parent of the shallowest snapshots."""
        self.snapshots: dict[Snapshot, None] = {}
        self.orphans: OrderedDict[Node, None] = OrderedDict()
        self.nodes = 0
        self.locked = 0
        """Nodes that running rows lie on, and those of closed rows in ``leaving``."""
        self.leaving: list[Node] = []
        """Ends of the paths of closed rows, still to be unlocked: closing a long row is thus no more work than
        closing a short one, and where memory is ample nobody waits for it."""
        size = len(pages.refs)
        self.node_at: list[Node | None] = [None] * size
        self.tails_at: dict[int, dict[Snapshot, None]] = {}

    @staticmethod
    def pages_to(node: Node) -> list[int]:
        """Pages of the path to ``node``, the shallowest first."""
        pages = []
        step = node
        while step.parent is not None:
            pages.append(step.page)
            step = step.parent
        pages.reverse()
        return pages

    # Looking

    def match(self, ids: Ids, limit: int) -> Match:
        """The deepest pages of ``ids``, and the deepest snapshot at a position <= ``limit``."""
        node, start, width = self.root, 0, self.page_tokens
        best: Snapshot | None = None
        while True:
            if node.snapshots is not None:
                best = self._deepest_at(node.snapshots, ids, start, limit) or best
            child = node.children.get(ids[start : start + width])
            if child is None:
                break
            node = child
            start += width
        return Match(node, best, self._inside(node, ids, start) if self._grain < width else 0)

    @staticmethod
    def _deepest_at(kept: dict[int, dict[Ids, Snapshot]], ids: Ids, start: int, limit: int) -> Snapshot | None:
        room = limit - start
        for length in sorted(kept, reverse=True) if len(kept) > 1 else kept:
            if length <= room and (found := kept[length].get(ids[start : start + length])):
                return found
        return None

    def _inside(self, node: Node, ids: Ids, start: int) -> int:
        """Tokens after ``node`` shared with one of its newest pages, rounded down to the grain: exact ones would
        often reach behind the true fork, by the few words that two prompts happen to share."""
        best = 0
        grain, rest = self._grain, ids[start : start + self.page_tokens]
        newest = [*islice(reversed(node.children), 8), *(s.tail for s in node.all_snapshots())][:16]
        for key in newest:
            shared = 0
            while shared + grain <= len(rest) and rest[shared : shared + grain] == key[shared : shared + grain]:
                shared += grain
            best = max(best, shared)
        return best

    # Nodes

    def add(self, parent: Node, key: Ids, page: int) -> Node:
        """A full page joins the path below ``parent``, which its row has locked; the node takes over the row's hold
        of the page, and is locked by that row."""
        node = Node(parent, key, page)
        parent.children[key] = node
        node.locks = 1
        self.locked += 1
        self.nodes += 1
        if page >= 0:
            self.node_at[page] = node
        return node

    def lock(self, node: Node) -> None:
        """One more row lies on ``node``, not counting its ancestors."""
        node.locks += 1
        if node.locks == 1:
            self.locked += 1
            self.orphans.pop(node, None)

    def lock_path(self, node: Node) -> None:
        """One more row lies on ``node`` and all its ancestors."""
        self.orphans.pop(node, None)  # of a path only the end can be a leaf
        step = node
        while step.parent is not None:
            if not step.locks:
                self.locked += 1
            step.locks += 1
            step = step.parent

    def settle(self, most: int = 1 << 62) -> None:
        """Unlock the paths of closed rows, from their ends, up to so many nodes."""
        while self.leaving:
            step = self.leaving.pop()
            while step.parent is not None:
                if not most:
                    self.leaving.append(step)
                    return
                most -= 1
                step.locks -= 1
                if not step.locks:
                    self.locked -= 1
                    if not step.children and step.snapshots is None:
                        self.orphans[step] = None
                step = step.parent

    def unlock(self, node: Node) -> None:
        """One row fewer lies on ``node``, not counting its ancestors."""
        node.locks -= 1
        if not node.locks:
            self.locked -= 1
            self._orphan(node)

    def remove_orphans(self, count: int) -> int:
        """Drop up to ``count`` nodes nobody needs, from the oldest orphan up its path; returns how many pages that
        freed."""
        node = next(iter(self.orphans))
        del self.orphans[node]
        freed = 0
        while True:
            parent = node.parent
            if parent is None:
                raise BugError("the root of the prefix tree is an orphan")
            freed += self._unlink(node, parent)
            count -= 1
            if not parent.depth or parent.locks or parent.children or parent.snapshots is not None:
                return freed
            if not count:
                self._orphan(parent)
                return freed
            node = parent

    def remove(self, node: Node) -> None:
        """Drop one orphan."""
        parent = node.parent
        if parent is None or node not in self.orphans:
            raise BugError(f"a node at depth {node.depth} is dropped but still needed")
        del self.orphans[node]
        self._unlink(node, parent)
        if not parent.children:
            self._orphan(parent)

    def _unlink(self, node: Node, parent: Node) -> bool:
        """Take a leaf out; True when its page became free."""
        del parent.children[node.key]
        self.nodes -= 1
        page = node.page
        if page < 0:
            return False
        self.node_at[page] = None
        return self._pages.drop(page)

    def _orphan(self, node: Node) -> None:
        """``node`` has lost something that it was needed for. It goes before those that merely waited longer."""
        if node.depth and not node.locks and not node.children and node.snapshots is None:
            self.orphans[node] = None
            self.orphans.move_to_end(node, last=False)

    # Snapshots

    def find(self, node: Node, tail: Ids) -> Snapshot | None:
        """The snapshot exactly there, if any."""
        tails = node.snapshots.get(len(tail)) if node.snapshots is not None else None
        return tails.get(tail) if tails is not None else None

    def attach(self, node: Node, tail: Ids, block: int, page: int) -> Snapshot:
        """Keep the state in ``block`` as the snapshot after ``tail`` beyond ``node``; where there is a tail, its rows
        lie in ``page``, of which the snapshot becomes one more holder."""
        position = node.depth * self.page_tokens + len(tail)
        snapshot = Snapshot(node, tail, position, block, page if tail else NO_BLOCK)
        if tail and page >= 0:
            self._pages.share(page)
            self.tails_at.setdefault(page, {})[snapshot] = None
        parent = self.above(node, tail)
        snapshot.parent = parent
        if self._goes_on(node, tail):
            for other in [s for s in parent.children if s.position > position and self._is_below(s, node, tail)]:
                del parent.children[other]
                other.parent = snapshot
                snapshot.children[other] = None
        parent.children[snapshot] = None
        if node.snapshots is None:
            node.snapshots = {}
        node.snapshots.setdefault(len(tail), {})[tail] = snapshot
        self.snapshots[snapshot] = None
        self.orphans.pop(node, None)
        return snapshot

    def detach(self, snapshot: Snapshot) -> None:
        """Forget a snapshot; its state block is the caller's again. Pages that only it needed become orphans."""
        node, tail, parent = snapshot.node, snapshot.tail, snapshot.parent
        if parent is None or node.snapshots is None:
            raise BugError("a snapshot that is not in the tree is detached")
        tails = node.snapshots[len(tail)]
        del tails[tail], self.snapshots[snapshot], parent.children[snapshot]
        if not tails:
            del node.snapshots[len(tail)]
            if not node.snapshots:
                node.snapshots = None
        for child in snapshot.children:
            child.parent = parent
            parent.children[child] = None
        snapshot.children = {}
        snapshot.parent = None
        self._drop_tail(snapshot)
        self._orphan(node)

    def retarget(self, snapshot: Snapshot, page: int) -> None:
        """The rows of a snapshot's tail are taken from another page with the same ids."""
        self._pages.share(page)
        self._drop_tail(snapshot)
        snapshot.page = page
        self.tails_at.setdefault(page, {})[snapshot] = None

    def _drop_tail(self, snapshot: Snapshot) -> None:
        page = snapshot.page
        if page < 0:
            return
        holders = self.tails_at[page]
        del holders[snapshot]
        if not holders:
            del self.tails_at[page]
        snapshot.page = NO_BLOCK
        self._pages.drop(page)

    def above(self, node: Node, tail: Ids) -> Snapshot:
        """The next shallower snapshot on the path to ``tail`` beyond ``node``."""
        step: Node | None = node
        ahead = tail
        while step is not None:
            if step.snapshots is not None:
                # At the node itself shorter tails only; above it any that the next page's ids begin with.
                for length in sorted(step.snapshots, reverse=True):
                    if length < len(ahead) and (found := step.snapshots[length].get(ahead[:length])):
                        return found
            ahead = step.key
            step = step.parent
        return self.top

    @staticmethod
    def _goes_on(node: Node, tail: Ids) -> bool:
        """True when something in the tree lies deeper than ``tail`` beyond ``node``."""
        length = len(tail)
        if any(key[:length] == tail for key in node.children):
            return True
        return any(len(s.tail) > length and s.tail[:length] == tail for s in node.all_snapshots())

    def _is_below(self, other: Snapshot, node: Node, tail: Ids) -> bool:
        """True when the prefix of ``other`` (deeper) begins with ``tail`` beyond ``node``."""
        step, ahead = other.node, other.tail
        while step.depth > node.depth:
            ahead = step.key
            if step.parent is None:
                return False
            step = step.parent
        return step is node and ahead[: len(tail)] == tail

    # Moves and checks

    def moved(self, src: int, dst: int) -> Node | None:
        """A page lies elsewhere now; returns the node it belongs to, if any."""
        node = self.node_at[src]
        if node is not None:
            self.node_at[src] = None
            self.node_at[dst] = node
            node.page = dst
        holders = self.tails_at.pop(src, None)
        if holders:
            self.tails_at[dst] = holders
            for snapshot in holders:
                snapshot.page = dst
        return node

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
