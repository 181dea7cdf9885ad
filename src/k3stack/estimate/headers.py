"""What a checkpoint's files hold, from their headers alone: tensors and bytes by kind, against what the config says.

A safetensors file starts with eight bytes of length and a JSON header; the tensors themselves are never read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from k3stack.config.files import parse_json, why
from k3stack.config.geometry import ModelGeometry
from k3stack.config.tensors import expected_tensors, expert_tensors
from k3stack.errors import CheckpointError
from k3stack.estimate.weights import group_of, weight_table

MAX_HEADER = 200_000_000
"""Bytes; a header above this is no header (one shard of Kimi-K3 has 0.8 MB)."""
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class HeaderTotals:
    """Sums over the headers of a folder. Bytes by reporting group; ``unknown`` are tensors that no kind names."""

    files: int
    tensors: int
    by_group: Mapping[str, int]
    unknown: tuple[str, ...]
    expected_tensors: int
    expected_bytes: int

    @property
    def bytes(self) -> int:
        return sum(self.by_group.values())

    @property
    def as_expected(self) -> bool:
        return self.tensors == self.expected_tensors and self.bytes == self.expected_bytes and not self.unknown

    def sentence(self) -> str:
        """One line for a report."""
        said = f"{self.files} files hold {self.tensors:,} tensors and {self.bytes:,} B"
        if self.as_expected:
            return f"{said}, as the config says"
        extra = f"; {len(self.unknown)} of unknown kind, such as {self.unknown[0]}" if self.unknown else ""
        return f"{said}; the config says {self.expected_tensors:,} and {self.expected_bytes:,} B{extra}"


def has_files(folder: str | Path) -> bool:
    """Whether ``folder`` holds safetensors files."""
    path = Path(folder)
    return path.is_dir() and next(path.glob("*.safetensors"), None) is not None


def header_totals(folder: str | Path, geometry: ModelGeometry) -> HeaderTotals:
    """Read the headers of every safetensors file in ``folder``. Raises CheckpointError with the file at fault."""
    kinds = _kinds(geometry)
    groups: dict[str, int] = {}
    unknown: list[str] = []
    count = 0
    paths = sorted(Path(folder).glob("*.safetensors"))
    for path in paths:
        for name, size in _entries(path):
            count += 1
            kind = kinds.get(_NUMBERS.sub("#", name))
            if kind is None:
                unknown.append(name)
            group = "unknown" if kind is None else group_of(kind)
            groups[group] = groups.get(group, 0) + size
    table = weight_table(geometry)
    return HeaderTotals(
        len(paths), count, groups, tuple(unknown[:100]), table.tensor_count(), sum(table.totals().values())
    )  # fmt: skip


def _kinds(geometry: ModelGeometry) -> dict[str, str]:
    """Name with its numbers blanked -> kind."""
    specs = list(expected_tensors(geometry, routed=False))
    if geometry.moe_layers:
        specs += expert_tensors(geometry, geometry.moe_layers[0], 0)
    return {_NUMBERS.sub("#", s.name): s.kind for s in specs}


def _entries(path: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of each tensor in one file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER:
                raise CheckpointError(f"{path}: a header of {length:,} B; this is no safetensors file")
            text = file.read(length)
    except OSError as e:
        raise CheckpointError(f"{path}: {why(e)}") from None
    except struct.error:
        raise CheckpointError(f"{path}: its header is cut off; download the file again") from None
    header = parse_json(text, f"{path}: its header is cut off or broken", error=CheckpointError)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is {type(header).__name__}, not an object; download the file again")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            start, stop = entry["data_offsets"]
            yield name, int(stop) - int(start)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: tensor {name!r} has no data_offsets") from None
