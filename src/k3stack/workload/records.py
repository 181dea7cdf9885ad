"""One record a request: what a load run writes, a simulation writes the same, and reports and replays read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from k3stack.config.files import why
from k3stack.errors import UserError

RECORD_VERSION = 1
End = Literal["stop", "length", "tool_calls", "abort", "rejected", "error", "unfinished"]


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Times are seconds after the run's start. ``arrival_s`` is when the request was due, ``sent_s`` when it left."""

    rid: str
    session: int
    turn: int
    arrival_s: float
    sent_s: float | None = None
    started_s: float | None = None
    """When its first chunk was planned (a simulation knows)."""
    first_s: float | None = None
    finished_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    tool_call: bool = False
    stream: bool = False
    priority: int = 0
    end: End = "unfinished"
    error: str | None = None
    longest_gap_s: float = 0.0
    token_s: list[float] | None = None
    """Time of every token, kept for watched streams (and for all of them on request)."""

    @property
    def ok(self) -> bool:
        return self.end in ("stop", "length", "tool_calls")

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for answers of one token."""
        if self.first_s is None or self.finished_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_s) / (self.output_tokens - 1)


def write_records(path: str | Path, records: Iterable[Record], meta: dict[str, Any]) -> None:
    """JSON lines: a header with ``meta``, then one record a line."""
    encode = msgspec.json.encode
    with open(path, "wb") as f:
        f.write(encode({"k3stack_records": RECORD_VERSION, **meta}) + b"\n")
        for r in records:
            f.write(encode(r) + b"\n")


def read_records(path: str | Path) -> tuple[list[Record], dict[str, Any]]:
    """Read what ``write_records`` wrote; UserError names the line that is not a record, or why the file is not read."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as e:
        raise UserError(f"{path}: {why(e)}", param="file") from None
    try:
        meta = msgspec.json.decode(lines[0]) if lines else {}
    except (msgspec.DecodeError, RecursionError) as e:
        raise UserError(f"{path}: line 1 is not JSON ({e})", param="file") from None
    if not isinstance(meta, dict) or meta.get("k3stack_records") != RECORD_VERSION:
        raise UserError(f"{path}: not a file of records (version {RECORD_VERSION}) of `k3 bench` or `k3 simulate`")
    decoder = msgspec.json.Decoder(Record)
    records = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, RecursionError) as e:
            raise UserError(f"{path}: line {number} is not a record ({e})", param="file") from None
    return records, meta
