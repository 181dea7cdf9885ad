"""Requests at once by length, counted with the real allocator: one arena against a fixed split with reserved slots.

Opens rows of one length in ``k3stack.memory`` until it says no, for the same budget under each way of dividing it, and
checks the count against the closed form of ``estimate.pools.admitted`` before printing anything.

    python benchmarks/admission.py              prints the tables
    python benchmarks/admission.py --write      puts them into docs/admission.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from k3stack.config.hardware import GIB
from k3stack.config.models import model_geometry
from k3stack.estimate.pools import BlockLayout, PoolPlan, admitted, block_layout, plan_pools
from k3stack.estimate.sglang import SglangSettings, balanced_ratio, slots_per_request
from k3stack.memory import Memory

UNLIMITED = 1 << 20
LENGTHS = (512, 1_024, 2_048, 4_096, 9_216, 16_384, 32_768, 65_536, 131_072, 262_144)
PAGE = Path(__file__).parents[1] / "docs" / "admission.md"
BEGIN, END = "<!-- begin: tables -->", "<!-- end: tables -->"


@dataclass(frozen=True)
class Case:
    """One recipe whose server reported its pools: layout, budget and the ratio it ran with."""

    title: str
    layout: BlockLayout
    budget_gib: float
    ratio: float

    @property
    def budget(self) -> int:
        return int(self.budget_gib * GIB)


def cases() -> list[Case]:
    """The two published boots of 8 B300 without a drafter, at the budget that reproduces their integers."""
    k3 = model_geometry("kimi-k3")
    return [
        Case("8 B300, TP8 (30.368 GiB per GPU; published ratio 1.1)", block_layout(k3, tp=8), 30.368, 1.1),
        Case("8 B300, TP8 DCP8 (29.538 GiB; published ratio 8.82)", block_layout(k3, tp=8, dcp=8), 29.538, 8.82),
    ]


def count(plan: PoolPlan, tokens: int, *, snapshots: bool = False) -> int:
    """Rows of ``tokens`` that the allocator holds at once.

    ``snapshots``: each row's prompt is computed and its state kept; counting stops before a snapshot has to go.
    """
    memory = Memory(plan, prefix_cache=snapshots)
    rows = 0
    while rows < plan.max_running:
        ids = (rows, *range(1_000_000, 1_000_000 + tokens - 1))
        if memory.open(rows, ids[:-1]) is None or memory.extend(rows, tokens) is None:
            break
        if snapshots:
            # Wanted where the prompt ends; it becomes a snapshot of the tree once those tokens are known.
            memory.snapshot(rows, ids, tokens - 1)
            memory.advance(rows, ids, tokens)
            if memory.stats().blocks_snapshot < rows + 1:
                break
        rows += 1
    memory.check()
    return rows


def arena(case: Case) -> PoolPlan:
    """Everything from one arena."""
    return plan_pools(case.layout, case.budget, max_running=UNLIMITED)


def split(case: Case, ratio: float, strategy: str = "auto") -> PoolPlan:
    """SGLang's two pools, to its own integers."""
    settings = SglangSettings(ratio=ratio, strategy=strategy)  # type: ignore[arg-type]
    return plan_pools(case.layout, case.budget, engine="sglang", sglang=settings, within_budget=False)


def best_ratio(case: Case, tokens: int, strategy: str = "auto") -> float:
    """The ratio that balances both pools for ``tokens``."""
    slots = slots_per_request(SglangSettings(strategy=strategy))  # type: ignore[arg-type]
    row = case.layout.cache_layers * case.layout.row_bytes
    return balanced_ratio(
        slots=slots, slot_bytes=case.layout.state_bytes, cell_bytes=row, dcp=case.layout.dcp, tokens=tokens
    )


COLUMNS: list[tuple[str, Callable[[Case, int], PoolPlan], bool]] = [
    ("arena", lambda c, n: arena(c), False),
    ("arena, a snapshot kept for each", lambda c, n: arena(c), True),
    ("split, 5 slots, published ratio", lambda c, n: split(c, c.ratio), False),
    ("split, 5 slots, best ratio", lambda c, n: split(c, best_ratio(c, n)), False),
    ("split, 3 slots, best ratio", lambda c, n: split(c, best_ratio(c, n, "no_buffer"), "no_buffer"), False),
]


def table(case: Case, lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    """One case as a Markdown table; raises RuntimeError where allocator and closed form differ."""
    lines = [
        f"### {case.title}",
        "",
        "| tokens of a request | " + " | ".join(c[0] for c in COLUMNS) + " | arena : published |",
    ]
    lines.append("|" + "---:|" * (len(COLUMNS) + 2))
    for tokens in lengths:
        cells = []
        for name, make, snapshots in COLUMNS:
            plan = make(case, tokens)
            found = count(plan, tokens, snapshots=snapshots)
            said = admitted(plan, tokens, snapshots=1 if snapshots else 0).requests
            if found != said:
                raise RuntimeError(f"{case.title}, {tokens} tokens, {name}: allocator {found}, closed form {said}")
            cells.append(found)
        gain = f"{cells[0] / cells[2]:.2f}" if cells[2] else "–"
        lines.append(f"| {tokens:,} | " + " | ".join(f"{c:,}" for c in cells) + f" | {gain} |")
    return [*lines, ""]


def tables() -> str:
    return "\n".join(line for case in cases() for line in table(case)).strip()


def main() -> None:
    """Print the tables, or put them between the marks of docs/admission.md."""
    text = tables()
    if "--write" not in sys.argv[1:]:
        print(text)
        return
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}\n{text}\n{after}")


if __name__ == "__main__":
    main()
