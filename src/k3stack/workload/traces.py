"""Replay of recorded traffic: message logs, Mooncake and Azure traces, ShareGPT, and our own records.

The format is told by the content, not by the name. Token counts of text without a tokenizer are estimated at
``CHARS_PER_TOKEN`` characters a token, and the caller may pass a better ``count``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from k3stack.errors import UserError
from k3stack.workload.records import read_records
from k3stack.workload.sessions import Session, Turn, Workload

CHARS_PER_TOKEN = 4.0
DEFAULT_ANSWER = 256
Count = Callable[[str], int]


def read_trace(
    path: str | Path,
    *,
    time_scale: float = 1.0,
    limit: int | None = None,
    count: Count | None = None,
) -> Workload:
    """Read a trace file. ``time_scale`` 2 makes the traffic twice as fast; ``limit``: the first so many sessions.

    Raises UserError that names the line for what cannot be read, and the known formats for an unknown file.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such trace file", param="workload")
    if time_scale <= 0:
        raise UserError(f"time scale is {time_scale:g}; it must be above 0", param="time-scale")
    counter = count or (lambda text: max(1, round(len(text) / CHARS_PER_TOKEN)))
    sessions = list(_limited(_sessions(file, counter), limit))
    start = min((s.arrival_s for s in sessions), default=0.0)
    shifted = tuple(
        Session(sid=i, arrival_s=(s.arrival_s - start) / time_scale, turns=s.turns)
        for i, s in enumerate(sorted(sessions, key=lambda s: s.arrival_s))
    )
    return Workload(name=file.name, sessions=shifted).validate()


def _limited(items: Iterable[Session], limit: int | None) -> Iterator[Session]:
    for i, item in enumerate(items):
        if limit is not None and i >= limit:
            return
        yield item


