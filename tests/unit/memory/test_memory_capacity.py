"""Requests of 8,500 tokens at Kimi-K3's sizes: the arena against fixed pools, and the table in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.arena_capacity import BUDGET_GIB, TOKENS, Row, markdown, table

DOCS = Path(__file__).parents[3] / "docs" / "arena.md"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(table(TOKENS, BUDGET_GIB))


def test_published_figures_of_the_fixed_pools(rows: list[Row]) -> None:
    published = {r.layout: r.requests for r in rows if r.pools == "5 slots, published"}
    assert published == {"TP8": 60, "TP8 DCP8": 104}


@pytest.mark.parametrize(
    ("layout", "pools", "least"),
    [
        ("TP8", "5 slots, published", 1.8),
        ("TP8 DCP8", "5 slots, published", 3.0),
        ("TP8", "3 slots, best", 1.3),
        ("TP8 DCP8", "3 slots, best", 2.0),
    ],
)
def test_arena_holds_more(rows: list[Row], layout: str, pools: str, least: float) -> None:
    (row,) = [r for r in rows if (r.layout, r.pools) == (layout, pools)]
    assert row.arena_gain >= least
    assert row.left_snapshots >= row.requests  # beside as many requests, a snapshot for each


def test_table_in_the_docs_is_the_computed_one(rows: list[Row]) -> None:
    assert "\n".join(markdown(rows)) in DOCS.read_text()
