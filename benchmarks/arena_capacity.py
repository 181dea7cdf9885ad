"""How many requests fit at once: the arena against fixed pools, by filling the real allocator until it says no.

Kimi-K3's true sizes (fp32 state, bf16 rows), no tensors. A request counts with the pages of all its tokens and its
state. The fixed pools are behaviour ``sglang`` of the same memory: sizes by that server's rule, five or three state
slots reserved for each running request, at the published state:cache ratio and at the ratio that admits most requests
of this length. ``left`` is what the arena has for snapshots when it runs as many requests as the pools beside it can.

    python benchmarks/arena_capacity.py [--tokens 8500] [--budget-gib 30.368] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from k3stack.config.models import model_geometry
from k3stack.errors import DoesNotFit
from k3stack.estimate.pools import BlockLayout, PoolPlan, block_layout, plan_pools
from k3stack.estimate.sglang import SglangSettings
from k3stack.memory import Memory

BUDGET_GIB = 30.368
TOKENS = 8_500
TP = 8
PUBLISHED_RATIO = {1: 1.1, 8: 8.82}
"""By DCP width, for about this length: the published recipes for 8 B300."""
STRATEGY: dict[int, Literal["extra_buffer", "no_buffer"]] = {5: "extra_buffer", 3: "no_buffer"}
PLENTY = 4_096


@dataclass
class Row:
    """One line of the table."""

    layout: str
    pools: str
    ratio: float | None
    requests: int
    bound_by: str
    arena_gain: float
    """Requests in the arena over requests here."""
    left_snapshots: int
    """Snapshots that the arena could keep beside as many requests as here."""
    left_gib: float


def fill(plan: PoolPlan, tokens: int) -> tuple[int, Memory]:
    """Open requests of ``tokens`` tokens, each with room for all of them, until the memory refuses."""
    memory = Memory(plan)
    count = 0
    while True:
        prompt = (count, *range(1, tokens))
        if memory.open(count, prompt) is None:
            break
        if memory.extend(count, tokens) is None:
            memory.close(count, prompt, state_at=None, keep=False)
            break
        count += 1
    memory.check()
    return count, memory


def pools(layout: BlockLayout, budget: int, slots: int, ratio: float) -> PoolPlan:
    settings = SglangSettings(strategy=STRATEGY[slots], max_running=PLENTY)
    return plan_pools(layout, budget, engine="sglang", ratio=ratio, sglang=settings, within_budget=False)


def best_ratio(layout: BlockLayout, budget: int, slots: int, tokens: int) -> float:
    """The ratio that admits most requests of ``tokens`` tokens; the smallest such in steps of half a percent."""
    pages = -(-tokens // layout.page_tokens)
    best, most = 1.0, -1
    for step in range(-600, 1000):
        ratio = 1.005**step
        try:
            plan = pools(layout, budget, slots, ratio)
        except DoesNotFit:
            continue
        count = min(plan.states_alone // slots, plan.pages_alone // pages)
        if count > most:
            best, most = ratio, count
    return best


def table(tokens: int, budget_gib: float) -> Iterator[Row]:
    budget = int(budget_gib * 2**30)
    for dcp in (1, 8):
        layout = block_layout(model_geometry("kimi-k3"), tp=TP, dcp=dcp)
        name = f"TP{TP}" + (f" DCP{dcp}" if dcp > 1 else "")
        arena_plan = plan_pools(layout, budget, max_running=PLENTY)
        arena, memory = fill(arena_plan, tokens)
        kind = "state" if layout.pages_per_block * layout.page_tokens > tokens else "cache"
        yield Row(name, "arena", None, arena, kind, 1.0, memory.stats().blocks_free, _gib(memory))
        for slots, which, ratio in (
            (5, "published", PUBLISHED_RATIO[dcp]),
            (5, "best", best_ratio(layout, budget, 5, tokens)),
            (3, "best", best_ratio(layout, budget, 3, tokens)),
        ):
            count, other = fill(pools(layout, budget, slots, ratio), tokens)
            bound = "state" if count == other.max_running else "cache"
            beside = _running(arena_plan, count, tokens)
            left = beside.stats().blocks_free
            yield Row(name, f"{slots} slots, {which}", ratio, count, bound, arena / count, left, _gib(beside))


def _running(plan: PoolPlan, count: int, tokens: int) -> Memory:
    """The arena with ``count`` requests in it."""
    memory = Memory(plan)
    for seq in range(count):
        memory.open(seq, (seq, *range(1, tokens)))
        memory.extend(seq, tokens)
    return memory


def _gib(memory: Memory) -> float:
    stats = memory.stats()
    return stats.blocks_free * stats.block_bytes / 2**30


def markdown(rows: list[Row]) -> Iterator[str]:
    """The table as the docs have it."""
    yield "| layout | memory | state:cache | requests | bound by | arena holds | left for snapshots in the arena |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        gain = "" if row.ratio is None else f"{row.arena_gain:.2f} times as many"
        left = f"{row.left_snapshots} ({row.left_gib:.1f} GiB)"
        yield f"| {row.layout} | {row.pools} | {ratio} | {row.requests} | {row.bound_by} | {gain} | {left} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--budget-gib", type=float, default=BUDGET_GIB)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = list(table(args.tokens, args.budget_gib))
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(f"requests of {args.tokens:,} tokens in {args.budget_gib} GiB, Kimi-K3, fp32 state, bf16 rows\n")
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
