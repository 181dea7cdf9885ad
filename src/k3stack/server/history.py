"""The last ten minutes of the engine's numbers, one sample a second, for those who come to look after the fact."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

PERIOD_S = 1.0
KEPT = 600

MEMORY = (
    "blocks", "pages_per_block", "page_tokens", "block_bytes", "blocks_free", "blocks_running", "blocks_snapshot",
    "blocks_reserved", "blocks_pinned", "pages_running", "pages_cached", "pages_free_in_slabs", "pages_pinned", "opens",
    "hits", "misses", "pages_without_snapshot", "prompt_tokens", "cached_tokens", "tokens_without_snapshot", "moves",
)  # fmt: skip
SCHEDULER = ("waiting", "prefilling", "decoding", "finishing", "prefill_tokens", "decode_tokens", "preempted")
KINDS = ("prefill", "decode", "mixed")
TIMES = ("steps", "seconds", "p99_s")
COLUMNS: tuple[str, ...] = (
    "time",
    *MEMORY,
    *SCHEDULER,
    *(f"{kind}_{what}" for kind in KINDS for what in TIMES),
)
"""What a sample holds, in order. ``time``: seconds since 1970; the others are named as in the engine's statistics, and
None where it did not give them."""

Row = tuple[float | None, ...]


class History:
    """Samples of the engine's statistics, numbered from 1."""

    def __init__(self, stats: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._stats = stats
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._taken = 0
        self._following = False

    async def follow(self) -> None:
        """Take a sample a second until cancelled."""
        self._following = True
        try:
            while True:
                await self.take()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._following = False

    async def take(self) -> None:
        """Take one sample now."""
        stats = await self._stats()
        memory, scheduler, steps = (stats.get(part, {}) for part in ("memory", "scheduler", "steps"))
        row = (
            time.time(),
            *(memory.get(name) for name in MEMORY),
            *(scheduler.get(name) for name in SCHEDULER),
            *(steps.get(kind, {}).get(what) for kind in KINDS for what in TIMES),
        )
        self._rows.append(row)
        self._taken += 1

    async def since(self, number: int) -> dict[str, Any]:
        """Samples after the one with that number, json-able; ``next`` is what to ask for then. Where nobody follows
        the engine, one is taken on the way."""
        if not self._following:
            await self.take()
        if number > self._taken:  # of a server that ran here before
            number = 0
        new = min(self._taken - number, len(self._rows))
        return {"columns": COLUMNS, "next": self._taken, "rows": list(self._rows)[len(self._rows) - new :]}
