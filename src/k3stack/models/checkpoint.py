"""Reading safetensors checkpoints: index, headers, checks against the expected tensors.

Every fault is a CheckpointError that names file, tensor, expected and found. ``models.stream_in`` then reads the
bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3stack.config.files import parse_json, read_json
from k3stack.config.geometry import ModelGeometry
from k3stack.config.tensors import VISION_PREFIXES, TensorSpec, expected_tensors
from k3stack.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I32": 4, "I64": 8, "BOOL": 1}
ITEMSIZE |= {"F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "U32": 4, "U64": 8, "F8_E8M0": 1, "F4": 1}
MAX_HEADER = 100 << 20
"""Header bytes above which a file is taken to be damaged."""
QUANT_SUFFIXES = (
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_global_scale", ".weight_zero_point"),
    *(".weight_shape", ".input_scale", ".input_global_scale", ".weight_g_idx", ".qweight", ".qzeros", ".scales"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The tensors to read, each with its specification, and what was left out."""

    tensors: list[tuple[TensorSpec, Entry]]
    skipped: int
    skipped_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for _, e in self.tensors)


def find_tensors(folder: Path, geometry: ModelGeometry) -> Found:
    """Check all files of a checkpoint against the geometry; nothing but headers is read."""
    entries = _entries(folder)
    pairs: list[tuple[TensorSpec, Entry]] = []
    missing: list[TensorSpec] = []
    for spec in expected_tensors(geometry, vision=False):
        entry = entries.pop(spec.name, None)
        if entry is None:
            missing.append(spec)
        else:
            _check(spec, entry)
            pairs.append((spec, entry))
    skipped = [entries.pop(n) for n in [n for n in entries if n.startswith(VISION_PREFIXES)]]
    if entries:
        _refuse_unknown(geometry, entries, missing)
    if missing:
        spec = missing[0]
        raise CheckpointError(
            f"{folder}: tensor {spec.name} is missing: expected shape {list(spec.shape)} {spec.dtype} from "
            f"config.json, found in none of the files{_more(len(missing))}"
        )
    return Found(pairs, len(skipped), sum(e.nbytes for e in skipped))


def _more(count: int) -> str:
    return f" (and {count - 1:,} more)" if count > 1 else ""


def _check(spec: TensorSpec, entry: Entry) -> None:
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"{entry.file}: tensor {spec.name}: expected shape {list(spec.shape)} from config.json, found "
            f"{list(entry.shape)}; the file and config.json belong to different models"
        )
    if entry.dtype not in (spec.dtype, spec.also):
        expected = spec.dtype if spec.also is None else f"{spec.dtype} or {spec.also}"
        raise CheckpointError(f"{entry.file}: tensor {spec.name}: expected dtype {expected}, found {entry.dtype}")


def _refuse_unknown(geometry: ModelGeometry, entries: dict[str, Entry], missing: list[TensorSpec]) -> None:
    """Say what the left-over tensors mean, as precisely as their names allow."""
    entry = next(iter(entries.values()))
    where = f"{entry.file}: tensor {entry.name}"
    more = _more(len(entries))
    packed = next((e for n, e in entries.items() if n.endswith(".weight_packed")), None)
    if packed is not None and not geometry.moe.mxfp4:
        raise CheckpointError(
            f"{packed.file}: tensor {packed.name}: found a packed 4-bit weight, but config.json has no "
            f"quantization_config{more}"
        )
    plain = next((e for n, e in entries.items() if ".experts." in n and n.endswith(".weight")), None)
    if plain is not None and geometry.moe.mxfp4 and any(s.expert is not None for s in missing):
        raise CheckpointError(
            f"{plain.file}: tensor {plain.name}: config.json's quantization_config says mxfp4-pack-quantized, so "
            f"{plain.name}_packed and _scale are expected; found a plain {plain.dtype} weight{more}"
        )
    if entry.name.endswith(QUANT_SUFFIXES):
        raise CheckpointError(
            f"{where}: unknown quantisation: expected plain weights, or weight_packed (U8) with weight_scale (U8) for "
            f"routed experts; found {entry.dtype} {list(entry.shape)}{more}"
        )
    beyond = [n for n in map(_layer_of, entries) if n is not None and n >= geometry.layers]
    if beyond:
        raise CheckpointError(
            f"{where}: config.json has num_hidden_layers {geometry.layers}; found tensors of layer {max(beyond)} "
            f"(counted from 0){more}"
        )
    experts = [n for n in map(_expert_of, entries) if n is not None and n >= geometry.moe.experts]
    if experts:
        raise CheckpointError(
            f"{where}: config.json has num_experts {geometry.moe.experts}; found tensors of expert {max(experts)} "
            f"(counted from 0){more}"
        )
    raise CheckpointError(
        f"{where}: unknown: no tensor of this name is expected for config.json's model; found {entry.dtype} "
        f"{list(entry.shape)}{more}"
    )


