"""Known failures as data: which of them a command on this hardware would meet, decided from facts alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3stack.errors import BugError

SEVERITIES = ("fatal", "silent-wrong-output", "hang", "degraded", "warning", "info")
"""Worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, as ``--json`` prints it."""

    id: str
    severity: str
    message: str
    source: str
    refuse: bool = False

    def as_dict(self) -> dict[str, str]:
        return {"id": self.id, "severity": self.severity, "message": self.message, "source": self.source}


@dataclass(frozen=True, slots=True)
class Landmine:
    id: str
    engines: tuple[str, ...]
    severity: str
    refuse: bool
    when: tuple[tuple[Any, ...], ...]
    message: str
    remedy: str
    source: str


@lru_cache(maxsize=1)
def landmines() -> tuple[Landmine, ...]:
    """All entries of ``config/data/landmines.json``; a malformed one is a bug of the package."""
    raw = json.loads((Path(__file__).parents[1] / "config" / "data" / "landmines.json").read_text())
    found = []
    for item in raw["landmines"]:
        when = tuple(tuple(c) for c in item["when"])
        if item["severity"] not in SEVERITIES:
            raise BugError(f"landmine {item['id']}: unknown severity {item['severity']!r}")
        found.append(
            Landmine(
                item["id"],
                tuple(item["engines"]),
                item["severity"],
                bool(item["refuse"]),
                when,
                item["message"],
                item["remedy"],
                item["source"],
            )
        )
    return tuple(found)


def holds(condition: Sequence[Any], facts: Mapping[str, Any]) -> bool:
    """Whether one condition [fact, operator, value] holds. A fact that is missing or None fails every comparison."""
    name, op = condition[0], condition[1]
    fact = facts.get(name)
    if op == "set":
        return fact not in (None, "", False)
    if op == "unset":
        return fact in (None, "", False)
    if op in ("true", "false"):
        return bool(fact) is (op == "true")
    value = condition[2]
    if isinstance(value, str) and value.startswith("$"):
        value = facts.get(value[1:])
    if isinstance(value, list):
        value = tuple(value)
    if op == "==":
        return bool(fact == value)
    if op == "!=":
        return bool(fact != value)
    if fact is None or value is None:
        return False
    if op == "in":
        return fact in value
    comparisons = {"<": fact < value, "<=": fact <= value, ">": fact > value, ">=": fact >= value}
    if op not in comparisons:
        raise BugError(f"landmine condition {condition!r}: unknown operator")
    return bool(comparisons[op])


def findings(engine: str, facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The landmines of ``engine`` whose conditions hold, worst first."""
    found = []
    for mine in landmines():
        if engine in mine.engines and all(holds(c, facts) for c in mine.when):
            text = f"{mine.message} {mine.remedy}".format_map(facts)
            found.append(Finding(mine.id, mine.severity, text, mine.source, mine.refuse))
    return tuple(sorted(found, key=lambda w: SEVERITIES.index(w.severity)))
