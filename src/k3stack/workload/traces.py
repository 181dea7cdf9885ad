"""Replay of recorded traffic: message logs, Mooncake and Azure traces, ShareGPT, and our own records.

The format is told by the content, not by the name. Token counts of text without a tokenizer are estimated at
``CHARS_PER_TOKEN`` characters a token, and the caller may pass a better ``count``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from k3stack.errors import UserError
from k3stack.workload.records import read_records
from k3stack.workload.sessions import Session, Turn, Workload
from k3stack.workload.trace_rows import Row, csv_rows, json_array, json_lines, parquet_rows

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
    if not 0 < time_scale < math.inf:
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
    head = b"" if file.suffix == ".parquet" else file.open("rb").read(4096).lstrip()
    first = head.split(b"\n", 1)[0]
    if file.suffix == ".parquet":
        rows = parquet_rows(file)
    elif head.startswith(b"["):
        rows = json_array(file)
    elif b'"k3stack_records"' in first:
        yield from _from_records(file)
        return
    elif head.startswith(b"{"):
        rows = json_lines(file)
    elif b"ContextTokens" in first:
        rows = csv_rows(file)
    else:
        raise UserError(
            f"{file}: unknown trace format{'' if head else ', the file is empty'}; known: message logs (JSON lines, "
            "JSON, parquet), Mooncake (JSON lines), Azure LLM inference (CSV), ShareGPT (JSON), records of `k3 bench` "
            "or `k3 simulate`",
            param="workload",
        )
    for sid, row in enumerate(rows):
        session = _session(row, sid, count)
        if session is not None:
            yield session


def _session(row: Row, sid: int, count: Count) -> Session | None:
    """A row of any of the formats; None where it holds no call."""
    values = row.values
    if "input_length" in values:
        return _mooncake(row, sid)
    if "ContextTokens" in values:
        return _azure(row, sid)
    for name in ("body", "request"):  # a batch file's request, a proxy's log
        if isinstance(values.get(name), Mapping) and "messages" in values[name]:
            row = Row(row.file, f"{row.place}, {name}", {**values, **values[name]})
    for name in ("messages", "conversations", "conversation"):
        if name in row.values:
            return _messages(row, name, sid, count)
    raise row.wrong(
        f"it has the fields {', '.join(sorted(map(str, values))[:8])}; expected 'messages', 'conversations', "
        "'input_length' and 'output_length', or 'ContextTokens' and 'GeneratedTokens'"
    )


def _mooncake(row: Row, sid: int) -> Session:
    at = row.number("timestamp") / 1000 if "timestamp" in row.values else 0.0
    hashes = row.values.get("hash_ids") or ()
    if not isinstance(hashes, (list, tuple)) or not all(isinstance(i, int) for i in hashes):
        raise row.wrong(f"hash_ids is {str(hashes)[:40]!r}; a list of whole numbers is expected")
    turn = Turn(
        new_tokens=max(row.whole("input_length"), 1),
        output_tokens=max(row.whole("output_length"), 1),
        blocks=tuple(hashes) or None,
    )
    return Session(sid=sid, arrival_s=at, turns=(turn,))


def _azure(row: Row, sid: int) -> Session:
    turn = Turn(
        new_tokens=max(row.whole("ContextTokens"), 1),
        output_tokens=max(row.whole("GeneratedTokens"), 1),
    )
    if "TIMESTAMP" not in row.values:
        raise row.wrong("the field 'TIMESTAMP' is missing")
    return Session(sid=sid, arrival_s=_seconds(row, "TIMESTAMP"), turns=(turn,))


_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


def _messages(row: Row, name: str, sid: int, count: Count) -> Session | None:
    """A log row becomes a session: one turn for each assistant message, and a call that its log has no answer to."""
    raw = row.decoded(name)
    if not isinstance(raw, list) or not all(isinstance(m, Mapping) for m in raw):
        raise row.wrong(f"{name} is {str(raw)[:40]!r}; a list of messages is expected")
    messages = [_message(row, f"{name}[{i}]", m) for i, m in enumerate(raw)]
    tools = row.decoded("tools")
    tools = tuple(tools) if isinstance(tools, list) and tools else None
    turns, size = [], count(json.dumps(tools)) if tools else 0
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
        asked = [key for key in ("output_tokens", "max_tokens", "max_completion_tokens") if row.values.get(key)]
        answer = row.whole(asked[0], low=1) if asked else DEFAULT_ANSWER
        turns.append(Turn(new_tokens=max(size, 1), output_tokens=answer, messages=tuple(messages), tools=tools))
    if not turns:
        return None
    times = [key for key in ("timestamp", "created", "created_at") if row.values.get(key) is not None]
    return Session(sid=sid, arrival_s=_seconds(row, times[0]) if times else 0.0, turns=tuple(turns))


def _message(row: Row, place: str, m: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a server takes it: ShareGPT's names turned into ours, members that say nothing left out."""
    if "from" in m:
        if not isinstance(m.get("value"), str):
            raise row.wrong(f"{place} has no text in 'value'")
        return {"role": _SHAREGPT_ROLES.get(str(m["from"]), "system"), "content": m["value"]}
    if not isinstance(m.get("role"), str):
        raise row.wrong(f"{place} has no 'role'; it has {', '.join(map(str, m)) or 'nothing'}")
    return {k: v for k, v in m.items() if v is not None and not (k == "tool_calls" and not v)}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
    calls = message.get("tool_calls")
    return str(message.get("reasoning_content") or "") + str(content or "") + (json.dumps(calls) if calls else "")


def _seconds(row: Row, name: str) -> float:
    """A point in time: seconds, or a date and time, of which those without a zone are taken as UTC."""
    value = row.values[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return row.number(name)
    # The published Azure files have seven fractional digits; Python's parser takes six.
    text = re.sub(r"(\.\d{6})\d+", r"\1", str(value))
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(text)
    except ValueError:
        raise row.wrong(f"{name} is {value!r}; a time is expected") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


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
