"""The plan that a boot saves: the pools it runs with, and what was predicted against what was found.

``k3 plan --from`` prints it, and a simulation can be started from a real server's pools without copying numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from k3stack.config.files import read_json
from k3stack.errors import UserError
from k3stack.estimate.pools import PoolPlan, admitted

FORMAT = 1
LENGTHS = (1_024, 8_192, 32_768, 131_072)
"""Request lengths (prompt and output tokens) that admission is kept for."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Figures:
    """What a boot predicts or finds. Bytes on one device."""

    weight_bytes: int
    budget_bytes: int
    arena_bytes: int
    blocks: int
    states: int
    """States alone."""
    tokens: int
    """Cache tokens alone."""
    admitted: Mapping[str, int]
    """Requests at once by length in tokens."""


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """Everything in ``pool_plan.json``. ``plan`` is what the server runs with."""

    model: str
    device: str
    plan: PoolPlan
    predicted: Figures
    actual: Figures
    reason: str = ""
    """How the budget came about, in words."""


def default_path() -> Path:
    """Where a server saves its plan when nobody says where: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "k3stack" / "pool_plan.json"


def figures(plan: PoolPlan, weight_bytes: int, context: int | None = None) -> Figures:
    """The figures of ``plan``, with admission at a few lengths up to ``context``."""
    lengths = [n for n in LENGTHS if context is None or n <= context] or [context or LENGTHS[0]]
    return Figures(
        weight_bytes=weight_bytes,
        budget_bytes=plan.budget_bytes,
        arena_bytes=plan.arena_bytes,
        blocks=plan.blocks,
        states=plan.states_alone,
        tokens=plan.tokens_alone,
        admitted={str(n): admitted(plan, n).requests for n in lengths},
    )


def save_plan(path: str | Path, saved: SavedPlan) -> None:
    """Write the JSON whole or not at all (a reader never sees half a file)."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps(plan_json(saved), indent=1) + "\n")
    os.replace(partial, target)


def plan_json(saved: SavedPlan) -> dict[str, Any]:
    """The saved plan as JSON data."""
    return {"format": FORMAT, **asdict(saved)}


def load_plan(path: str | Path) -> SavedPlan:
    """Read what ``save_plan`` wrote. Raises UserError with the file and what is wrong with it."""
    raw = read_json(path, param="--from")
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise UserError(f"{path}: format {found!r} is not {FORMAT}: not a saved plan, or of another version")
    try:
        saved = msgspec.convert(raw, SavedPlan)
    except msgspec.ValidationError as e:
        raise UserError(f"{path}: not a saved plan of format {FORMAT}: {e}") from None
    sizes = {**asdict(saved.plan.layout), "blocks": saved.plan.blocks}
    for name, value in sizes.items():
        if value < (1 if name in ("pages_per_block", "page_rows", "dcp") else 0):
            raise UserError(f"{path}: {name} is {value}, which no boot saves")
    return saved


def comparison_lines(saved: SavedPlan) -> list[str]:
    """Predicted against actual, one line a figure: what a boot prints and what ``k3 plan --from`` shows."""
    before, after = saved.predicted, saved.actual
    lines = [f"{'':<34}{'predicted':>14}{'actual':>14}{'difference':>14}"]
    for name, unit in (
        ("weight_bytes", "GiB"),
        ("budget_bytes", "GiB"),
        ("arena_bytes", "GiB"),
        ("blocks", ""),
        ("states", ""),
        ("tokens", ""),
    ):
        lines.append(_line(_TITLES[name], getattr(before, name), getattr(after, name), unit))
    for length in dict.fromkeys([*before.admitted, *after.admitted]):
        title = f"requests of {int(length):,} tokens"
        lines.append(_line(title, before.admitted.get(length, 0), after.admitted.get(length, 0), ""))
    return lines


_TITLES = {
    "weight_bytes": "weights",
    "budget_bytes": "budget of states and cache",
    "arena_bytes": "arena",
    "blocks": "blocks",
    "states": "states alone",
    "tokens": "cache tokens alone",
}


def _line(title: str, before: int, after: int, unit: str) -> str:
    if unit == "GiB":
        cells: Sequence[str] = [f"{v / GIB:.3f} GiB" for v in (before, after)]
        difference = f"{(after - before) / GIB:+.3f} GiB" if after != before else "none"
    else:
        cells = [f"{v:,}" for v in (before, after)]
        difference = f"{after - before:+,}" if after != before else "none"
    return f"{title:<34}{cells[0]:>14}{cells[1]:>14}{difference:>14}"
