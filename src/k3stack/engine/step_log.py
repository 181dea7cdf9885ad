"""A file with one line of JSON a step: what it computed, and how long the device was taken by it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from k3stack.errors import UserError
from k3stack.estimate.work import StepLoad
from k3stack.executor.modelled.loads import LoadMeter
from k3stack.scheduler.plan import StepPlan, StepResult

STEP_LOG_VERSION = 1
FLUSH_S = 1.0
"""A reader of the file is so far behind at most, while steps are made."""
FIELDS = "decode_rows decode_context chunk_rows chunk_tokens chunk_prefix chunk_pairs samples".split()


class StepLog:
    """Told of every plan and result in order. ``rows``: size of the row table.

    A line has the fields of ``StepLoad``, ``seconds`` (from the end of the step before, or from its own submission
    where that was later, to its end: what a queue of steps sees), ``device_s`` (as the executor reports it) and ``at``
    (its end on the machine's monotonic clock).
    """

    def __init__(self, path: str | Path, rows: int, about: Mapping[str, Any]) -> None:
        """``about``: what the head says of the server. Raises UserError where the file cannot be written."""
        try:
            self._file = Path(path).open("wb")  # noqa: SIM115  open as long as the engine
        except OSError as e:
            raise UserError(f"--step-log: {path}: {e.strerror or e}", param="--step-log") from None
        self._file.write(msgspec.json.encode({"k3stack_steps": STEP_LOG_VERSION, **about}) + b"\n")
        self._meter = LoadMeter(rows)
        self._flying: deque[tuple[float, StepLoad]] = deque()
        self._free_at = self._flush_at = 0.0

    def submitted(self, plan: StepPlan) -> None:
        load = self._meter.load(plan.groups[0]) if plan.groups else StepLoad()
        self._flying.append((time.monotonic(), load))

    def finished(self, result: StepResult) -> None:
        now = time.monotonic()
        submitted, load = self._flying.popleft()
        seconds = now - max(submitted, self._free_at)
        self._free_at = now
        if result.error is None:
            line = {"at": round(now, 4), "seconds": round(seconds, 7), "device_s": round(result.seconds, 7)}
            line |= {name: value for name, value in ((n, getattr(load, n)) for n in FIELDS) if value}
            self._file.write(msgspec.json.encode(line) + b"\n")
            if now >= self._flush_at:
                self._file.flush()
                self._flush_at = now + FLUSH_S

    def close(self) -> None:
        self._file.close()
