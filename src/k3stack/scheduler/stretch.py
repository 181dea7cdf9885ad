"""Stretches of decode steps in which nothing happens but one more token for each row: a simulator skips through them.

A real server never uses this. The conditions are those under which ``plan`` and ``commit`` would take their shortest
paths for every one of the steps; skipping them leaves the same state behind, to the last field.
"""

from __future__ import annotations

from k3stack.scheduler.core import Core
from k3stack.scheduler.request import Phase
from k3stack.scheduler.rules import Rules


def turns_ahead(core: Core) -> int:
    """How many turns (commit the oldest step, plan another) are sure to be of that kind if nobody comes or goes."""
    if core.queue.entries or core.prefilling or core.special or core.reset or not core.flights:
        return 0
    pending = core.pending
    if pending.ended or pending.pages or pending.before:
        return 0
    rows, entries = core.rows.decode_set()
    if not rows or any(f.rows is not rows or f.work or f.void for f in core.flights):
        return 0
    known = 1 << 62
    for entry in entries:
        if entry.phase is not Phase.DECODE or entry.stop_ids or entry.stops:
            return 0
        known = min(known, entry.mark - len(entry.ids) - 1)
    return max(0, min(known, core.rows.steps_until_due()))


def skip(core: Core, rules: Rules, turns: int, first: tuple[int, ...], stride: int) -> None:
    """Apply ``turns`` turns, at most what ``turns_ahead`` says. ``first``: the token each row gets in the first of
    them, in the order of the decode set; the next ones follow at steps of ``stride`` (0: all the same)."""
    rows, entries = core.rows.decode_set()
    core.rows.skip(turns)
    for entry, token in zip(entries, first, strict=True):
        entry.ids.extend(range(token, token + turns) if stride else [token] * turns)
    for flight in core.flights:
        flight.step += turns
    core.committed += turns
    core.next_step += turns
    core.counts["decode_tokens"] += turns * len(rows)
    for _ in range(turns):
        rules.decoded(len(rows))
