"""Scores a server on a file of questions with numbers for answers (JSON lines as of GSM8K)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from k3stack.config.files import read_text
from k3stack.errors import UserError
from k3stack.verify.statistics import wilson
from k3stack.verify.target import Answer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
INSTRUCTION = "\nEnd your answer with a line that holds only the number."


class Asked(Protocol):
    """What ``RemoteTarget`` offers here."""

    name: str

    def ask_plain(self, texts: Sequence[str], tell: Callable[[int], None]) -> list[Answer]: ...


@dataclass(frozen=True)
class Item:
    question: str
    answer: float


def read(path: Path, limit: int | None = None) -> list[Item]:
    """Lines of ``{"question": ..., "answer": ...}``; the answer's last number counts (after ``####`` if there is one).

    Raises UserError with the line's number.
    """
    lines = read_text(path, param="--dataset").splitlines()
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question, answer = entry["question"], str(entry["answer"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{path}:{number}: not a JSON object with 'question' and 'answer'", param="--dataset"
            ) from None
        value = last_number(answer.rpartition("####")[2])
        if value is None:
            raise UserError(f"{path}:{number}: the answer holds no number: {answer[:60]!r}", param="--dataset")
        items.append(Item(str(question), value))
        if limit is not None and len(items) == limit:
            break
    if not items:
        raise UserError(f"{path}: no questions", param="--dataset")
    return items


def last_number(text: str) -> float | None:
    """The last number of ``text``, thousands commas removed."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def run(target: Asked, items: Sequence[Item], say: Callable[[str], None]) -> dict[str, Any]:
    """``score`` counts every item; ``score_of_complete`` leaves out answers cut by the token limit and failures."""
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if before * 10 // len(items) != done * 10 // len(items):
            say(f"  {done:,} of {len(items):,}")

    answers = target.ask_plain([item.question + INSTRUCTION for item in items], tell)
    truncated = sum(a.truncated for a in answers)
    failed = sum(a.failure is not None for a in answers)
    right = sum(
        a.failure is None and not a.truncated and last_number(a.content) == item.answer
        for item, a in zip(items, answers, strict=True)
    )
    complete = len(items) - truncated - failed
    return {
        "target": target.name,
        "score": right / len(items),
        "n": len(items),
        "ci": wilson(right, len(items)),
        "wrong": complete - right,
        "truncated": truncated,
        "failed": failed,
        "score_of_complete": right / complete if complete else None,
        "ci_of_complete": wilson(right, complete),
    }