def _number_after(name: str, word: str) -> int | None:
    parts = name.split(".")
    if word in parts[:-1] and parts[parts.index(word) + 1].isdigit():
        return int(parts[parts.index(word) + 1])
    return None


def _layer_of(name: str) -> int | None:
    return _number_after(name, "layers")


def _expert_of(name: str) -> int | None:
    return _number_after(name, "experts")


def _entries(folder: Path) -> dict[str, Entry]:
    """All tensors of all files by name, the index (where there is one) checked against the files."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not a folder; a checkpoint is a folder with config.json and safetensors files"
        )
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(
                f"{folder}: expected {INDEX}, or one .safetensors file; found {len(files)} files and no index"
            )
        return {e.name: e for e in read_header(files[0])}
    placed = _read_index(index)
    entries: dict[str, Entry] = {}
    for shard in sorted(set(placed.values())):
        file = folder / shard
        if not file.is_file():
            named = [n for n, s in placed.items() if s == shard]
            raise CheckpointError(
                f"{index}: names shard {shard} for {len(named):,} tensors (first: {named[0]}); expected it in "
                f"{folder}, found no such file"
            )
        for entry in read_header(file):
            other = entries.get(entry.name)
            if other is not None:
                raise CheckpointError(
                    f"{file}: tensor {entry.name}: duplicate; expected it once, found it in {other.file.name} too"
                )
            if placed.get(entry.name) != shard:
                raise CheckpointError(
                    f"{file}: tensor {entry.name}: {INDEX} places it in {placed.get(entry.name)!r}; found it in "
                    f"{shard!r}"
                )
            entries[entry.name] = entry
    absent = [n for n in placed if n not in entries]
    if absent:
        raise CheckpointError(
            f"{folder / placed[absent[0]]}: tensor {absent[0]}: expected here by {INDEX}, not found in the file"
            f"{_more(len(absent))}"
        )
    return entries


def _no_duplicates(file: Path) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{file}: tensor {key}: duplicate; expected it once, found it twice in the file")
            result[key] = value
        return result

    return build


def _read_index(index: Path) -> dict[str, str]:
    raw = read_json(index, error=CheckpointError, pairs=_no_duplicates(index))
    placed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
        raise CheckpointError(f"{index}: expected an object 'weight_map' from tensor names to file names")
    outside = [s for s in placed.values() if os.path.basename(s) != s or len(s) > 255]
    if outside:
        raise CheckpointError(f"{index}: shard {outside[0]!r}: expected a file name in the checkpoint's own folder")
    return placed


def read_header(file: Path) -> Iterator[Entry]:
    """Entries of one safetensors file: u64 header length, JSON header, then the tensors' bytes."""
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or length > min(MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{file}: truncated or not a safetensors file: the header wants {length:,} B after the first 8, the "
                f"file has {size:,} B"
            )
        where = f"{file}: the safetensors header"
        header = parse_json(f.read(length), where, error=CheckpointError, pairs=_no_duplicates(file))
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    end = 8 + length
    for name, info in header.items():
        entry = _entry(file, name, info, 8 + length)
        end = max(end, entry.offset + entry.nbytes)
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{file}: tensor {name}: the file is truncated: expected bytes up to {entry.offset + entry.nbytes:,}, "
                f"found {size:,}"
            )
        yield entry
    if end != size:
        raise CheckpointError(f"{file}: expected {end:,} B by the header, found {size:,} B")


def _entry(file: Path, name: str, info: Any, base: int) -> Entry:
    try:
        dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        wanted = math.prod(shape) * ITEMSIZE[dtype]
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError("shape and data_offsets must be whole numbers from 0")
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{file}: tensor {name}: header entry {info!r} is not understood ({e!r})") from None
    if end - begin != wanted:
        raise CheckpointError(
            f"{file}: tensor {name}: {dtype} {list(shape)} takes {wanted:,} B, the header gives it {end - begin:,} B"
        )
    return Entry(name, file, dtype, shape, base + begin, wanted)
