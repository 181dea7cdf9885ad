"""What ``Memory`` keeps of one running row."""

from __future__ import annotations

from k3stack.memory.retention import Lesson
from k3stack.memory.reuse import Hit
from k3stack.memory.tree import Node, Snapshot

NEVER = 1 << 62


class Row:
    """Pages, state and place in the prefix tree of one running row.

    ``pages`` is its page table; the first ``shared`` of them belong to tree nodes on its path (the deepest is
    ``node``), the rest are its own.
    """

    __slots__ = (
        "block", "branch", "capacity", "decode_snapshot", "held", "kept_to", "last", "length", "lesson", "matched",
        "next_event", "node", "opening", "pages", "pending", "pinned", "prompt", "returning", "shared", "taken",
        "tracking",
    )  # fmt: skip

    def __init__(self, block: int, prompt: int, hit: Hit) -> None:
        self.block = block
        self.tracking: list[int] = []
        """Behaviour sglang: further state slots it holds."""
        self.pages: list[int] = []
        self.shared = 0
        self.node: Node = hit.node
        self.matched = hit.node.depth
        """Depth of the path found at ``open``."""
        self.prompt = prompt
        self.capacity = 0
        """Tokens its pages have room for."""
        self.length = 0
        """Tokens known to be computed."""
        self.next_event = NEVER
        """Length at which ``advance`` has something to do: a page becomes full, or a snapshot's ids known."""
        self.branch = 0
        """Position where its prompt leaves what the tree has and a snapshot is wanted; 0: none."""
        self.kept_to = 0
        """Position of the deepest snapshot it found or took."""
        self.pending: list[tuple[int, int]] = []
        """(position, block) of snapshots taken whose ids ``advance`` has not reached."""
        self.last: Snapshot | None = None
        """The deepest snapshot on its path, found or taken."""
        self.taken: list[Snapshot] = []
        """Snapshots in the tree that it has taken."""
        self.decode_snapshot: Snapshot | None = None
        """The last one on the decode grid; the next takes its place."""
        self.held: Snapshot | None = None
        """Behaviour sglang: the snapshot it began from stays locked."""
        self.opening: Hit | None = hit
        """What it found at ``open``, until its first ``extend``: only then is it counted as started."""
        self.lesson: Lesson | None = None
        """What retention learned from that open."""
        self.returning = False
        """It continues a path that was kept or has been evicted, rather than beginning one."""
        self.pinned: list[int] = []
        """First pages of runs pinned for it."""

    def stand_on(self, snapshot: Snapshot | None) -> None:
        """``snapshot`` is now the deepest on the row's path (None: it ends)."""
        if self.last is not None:
            self.last.rows -= 1
        if snapshot is not None:
            snapshot.rows += 1
        self.last = snapshot
