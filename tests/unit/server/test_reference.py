"""The documentation's tables are those of the code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from k3stack.memory import MemoryStats
from k3stack.scheduler.scheduler import SchedulerStats
from k3stack.server.app import ROUTES
from k3stack.server.engine_metrics import NOT_OFFERED, TABLE
from k3stack.server.reference import fill, tables

DOCS = Path(__file__).parents[3] / "docs"
SERVE = DOCS / "serve.md"


@pytest.mark.parametrize("page", ["serve.md", "metrics.md"])
def test_tables_are_up_to_date(page: str) -> None:
    text = (DOCS / page).read_text()
    assert fill(text) == text, f"run: python -m k3stack.server.reference docs/{page}"


def test_every_table_is_shown() -> None:
    text = SERVE.read_text() + (DOCS / "metrics.md").read_text()
    assert [name for name in tables() if f"<!-- table: {name} -->" not in text] == []


def test_every_endpoint_is_documented() -> None:
    text = SERVE.read_text()
    assert [path for _, path, _, _ in ROUTES if path.split("{")[0].rstrip("/") not in text] == []


def test_every_number_of_the_engine_is_a_metric_or_has_a_reason_not_to_be() -> None:
    offered = {path for row in TABLE for path in row.sources.values()}
    numbers = {f"memory.{field.name}" for field in dataclasses.fields(MemoryStats)}
    numbers |= {f"scheduler.{field.name}" for field in dataclasses.fields(SchedulerStats)} - {"scheduler.finished"}
    assert numbers - offered == {path for path in NOT_OFFERED if not path.startswith("steps.")}
    assert {path for path in offered if path.split(".")[0] in ("memory", "scheduler")} <= numbers | {
        f"scheduler.finished.{reason}" for reason in ("stop", "length", "abort", "rejected", "error")
    }


def test_metric_names_are_unique() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
