"""Which question is asked next, and by whom: groups stay together, later turns wait for earlier ones."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from k3stack.verify.questions import Question

COST = {"off": 1, "low": 1, "high": 2, "max": 4}
"""Roughly how much longer the answers of an effort are."""


@dataclass(slots=True)
class _Group:
    turns: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Turn -> its questions."""
    current: int = -1
    left: int = 0
    """Questions of the current turn without an answer."""

    @property
    def width(self) -> int:
        """Questions of it that can be asked at the same time."""
        return max(len(found) for found in self.turns.values())


def places(questions: Sequence[Question]) -> list[tuple[int, int]]:
    """(group, turn) of each."""
    return [(question.group, question.turn) for question in questions]


class Order:
    """The questions that may be asked, one after the other; ``places``: (group, turn) of each.

    A question may be asked once all questions of its group with a smaller turn have answers: a later turn of a
    conversation then finds the earlier one's prefix computed, and the questions about a document the document. Groups
    are begun as others end, so that about ``at_once`` questions can be open; those with the most turns first, because
    they end last.
    """

    def __init__(self, places: Sequence[tuple[int, int]], at_once: int) -> None:
        self._places, self._at_once = places, at_once
        self._groups: dict[int, _Group] = defaultdict(_Group)
        for i, (group, turn) in enumerate(places):
            self._groups[group].turns[turn].append(i)
        order = sorted(self._groups, key=lambda g: -len(self._groups[g].turns))
        self._rank = {group: rank for rank, group in enumerate(order)}
        self._waiting = order[::-1]
        self._begun = 0
        """Width of the groups that have begun and not ended."""
        self._ready: list[tuple[int, int]] = []
        self.left = len(places)
        """Questions without an answer."""

    def take(self) -> int | None:
        """The index of the next question to ask; None while none may be."""
        while not self._ready and self._waiting and self._begun < self._at_once:
            group = self._waiting.pop()
            self._begun += self._groups[group].width
            self._next_turn(group)
        return heapq.heappop(self._ready)[1] if self._ready else None

    def done(self, index: int) -> None:
        """The question at ``index`` has its answer."""
        self.left -= 1
        number, _ = self._places[index]
        group = self._groups[number]
        group.left -= 1
        if not group.left and not self._next_turn(number):
            self._begun -= group.width

    def _next_turn(self, number: int) -> bool:
        group = self._groups[number]
        later = [turn for turn in group.turns if turn > group.current]
        if not later:
            return False
        group.current = min(later)
        found = group.turns[group.current]
        group.left = len(found)
        for i in found:
            heapq.heappush(self._ready, (self._rank[number], i))
        return True


def shares(questions: Sequence[Question], count: int) -> list[list[int]]:
    """Indices of ``questions`` in at most ``count`` shares of about the same work, in order, whole groups each."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, question in enumerate(questions):
        groups[question.group].append(i)
    members = list(groups.values())
    parts = deal([sum(_cost(questions[i]) for i in own) for own in members], count)
    return [sorted(i for g in part for i in members[g]) for part in parts]


def _cost(question: Question) -> int:
    return COST[question.effort] if question.thinking else COST["off"]


def deal(costs: Sequence[int], count: int) -> list[list[int]]:
    """Indices of ``costs`` in at most ``count`` parts of about the same sum, none of them empty: the dearest first,
    each to the part that has the least."""
    parts: list[tuple[int, int]] = [(0, n) for n in range(min(count, len(costs)))]
    found: list[list[int]] = [[] for _ in parts]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        total, n = heapq.heappop(parts)
        found[n].append(i)
        heapq.heappush(parts, (total + costs[i], n))
    return [sorted(part) for part in found]
