"""A dictionary in place of a device: every cache row and state is the prefix it was computed from.

``Device`` carries plans out in order, as an executor would, and checks that each row finds exactly what its own
tokens demand in its pages and its state. Whatever the memory holds to be free is poisoned between plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from k3stack.estimate.pools import BlockLayout, Engine, PoolPlan
from k3stack.memory import Memory
from k3stack.memory.ops import ClearState, CopyPage, CopyState, Op, SetPage, SetState

POISON = "poison"
VOCAB = 7


def pool(
    blocks: int,
    per_block: int = 4,
    *,
    rows: int = 4,
    dcp: int = 1,
    states: bool = True,
    pages: bool = True,
    engine: Engine = "k3",
    **more: Any,
) -> PoolPlan:
    """A plan of tiny pages (``rows`` cache rows) for an arena of ``blocks`` blocks."""
    layout = BlockLayout(
        cache_layers=1 if pages else 0,
        row_bytes=1,
        state_layers=1 if states else 0,
        recurrent_bytes=per_block * rows,
        conv_bytes=0,
        pages_per_block=per_block if states and pages else 1,
        page_rows=rows,
        dcp=dcp,
    )
    return PoolPlan(engine, layout, blocks * layout.block_bytes, blocks, **more)


def sampled(prefix: tuple[int, ...]) -> int:
    """The token that follows ``prefix``: any function of all of it."""
    return hash(prefix) % VOCAB


@dataclass
class Plan:
    """One step of one group; the fields run in this order."""

    ended: list[int] = field(default_factory=list)
    added: list[tuple[int, int, tuple[int, ...], int]] = field(default_factory=list)
    """row, state block, pages, tokens already there"""
    pages: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    before: list[Op] = field(default_factory=list)
    work: list[tuple[int, int, tuple[int, ...] | None, bool]] = field(default_factory=list)
    """row, start, ids (None: the row's last output), sample"""
    after: list[Op] = field(default_factory=list)
    free_pages: set[int] = field(default_factory=set)
    free_blocks: set[int] = field(default_factory=set)


@dataclass
class _Row:
    block: int
    table: list[int]
    tokens: tuple[int, ...]


class Device:
    """Executes plans; ``run`` returns the sampled tokens by row."""

    def __init__(self, plan: PoolPlan) -> None:
        self.layout = plan.layout
        self.width = plan.layout.page_tokens
        self.cache: dict[tuple[int, int], Any] = {}
        self.states: dict[int, Any] = {}
        self.rows: dict[int, _Row] = {}
        self.real = plan.layout.page_bytes > 0

    def run(self, plan: Plan, prompts: dict[int, tuple[int, ...]]) -> dict[int, int]:
        for row in plan.ended:
            del self.rows[row]
        for row, block, pages, length in plan.added:
            self.rows[row] = _Row(block, list(pages), prompts[row][:length])
        for row, pages in plan.pages:
            self.rows[row].table.extend(pages)
        for op in plan.before:
            self.apply(op)
        out = {row: self.forward(row, start, ids) for row, start, ids, _ in plan.work}
        for op in plan.after:
            self.apply(op)
        for page in plan.free_pages:
            for i in range(self.width):
                self.cache[page, i] = POISON
        for block in plan.free_blocks:
            self.states[block] = POISON
        return {row: out[row] for row, _, _, sample in plan.work if sample}

    def apply(self, op: Op) -> None:
        match op:
            case ClearState(block):
                self.states[block] = ()
            case CopyState(src, dst):
                self.states[dst] = self.states[src]
            case CopyPage(src, dst, rows):
                for i in range(rows * self.layout.dcp):
                    self.cache[dst, i] = self.cache.get((src, i), POISON)
            case SetPage(row, index, page):
                self.rows[row].table[index] = page
            case SetState(row, block):
                self.rows[row].block = block

    def forward(self, row: int, start: int, ids: tuple[int, ...] | None) -> int:
        r = self.rows[row]
        assert len(r.tokens) == start, f"row {row} is at {len(r.tokens)}, the plan says {start}"
        if self.real:
            for i in range(start):
                found = self.cache.get((r.table[i // self.width], i % self.width))
                assert found == r.tokens[: i + 1], f"row {row} reads {found} at {i}, not {r.tokens[: i + 1]}"
        if r.block >= 0:
            state = self.states.get(r.block)
            assert state == r.tokens, f"row {row} has the state of {state}, not of {r.tokens}"
        for token in ids if ids is not None else (sampled(r.tokens),):
            r.tokens = (*r.tokens, token)
            at = len(r.tokens) - 1
            if self.real:
                self.cache[r.table[at // self.width], at % self.width] = r.tokens
        if r.block >= 0:
            self.states[r.block] = r.tokens
        return sampled(r.tokens)


def free_now(memory: Memory) -> tuple[set[int], set[int]]:
    """Pages and blocks that the memory would give to anyone."""
    arena = memory._arena
    pages = set(range(arena.blocks * arena.pages_per_block))
    pages -= set(arena.pages_in_use())
    states = set(arena.states_in_use())
    pages -= {p for b in states for p in range(b * arena.pages_per_block, (b + 1) * arena.pages_per_block)}
    used = {p // arena.pages_per_block for p in arena.pages_in_use()} | states
    return pages, set(range(arena.blocks)) - used
