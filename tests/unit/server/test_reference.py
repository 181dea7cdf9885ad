"""The documentation's tables are those of the code."""

from __future__ import annotations

from pathlib import Path

from k3stack.server.app import ROUTES
from k3stack.server.reference import fill, tables

SERVE = Path(__file__).parents[3] / "docs" / "serve.md"


def test_tables_are_up_to_date() -> None:
    text = SERVE.read_text()
    assert fill(text) == text, "run: python -m k3stack.server.reference docs/serve.md"
    assert all(f"<!-- table: {name} -->" in text for name in tables())


def test_every_endpoint_is_documented() -> None:
    text = SERVE.read_text()
    assert [path for _, path, _, _ in ROUTES if path.split("{")[0].rstrip("/") not in text] == []
