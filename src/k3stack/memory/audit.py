"""Conservation: what every block and page is used for, counted from the owners and compared with the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from k3stack.errors import BugError
from k3stack.estimate.pools import PoolPlan
from k3stack.memory.answers import Counters, MemoryStats
from k3stack.memory.arena import Arena
from k3stack.memory.pages import Pages
from k3stack.memory.room import Room
from k3stack.memory.rows import Row
from k3stack.memory.tree import PrefixTree


def measure(arena: Arena, tree: PrefixTree, room: Room, plan: PoolPlan, running: int, count: Counters) -> MemoryStats:
    """The present occupancy and the counts as one frozen value."""
    pinned_pages, pinned_blocks = arena.pinned_pages, arena.pinned_blocks
    return MemoryStats(
        blocks=arena.blocks,
        pages_per_block=arena.pages_per_block,
        page_tokens=plan.layout.page_tokens,
        block_bytes=plan.layout.block_bytes,
        blocks_free=arena.free_blocks,
        blocks_running=room.held_states,
        blocks_snapshot=len(tree.snapshots),
        blocks_slab=arena.slabs,
        blocks_reserved=arena.reserved,
        blocks_pinned=pinned_blocks,
        pages_running=room.running_pages,
        pages_cached=arena.pages_in_slabs - room.running_pages,
        pages_free_in_slabs=arena.free_in_slabs,
        pages_pinned=pinned_pages,
        pins=arena.pins,
        running=running,
        nodes=tree.nodes,
        opens=count.opens,
        hits=count.hits,
        misses=count.misses,
        pages_without_snapshot=count.pages_without_snapshot,
        evicted_misses=count.evicted_misses,
        prompt_tokens=count.prompt_tokens,
        cached_tokens=count.cached_tokens,
        tokens_without_snapshot=count.tokens_without_snapshot,
        refused=count.refused,
        evicted_snapshots=room.evicted_snapshots,
        evicted_pages=room.evicted_pages,
        snapshots_taken=count.taken,
        snapshots_declined=count.declined,
        snapshots_kept_at_close=count.kept_at_close,
        snapshots_consumed=count.consumed,
        snapshots_superseded=count.superseded,
        moves=room.moves,
        duplicate_pages=count.duplicate_pages,
    )


def audit(arena: Arena, pages: Pages, tree: PrefixTree, room: Room, rows: dict[int, Row]) -> None:
    """Raise BugError unless every block and page has exactly the owners that the books say."""
    tree.settle()
    arena.check()
    problems = [*_states(arena, tree, room, rows), *_pages(arena, pages, tree, rows), *_tree(tree, rows)]
    own = sum(len(row.pages) - row.shared for row in rows.values()) if pages.real else 0
    if own != room.own_pages:
        problems.append(f"rows hold {own} pages of their own, booked are {room.own_pages}")
    if problems:
        raise BugError("memory does not balance: " + "; ".join(problems[:8]))


def _states(arena: Arena, tree: PrefixTree, room: Room, rows: dict[int, Row]) -> Iterator[str]:
    running = [b for row in rows.values() for b in (row.block, *row.tracking, *(p[1] for p in row.pending)) if b >= 0]
    kept = [s.block for s in tree.snapshots]
    if len(running) != room.held_states:
        yield f"rows hold {len(running)} states, booked are {room.held_states}"
    owners = Counter(running + kept)
    if owners and max(owners.values()) > 1:
        yield f"states owned twice: {[b for b, n in owners.items() if n > 1][:4]}"
    in_use = {b for b in arena.states_in_use() if not arena.released_under_pin(b * arena.pages_per_block)}
    if in_use != set(owners):
        yield f"states in use without an owner, or the reverse: {sorted(in_use ^ set(owners))[:8]}"
    locked = sum(1 for s in tree.snapshots if s.locks)
    if locked != room.locked_snapshots:
        yield f"{locked} snapshots are locked, booked are {room.locked_snapshots}"


def _pages(arena: Arena, pages: Pages, tree: PrefixTree, rows: dict[int, Row]) -> Iterator[str]:
    if not pages.real:
        return
    holders = Counter(page for row in rows.values() for page in row.pages[row.shared :])
    if holders and max(holders.values()) > 1:
        yield f"pages that two rows write: {[p for p, n in holders.items() if n > 1][:4]}"
    nodes = Counter(node.page for node in tree.walk())
    if nodes and max(nodes.values()) > 1:
        yield f"pages of two nodes: {[p for p, n in nodes.items() if n > 1][:4]}"
    if nodes.keys() & holders.keys():
        yield f"pages that a row may write and the tree shares: {sorted(nodes.keys() & holders.keys())[:4]}"
    holders += nodes
    holders += Counter(s.page for s in tree.snapshots if s.page >= 0)
    wrong = [p for p, n in enumerate(pages.refs) if n != holders.get(p, 0)]
    if wrong:
        yield f"pages with a wrong number of holders: {wrong[:8]}"
    in_use = {p for p in arena.pages_in_use() if not arena.released_under_pin(p)}
    if in_use != set(holders):
        yield f"pages in use without a holder, or the reverse: {sorted(in_use ^ set(holders))[:8]}"


def _tree(tree: PrefixTree, rows: dict[int, Row]) -> Iterator[str]:
    locks: Counter[int] = Counter()
    for seq, row in rows.items():
        node = row.node
        if node.depth != row.shared:
            yield f"row {seq} shares {row.shared} pages but stands at depth {node.depth}"
        while node.parent is not None:
            locks[id(node)] += 1
            if row.pages[node.depth - 1] != node.page:
                yield f"row {seq} has page {row.pages[node.depth - 1]} where its path has {node.page}"
            node = node.parent
    nodes = list(tree.walk())
    if len(nodes) != tree.nodes or sum(1 for n in nodes if n.locks) != tree.locked:
        yield f"{len(nodes)} nodes, booked are {tree.nodes}; locked ones booked {tree.locked}"
    if any(n.locks != locks.get(id(n), 0) for n in nodes):
        yield "nodes with a wrong number of rows on them"
    if any(n.page >= 0 and tree.node_at[n.page] is not n for n in nodes):
        yield "the index from pages to nodes is wrong"
    standing = Counter(id(row.last) for row in rows.values() if row.last is not None)
    if any(s.rows != standing.get(id(s), 0) for s in tree.snapshots):
        yield "snapshots with a wrong number of rows standing on them"
    orphans = {id(n) for n in nodes if not n.locks and not n.children and n.snapshots is None}
    if orphans != {id(n) for n in tree.orphans}:
        yield f"{len(orphans)} orphans, listed are {len(tree.orphans)}"
    here = {id(s) for n in [tree.root, *nodes] for s in n.all_snapshots()}
    if here != {id(s) for s in tree.snapshots}:
        yield "snapshots in the tree are not those listed"
    for snapshot in tree.snapshots:
        parent = snapshot.parent
        if parent is None or snapshot not in parent.children or parent.position >= snapshot.position:
            yield f"the snapshot at {snapshot.position} has no shallower parent that knows it"
        elif parent is not tree.above(snapshot.node, snapshot.tail):
            yield f"the snapshot at {snapshot.position} has the wrong parent"
