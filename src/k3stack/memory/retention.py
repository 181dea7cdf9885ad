"""Which snapshot goes when room is needed.

``Recency`` evicts the one used longest ago (behaviour sglang). ``Worth`` evicts the one whose memory earns least:

    rank = (expected returns per open in the coming time) x (tokens a return would save) / (pages that going frees)

The first factor is learned from the traffic itself. For each *kind* of snapshot (the tip of a path, fresh or one that
has been returned to before; an inner one; one that several prompts have used; one a preempted request was promised) we
count, by age since its last use in opens, how many were returned to at that age and how many reached it. That gives
the chance h of a return in each age bin, and from it the Gittins index of a snapshot of age a: the largest value, over
all horizons, of (chance of a return within the horizon) / (expected opens until the return or the horizon). Before
anything is known the chance is the same in each octave of age; the index then falls with age and the order is that of
least recent use. When sessions return in turn, every return is seen at the same age, the index *rises* towards it, and
the freshest tips go first: a stable part of the sessions stays whole instead of each being dropped just before it
returns. Evicted tips leave a *ghost* behind (their depth and a hash of a few pages), so that returns to what is no
longer there are counted too.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from k3stack.memory.tree import Ids, Node, PrefixTree, Snapshot

FRESH_TIP, RETURNING_TIP, INNER, FORK, PROMISED = range(5)
KINDS = 5

EDGES = (1, *(e for k in range(1, 24) for e in (1 << k, 3 << (k - 1))))
"""Lower edges of the age bins: two bins an octave, ages in opens."""
BINS = len(EDGES) - 1
PRIOR = (0.29, 0.29, 0.004, 0.15, 0.7)
"""Chance of a return in one bin (half an octave of age) before anything has been counted, by kind."""
PRIOR_WEIGHT = 1.0
PREPARED = 4
"""Snapshots next to be evicted for which ``prepare`` works ahead."""
FORGET_AT = 1024.0
"""Counts are halved when a kind has this many, so that old traffic is forgotten."""


def age_bin(age: int) -> int:
    """Bin of an age in opens: EDGES[bin] <= age < EDGES[bin + 1] (younger than 1 counts as 1)."""
    if age <= 1:
        return 0
    bits = age.bit_length()
    return min(2 * bits - 3 + (age >> (bits - 2) & 1), BINS - 1)


GhostKey = tuple[int, int]
"""Depth in pages, and a hash of four pages on the way there: one alone is often common to many prompts."""


class Ghost(NamedTuple):
    """What is remembered of an evicted tip."""

    last: int
    kind: int


class Lesson(NamedTuple):
    """What an open taught, to be taken back if its row does not start."""

    snapshot: Snapshot | None
    kind: int
    last: int
    key: GhostKey | None
    ghost: Ghost | None

    @property
    def returning(self) -> bool:
        """The row continues a path at its tip, kept or evicted."""
        return self.ghost is not None or (self.snapshot is not None and self.kind not in (INNER, FORK))


def kind_of(snapshot: Snapshot) -> int:
    """What a snapshot is now.

    What has been used twice is where prompts part, and will be used again as it is; a session uses its tip once and
    leaves a deeper one. A tip that a row runs on will soon lie behind that row's, so it counts as inner.
    """
    if snapshot.promised:
        return PROMISED
    if snapshot.uses >= 2:
        return FORK
    if snapshot.children or snapshot.rows:
        return INNER
    return RETURNING_TIP if snapshot.returning else FRESH_TIP


class Ranking(Protocol):
    """Orders snapshots; the lowest rank goes first."""

    def refresh(self, tree: PrefixTree, ghosts: OrderedDict[GhostKey, Ghost], now: int) -> None:
        """Bring what was learned up to date, before ranks are asked for in bulk."""
        ...

    def rank(self, snapshot: Snapshot, now: int) -> float: ...

    def better(self, gain: int, fork: bool, than: Snapshot, now: int) -> bool:
        """Whether a new snapshot, ``gain`` tokens beyond its next shallower one, at a fork or not, would be worth more
        than ``than``: the whole of it, not by the page, since that is what goes for it."""
        ...

    def returned(self, kind: int, age: int, times: float = 1.0) -> None:
        """A prefix of this kind was asked for again at this age (``times`` -1: it was not, after all)."""
        ...

    def ended(self, kind: int, age: int) -> None:
        """A prefix of this kind is forgotten; it was not asked for up to this age."""
        ...


class Recency:
    """Least recent use."""

    def refresh(self, tree: PrefixTree, ghosts: OrderedDict[GhostKey, Ghost], now: int) -> None:
        return

    def rank(self, snapshot: Snapshot, now: int) -> float:
        return float(snapshot.last)

    def better(self, gain: int, fork: bool, than: Snapshot, now: int) -> bool:
        return True

    def returned(self, kind: int, age: int, times: float = 1.0) -> None:
        return

    def ended(self, kind: int, age: int) -> None:
        return


class Worth:
    """Expected tokens saved per page and open."""

    def __init__(self, page_tokens: int, state_pages: int) -> None:
        self._page_tokens = page_tokens
        self._state_pages = state_pages
        self._returns = [[0.0] * BINS for _ in range(KINDS)]
        self._ends = [[0.0] * BINS for _ in range(KINDS)]
        self._events = 0
        self._learned_at = (-1, -1)
        self._index = [gittins([p] * BINS) for p in PRIOR]

    def returned(self, kind: int, age: int, times: float = 1.0) -> None:
        self._count(self._returns[kind], kind, age, times)

    def ended(self, kind: int, age: int) -> None:
        self._count(self._ends[kind], kind, age, 1.0)

    def _count(self, bins: list[float], kind: int, age: int, times: float) -> None:
        at = age_bin(age)
        bins[at] = max(0.0, bins[at] + times)
        self._events += 1
        if sum(self._returns[kind]) + sum(self._ends[kind]) > FORGET_AT:
            self._returns[kind] = [v / 2 for v in self._returns[kind]]
            self._ends[kind] = [v / 2 for v in self._ends[kind]]

    def refresh(self, tree: PrefixTree, ghosts: OrderedDict[GhostKey, Ghost], now: int) -> None:
        """Relearn when the counts, or the ages of what still waits for a return, have grown by an eighth."""
        events, at = self._learned_at
        if self._events - events <= events // 8 and now - at <= max(1, at // 8, len(tree.snapshots) // 4):
            return
        self._learned_at = (self._events, now)
        waiting = [[0.0] * BINS for _ in range(KINDS)]
        for snapshot in tree.snapshots:
            waiting[kind_of(snapshot)][age_bin(now - snapshot.last)] += 1.0
        for ghost in ghosts.values():
            waiting[ghost.kind][age_bin(now - ghost.last)] += 1.0
        ends = [[e + w for e, w in zip(*pair, strict=True)] for pair in zip(self._ends, waiting, strict=True)]
        tips = chances(
            [a + b for a, b in zip(self._returns[FRESH_TIP], self._returns[RETURNING_TIP], strict=True)],
            [a + b for a, b in zip(ends[FRESH_TIP], ends[RETURNING_TIP], strict=True)],
            [PRIOR[FRESH_TIP]] * BINS,
        )
        for kind in range(KINDS):
            prior = tips if kind in (FRESH_TIP, RETURNING_TIP, FORK) else [PRIOR[kind]] * BINS
            self._index[kind] = gittins(chances(self._returns[kind], ends[kind], prior))

    def rank(self, snapshot: Snapshot, now: int) -> float:
        # Asked for several times in a plan, so written out.
        parent = snapshot.parent
        gain = snapshot.position if parent is None else snapshot.position - parent.position
        size = self._state_pages
        if not snapshot.children and not snapshot.rows:
            size += -(-gain // self._page_tokens)
        return self.rate(kind_of(snapshot), now - snapshot.last) * gain / size

    def better(self, gain: int, fork: bool, than: Snapshot, now: int) -> bool:
        return self.rate(FORK if fork else INNER, 1) * gain > self._earnings(than, now)

    def _earnings(self, snapshot: Snapshot, now: int) -> float:
        """Expected tokens saved per open."""
        return self.rate(kind_of(snapshot), now - snapshot.last) * snapshot.gain

    def rate(self, kind: int, age: int) -> float:
        """Expected returns per open of a snapshot of this kind and age, between the bins' edges by proportion."""
        table = self._index[kind]
        if age <= 1:
            return table[0]
        at = age_bin(age)
        if at + 1 >= BINS:
            return table[at]
        low, high = EDGES[at], EDGES[at + 1]
        return table[at] + (table[at + 1] - table[at]) * (age - low) / (high - low)