def _sessions(file: Path, count: Count) -> Iterator[Session]:
    if file.suffix == ".parquet":
        yield from _from_rows(_parquet_rows(file), file, count)
        return
    head = file.open("rb").read(4096).lstrip()
    if head.startswith(b"["):
        rows = json.loads(file.read_text())
        yield from _from_rows(((i + 1, r) for i, r in enumerate(rows)), file, count)
    elif head.startswith(b"{"):
        if b'"k3stack_records"' in head.split(b"\n", 1)[0]:
            yield from _from_records(file)
        else:
            yield from _from_rows(_json_lines(file), file, count)
    elif b"ContextTokens" in head.split(b"\n", 1)[0]:
        yield from _azure(file)
    else:
        raise UserError(
            f"{file}: unknown trace format; known: message logs (JSON lines, JSON, parquet), Mooncake (JSON lines), "
            "Azure LLM inference (CSV), ShareGPT (JSON), records of `k3 bench` or `k3 simulate`",
            param="workload",
        )


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open() as f:
        for number, line in enumerate(f, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as e:
                raise UserError(f"{file}: line {number} is not JSON ({e.msg})", param="workload") from None


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{file}: reading parquet needs pyarrow (pip install pyarrow)", param="workload") from None
    number = 0
    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _from_rows(rows: Iterable[tuple[int, Any]], file: Path, count: Count) -> Iterator[Session]:
    for number, row in rows:
        if not isinstance(row, Mapping):
            raise UserError(f"{file}: row {number} is not an object", param="workload")
        if "input_length" in row and "output_length" in row:
            yield _mooncake(row, file, number)
        elif "messages" in row or "conversations" in row or "conversation" in row:
            session = _messages(row, file, number, count)
            if session is not None:
                yield session
        else:
            raise UserError(
                f"{file}: row {number} has the fields {sorted(row)[:8]}; expected 'messages', 'conversations', or "
                "'input_length' and 'output_length'",
                param="workload",
            )


def _mooncake(row: Mapping[str, Any], file: Path, number: int) -> Session:
    try:
        prompt, answer = int(row["input_length"]), int(row["output_length"])
        at = float(row.get("timestamp", 0)) / 1000
        blocks = tuple(int(i) for i in row.get("hash_ids", ())) or None
    except (TypeError, ValueError) as e:
        raise UserError(f"{file}: row {number}: {e}", param="workload") from None
    turn = Turn(new_tokens=max(prompt, 1), output_tokens=max(answer, 1), blocks=blocks)
    return Session(sid=number, arrival_s=at, turns=(turn,))


_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


def _messages(row: Mapping[str, Any], file: Path, number: int, count: Count) -> Session | None:
    """A log row becomes a session: one turn for each assistant message, or one call if none is recorded."""
    raw = row.get("messages") or row.get("conversations") or row.get("conversation")
    if not isinstance(raw, list) or not all(isinstance(m, Mapping) for m in raw):
        raise UserError(f"{file}: row {number}: messages must be a list of objects", param="workload")
    messages = [_message(m) for m in raw]
    tools = row.get("tools")
    tools = tuple(tools) if isinstance(tools, list) and tools else None
    base = count(json.dumps(tools)) if tools else 0
    turns, size = [], base
    for i, message in enumerate(messages):
        text = _text(message)
        if message["role"] == "assistant" and i > 0:
            turns.append(
                Turn(
                    new_tokens=max(size, 1),
                    output_tokens=max(count(text), 1),
                    tool_call=bool(message.get("tool_calls")),
                    messages=tuple(messages[:i]),
                    tools=tools,
                )
            )
        size += count(text)
    if messages and messages[-1]["role"] != "assistant":
        answer = int(row.get("output_tokens") or row.get("max_tokens") or DEFAULT_ANSWER)
        turns.append(Turn(new_tokens=max(size, 1), output_tokens=max(answer, 1), messages=tuple(messages), tools=tools))
    if not turns:
        return None
    return Session(sid=number, arrival_s=_time(row, file, number), turns=tuple(turns))


def _message(m: Mapping[str, Any]) -> dict[str, Any]:
    if "from" in m:
        return {"role": _SHAREGPT_ROLES.get(str(m["from"]), "system"), "content": str(m.get("value", ""))}
    # Parquet rows carry every column of the schema; members that were absent come back as None.
    return {k: v for k, v in m.items() if v is not None}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
    calls = message.get("tool_calls")
    return str(message.get("reasoning_content") or "") + str(content or "") + (json.dumps(calls) if calls else "")


def _time(row: Mapping[str, Any], file: Path, number: int) -> float:
    value = row.get("timestamp", row.get("created", 0.0))
    if value is None:
        return 0.0
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        raise UserError(f"{file}: row {number}: timestamp {value!r} is not a time", param="workload") from None


def _azure(file: Path) -> Iterator[Session]:
    with file.open(newline="") as f:
        for number, row in enumerate(csv.DictReader(f), start=2):
            try:
                # Seven fractional digits in the published files; Python's parser takes six.
                stamp, _, fraction = row["TIMESTAMP"].partition(".")
                at = datetime.fromisoformat(stamp).timestamp() + float("0." + (fraction[:7].strip("+-:Z ") or "0"))
                turn = Turn(
                    new_tokens=max(int(row["ContextTokens"]), 1),
                    output_tokens=max(int(row["GeneratedTokens"]), 1),
                )
            except (KeyError, TypeError, ValueError) as e:
                raise UserError(f"{file}: line {number}: {e}", param="workload") from None
            yield Session(sid=number, arrival_s=at, turns=(turn,))


def _from_records(file: Path) -> Iterator[Session]:
    """Our own records: each session's turns with the lengths and pauses that really happened."""
    records, _ = read_records(file)
    by_session: dict[int, list[Any]] = {}
    for r in records:
        by_session.setdefault(r.session, []).append(r)
    for sid, rows in by_session.items():
        rows.sort(key=lambda r: r.turn)
        turns, before, last_end = [], 0, None
        for r in rows:
            turns.append(
                Turn(
                    new_tokens=max(r.prompt_tokens - before, 1),
                    output_tokens=max(r.output_tokens or r.asked_tokens, 1),
                    tool_call=r.tool_call,
                    think_s=0.0 if last_end is None else max(0.0, r.arrival_s - last_end),
                    priority=r.priority,
                )
            )
            before = r.prompt_tokens + r.output_tokens
            last_end = r.finished_s
        yield Session(sid=sid, arrival_s=rows[0].arrival_s, turns=tuple(turns), stream=rows[0].stream)
