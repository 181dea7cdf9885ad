"""Files of recorded traffic as rows: JSON lines, JSON, CSV and parquet, each row with the place it came from.

What cannot be read is a UserError that names file, place and field.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3stack.errors import UserError


@dataclass(frozen=True, slots=True)
class Row:
    """One row: ``place`` is 'line 3', 'entry 3' or 'row 3', from 1."""

    file: Path
    place: str
    values: Mapping[str, Any]

    def wrong(self, what: str) -> UserError:
        return UserError(f"{self.file}: {self.place}: {what}", param="workload")

    def number(self, name: str, low: float = 0.0) -> float:
        """The number in field ``name``, at least ``low``."""
        if name not in self.values:
            raise self.wrong(f"the field {name!r} is missing; it has {', '.join(map(str, self.values)) or 'none'}")
        value = self.values[name]
        try:
            found = float(value)
        except (TypeError, ValueError):
            raise self.wrong(f"{name} is {value!r}; a number is expected") from None
        if not low <= found < 1e15:
            raise self.wrong(f"{name} is {value!r}; it must be at least {low:g}")
        return found

    def whole(self, name: str, low: int = 0) -> int:
        """The whole number in field ``name``, at least ``low``."""
        found = self.number(name, low)
        if found != int(found):
            raise self.wrong(f"{name} is {self.values[name]!r}; a whole number is expected")
        return int(found)

    def decoded(self, name: str) -> Any:
        """Field ``name``, which data sets also keep as JSON in a string."""
        value = self.values.get(name)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as e:
            raise self.wrong(f"{name} is a string that is not JSON ({e})") from None


def json_lines(file: Path) -> Iterator[Row]:
    """One object a line; empty lines are skipped."""
    with file.open("rb") as f:
        for number, line in enumerate(f, start=1):
            if line.strip():
                yield _row(file, f"line {number}", _loads(file, line.strip(), f"line {number} is not JSON"))


def json_array(file: Path) -> Iterator[Row]:
    """One file that is a list of objects."""
    for number, value in enumerate(_loads(file, file.read_bytes(), "not JSON"), start=1):
        yield _row(file, f"entry {number}", value)


def csv_rows(file: Path) -> Iterator[Row]:
    """A table with a line of names on top."""
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as f:
        for number, values in enumerate(csv.DictReader(f), start=2):
            yield Row(file, f"line {number}", {k: v for k, v in values.items() if k is not None})


def parquet_rows(file: Path) -> Iterator[Row]:
    """Rows of a parquet file. Its columns hold every member that any row has: those that are null are left out."""
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{file}: reading parquet needs pyarrow (pip install pyarrow)", param="workload") from None
    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
            for values in batch.to_pylist():
                number += 1
                yield Row(file, f"row {number}", _without_nulls(values))
    except pyarrow.ArrowException as e:
        raise UserError(f"{file}: after row {number}: not readable as parquet ({e})", param="workload") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _loads(file: Path, text: bytes, complaint: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{file}: {complaint}: it is nested too deep", param="workload") from None
    except json.JSONDecodeError as e:
        at = f"line {e.lineno}, column {e.colno}" if e.lineno > 1 else f"column {e.colno}"
        raise UserError(f"{file}: {complaint} ({e.msg}: {at})", param="workload") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{file}: {complaint}: byte {e.start} is not UTF-8", param="workload") from None
    except ValueError as e:  # a number of thousands of digits
        raise UserError(f"{file}: {complaint} ({e})", param="workload") from None


def _row(file: Path, place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{file}: {place} is {type(value).__name__}, not an object", param="workload")
    return Row(file, place, value)
