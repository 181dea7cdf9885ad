"""Which prompts can still be on time, and in which order: one machine, known times, deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from k3stack.scheduler.request import Entry, Phase


class Prompt(NamedTuple):
    """A prompt that could be computed next."""

    due: float
    """When its computation must be over."""
    order: int
    seconds: float
    """That its computation takes by itself."""
    left: int
    """Tokens to compute."""
    entry: Entry


def in_time(prompts: Sequence[Prompt], start: float, stretch: float) -> list[Prompt]:
    """The most of ``prompts``, which come by deadline, that can be over in time one after the other.

    The machine is free at ``start``; after a prompt it is free again only after ``stretch`` times its seconds, since
    streams decode in between. Moore and Hodgson's rule: whenever the next would be late, the longest so far is left
    out, of equals the last.
    """
    kept: list[tuple[float, int]] = []
    t = start
    for i, p in enumerate(prompts):
        if start + p.seconds > p.due:
            continue
        heappush(kept, (-p.seconds, -i))
        late = t + p.seconds > p.due
        t += p.seconds * stretch
        if late:
            t += heappop(kept)[0] * stretch
    return [prompts[i] for i in sorted(-i for _, i in kept)]


def all_in_time(prompts: Sequence[Prompt], start: float, stretch: float) -> bool:
    """Whether all of ``prompts``, which come by deadline, have not begun, are of one priority and can be in time: the
    plain case, and the usual one."""
    t = start
    for p in prompts:
        entry = p.entry
        if t + p.seconds > p.due or entry.phase is not Phase.WAITING:
            return False
        if entry.request.priority != prompts[0].entry.request.priority:
            return False
        t += p.seconds * stretch
    return True


def in_order(prompts: Sequence[Prompt], start: float, stretch: float) -> tuple[list[Prompt], set[int]]:
    """The order to compute ``prompts`` in, and the ``order`` of those that are to be on time.

    A higher priority before a lower one. In each, those already begun that can be on time, the others that can by
    deadline, those begun, the rest by arrival.
    """
    prompts = sorted(prompts)
    if all_in_time(prompts, start, stretch):
        return prompts, {p.order for p in prompts}
    result: list[Prompt] = []
    on_time: set[int] = set()
    t = start
    levels: dict[int, list[Prompt]] = {}
    for p in prompts:
        levels.setdefault(p.entry.request.priority, []).append(p)
    for priority in sorted(levels, reverse=True):
        level = levels[priority]
        kept = [p for p in level if p.entry.phase is Phase.PREFILL and start + p.seconds <= p.due]
        t += sum(p.seconds for p in kept) * stretch
        fresh = in_time([p for p in level if p.entry.phase is Phase.WAITING], t, stretch)
        t += sum(p.seconds for p in fresh) * stretch
        kept += fresh
        chosen = {p.order for p in kept}
        rest = [p for p in level if p.order not in chosen]
        rest.sort(key=lambda p: (p.entry.phase is not Phase.PREFILL, p.order))
        result += kept + rest
        on_time |= chosen
    return result, on_time