def chances(returns: list[float], ends: list[float], prior: list[float]) -> list[float]:
    """Chance of a return in each bin among those that reach it: counted, and mixed with the prior."""
    at_risk = 0.0
    result = [0.0] * BINS
    for i in range(BINS - 1, -1, -1):
        at_risk += returns[i]
        result[i] = (returns[i] + PRIOR_WEIGHT * prior[i]) / (at_risk + PRIOR_WEIGHT)
        at_risk += ends[i]
    return result


def gittins(chance: list[float]) -> list[float]:
    """For each bin, the best ratio over horizons of (chance of a return) to (expected opens spent waiting)."""
    widths = [EDGES[i + 1] - EDGES[i] for i in range(BINS)]
    result = [0.0] * BINS
    for start in range(BINS):
        alive, gained, waited, best = 1.0, 0.0, 0.0, 0.0
        for i in range(start, BINS):
            gained += alive * chance[i]
            waited += alive * widths[i] * (1.0 - 0.5 * chance[i])
            best = max(best, gained / waited)
            alive *= 1.0 - chance[i]
            if (gained + alive) / waited <= best:
                break  # not even a certain return of all that are left would raise it
        result[start] = best
    return result


class Retention:
    """The next snapshot to evict, and the ghosts of those that went."""

    def __init__(self, tree: PrefixTree, ranking: Ranking, *, ghosts: int) -> None:
        self._tree = tree
        self._ranking = ranking
        self._most_ghosts = ghosts
        self.ghosts: OrderedDict[GhostKey, Ghost] = OrderedDict()
        self._ghosts_at: dict[int, int] = {}  # how many ghosts of each depth, so that few pages need be looked up
        self.now = 0
        """Opens so far."""
        # Lowest rank last. Ranks move with age, so an entry's is looked at again when it is about to go, and all are
        # sorted anew now and then; (-rank, counter) orders entries the same way in every run.
        self._queue: list[tuple[float, int, Snapshot]] = []
        self._counter = 0
        self._sorted_at = 0

    def prepare(self) -> None:
        """Do ahead what the next evictions need: the order, and the paths (walked whole) of the first to go."""
        if self.now - self._sorted_at > len(self._tree.snapshots) // 32:
            self._sort()
        self.victim()  # ranks that have moved since are put right
        for _, _, snapshot in self._queue[-PREPARED:]:
            if snapshot.ghost is None and snapshot.node.depth and kind_of(snapshot) not in (INNER, FORK):
                snapshot.ghost = _key_of(snapshot.node)

    def victim(self) -> Snapshot | None:
        """The snapshot that should go next; None when none may go."""
        if self.now - self._sorted_at > len(self._tree.snapshots) // 16:
            self._sort()
        queue = self._queue
        while queue:
            stored, _, snapshot = queue[-1]
            if snapshot.parent is None or snapshot.locks:
                queue.pop()
                continue
            rank = self._ranking.rank(snapshot, self.now)
            if rank > -stored and len(queue) > 1 and rank > -queue[-2][0]:
                queue.pop()
                self.changed(snapshot)
                continue
            return snapshot
        return None

    def victim_with_pages(self) -> Snapshot | None:
        """The first in the order of ``victim`` whose going frees pages too; None when there is none."""
        if self.now - self._sorted_at > len(self._tree.snapshots) // 16:
            self._sort()
        for _, _, snapshot in reversed(self._queue):
            if snapshot.parent is None or snapshot.locks:
                continue
            if snapshot.page >= 0 or (not snapshot.children and not snapshot.node.locks):
                return snapshot
        return None

    def _sort(self) -> None:
        self._sorted_at = self.now
        self._ranking.refresh(self._tree, self.ghosts, self.now)
        rank, now = self._ranking.rank, self.now
        first = self._counter
        self._queue = [(-rank(s, now), first + i, s) for i, s in enumerate(self._tree.snapshots)]
        self._counter += len(self._queue)
        self._queue.sort()

    def better(self, gain: int, fork: bool, than: Snapshot) -> bool:
        """Whether a new snapshot would be worth more than ``than`` (see ``Ranking``)."""
        return self._ranking.better(gain, fork, than, self.now)

    def changed(self, snapshot: Snapshot) -> None:
        """A snapshot is new, free again, or worth less than before."""
        if len(self._queue) > 64 + 2 * len(self._tree.snapshots):
            self._sort()
        self._counter += 1
        insort(self._queue, (-self._ranking.rank(snapshot, self.now), self._counter, snapshot))

    def learn(self, snapshot: Snapshot | None, key: GhostKey | None) -> Lesson:
        """A row opens that can reuse ``snapshot``, and continues the evicted tip ``key``. Called before the row locks
        its path, and before room is made for it."""
        self.now += 1
        kind = kind_of(snapshot) if snapshot is not None else INNER
        ghost = self._remove_ghost(key) if key is not None else None
        lesson = Lesson(snapshot, kind, snapshot.last if snapshot is not None else 0, key, ghost)
        if ghost is not None:
            self._ranking.returned(ghost.kind, self.now - ghost.last)
        if snapshot is not None:
            self._ranking.returned(kind, self.now - snapshot.last)
            snapshot.last = self.now
            snapshot.uses += 1
        return lesson

    def unlearn(self, lesson: Lesson) -> None:
        """The row did not start after all."""
        snapshot, ghost = lesson.snapshot, lesson.ghost
        if ghost is not None and lesson.key is not None:
            self._ranking.returned(ghost.kind, self.now - ghost.last, -1.0)
            self._add_ghost(lesson.key, ghost)
        if snapshot is not None:
            self._ranking.returned(lesson.kind, self.now - lesson.last, -1.0)
            snapshot.last = lesson.last
            snapshot.uses -= 1
        self.now -= 1

    def evicted(self, snapshot: Snapshot) -> None:
        """``snapshot`` is about to go; a tip leaves its ghost."""
        kind, node = kind_of(snapshot), snapshot.node
        if kind in (INNER, FORK) or not node.depth:
            self._ranking.ended(kind, self.now - snapshot.last)
            return
        self._add_ghost(snapshot.ghost or _key_of(node), Ghost(snapshot.last, kind))
        if len(self.ghosts) > self._most_ghosts:
            old = self._remove_ghost(next(iter(self.ghosts)))
            self._ranking.ended(old.kind, self.now - old.last)

    def _add_ghost(self, key: GhostKey, ghost: Ghost) -> None:
        if key not in self.ghosts:
            self._ghosts_at[key[0]] = self._ghosts_at.get(key[0], 0) + 1
        self.ghosts[key] = ghost

    def _remove_ghost(self, key: GhostKey) -> Ghost:
        self._ghosts_at[key[0]] -= 1
        if not self._ghosts_at[key[0]]:
            del self._ghosts_at[key[0]]
        return self.ghosts.pop(key)

    def find_ghost(self, ids: Ids, beyond: int) -> GhostKey | None:
        """The deepest ghost on the prefix ``ids``, more than ``beyond`` pages deep."""
        at, width, deepest = self._ghosts_at, self._tree.page_tokens, len(ids) // self._tree.page_tokens
        depths: Iterable[int] = range(deepest, beyond, -1)
        if len(at) < deepest - beyond:
            depths = sorted((d for d in at if beyond < d <= deepest), reverse=True)
        for depth in depths:
            if depth in at:
                pages = (ids[(d - 1) * width : d * width] for d in _sampled(depth))
                key = (depth, hash(tuple(pages)))
                if key in self.ghosts:
                    return key
        return None

    def clear(self) -> None:
        """Forget the ghosts; what was learned of the traffic stays."""
        self.ghosts.clear()
        self._ghosts_at.clear()


def _sampled(depth: int) -> tuple[int, int, int, int]:
    """The pages (counted from 1) that a ghost of ``depth`` pages is known by."""
    return depth, max(1, 3 * depth // 4), max(1, depth // 2), 1


def _key_of(node: Node) -> GhostKey:
    keys: dict[int, Ids] = {}
    step, wanted = node, set(_sampled(node.depth))
    while step.parent is not None:
        if step.depth in wanted:
            keys[step.depth] = step.key
        step = step.parent
    return node.depth, hash(tuple(keys[d] for d in _sampled(node.depth)))
