"""Streaming a checkpoint's bytes into a model's weights.

Several threads read at a time. A tensor stored in the dtype of its destination is read straight into it; others are
converted piece by piece. A weight that the product wants in another layout is put together in a room beside the
weights, packed as soon as its last tensor is there, and its room lent to the next. So memory stays near the final
weights: what is over is that room, at most the largest weight and 16 MiB, and scratch of a few MB a thread. The
largest are read first, while little else is there.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from k3stack.config.tensors import TensorSpec
from k3stack.errors import BugError, CheckpointError
from k3stack.kernels.memory import trim
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.models.checkpoint import Entry, Found
from k3stack.models.layers.part import Place, Slot
from k3stack.models.network import Model
from k3stack.models.room import Room, aligned

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
PIECE = 1 << 20
"""Bytes of the files converted at a time; they stay in the CPU's cache."""
DEVICE_PIECE = 4 << 20
"""The same on their way to a GPU."""
RUN_BYTES = 64 << 20
"""Bytes in a row that one thread reads in one go."""
AT_ONCE = 16 << 20
"""Most bytes of one call to the system, and of one thread's part of a large weight."""
LARGE = 16 << 20
SHARDS_AT_ONCE = 4
REPORT = 4 << 20

Item = tuple[tuple[TensorSpec, Entry], ...]
"""One tensor, or an expert matrix's packed codes with their scales."""


@dataclass(slots=True)
class Unit:
    """The tensors of one weight, read one after the other by one thread."""

    place: Place | None
    """Of a weight that has no memory yet: it is put together in the room and packed."""
    tensors: list[tuple[Slot, Item]]

    @property
    def first(self) -> Entry:
        return self.tensors[0][1][0][1]

    @property
    def stored(self) -> int:
        """Bytes in the files."""
        return sum(e.nbytes for _, item in self.tensors for _, e in item)

    @property
    def weight_bytes(self) -> int:
        """Bytes of room for the plain weight."""
        return 0 if self.place is None else aligned(self.place.get().nbytes)

    @property
    def room(self) -> int:
        """Bytes it needs on its way: the plain weight to pack, and a piece as stored where it is converted."""
        return self.weight_bytes + max(_piece(slot, item) for slot, item in self.tensors)

    def dests(self, space: Tensor) -> list[Tensor]:
        """Destination of each tensor, in the plain weight at the beginning of ``space`` if there is a place."""
        views = [slot.dest for slot, _ in self.tensors]
        if self.place is None:
            return views
        plain = self._plain(space)
        start = plain.storage_offset()
        return [plain.as_strided(v.shape, v.stride(), start + v.storage_offset()) for v in views]

    def pack(self, space: Tensor) -> None:
        """Put the weight in ``space`` in its place, laid out for the product."""
        if self.place is not None:
            self.place.pack(self._plain(space))

    def _plain(self, space: Tensor) -> Tensor:
        meta = self.place.get()
        return space[: meta.nbytes].view(meta.dtype).view(meta.shape)


def stream_in(model: Model, found: Found, *, threads: int = 4, on_bytes: Callable[[int], None] | None = None) -> Room:
    """Fill the model's weights from the files. ``on_bytes`` is called (from any thread) with bytes just read.

    Returns the room that was used besides the weights; see ``room_for``.
    """
    trim()
    units = _units(model, found)
    room = Room(room_for(units, threads))
    files = _Files({e.file for _, e in found.tensors}, on_bytes)
    large = [u for u in units if _is_large(u, room)]
    runs = list(_runs([u for u in units if not _is_large(u, room)]))
    before = torch.get_num_threads()
    try:
        with files, ThreadPoolExecutor(threads, lambda: torch.set_num_threads(1)) as pool:
            for unit in sorted(large, key=lambda u: -u.room):
                files.announce([unit])
                _read_large(unit, files, room, pool)
            _read_runs(runs, files, room, pool, threads)
    finally:
        torch.set_num_threads(before)
    return room


def read_ahead(found: Found) -> None:
    """Let the kernel begin to read the first shards while the model is being built."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in sorted({e.file for _, e in found.tensors})[:SHARDS_AT_ONCE]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, RUN_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def room_for(units: list[Unit], threads: int) -> int:
    """Bytes for weights on their way: the largest weight, and LARGE for those read beside it."""
    largest = max((u.room for u in units), default=0)
    return min(threads * largest, largest + LARGE)


def _is_large(unit: Unit, room: Room) -> bool:
    """Whether all threads read this weight together, before any other."""
    return unit.place is not None and unit.room > max(LARGE, room.size // 4)


def _read_large(unit: Unit, files: _Files, room: Room, pool: ThreadPoolExecutor) -> None:
    """All threads read pieces of one weight; memory is still nearly empty while it is there twice."""

    def read(slot: Slot, dest: Tensor, item: Item, a: int, b: int) -> None:
        with room.take(_piece(slot, item)) as stage:
            _read_rows(slot, dest, item, a, b, files, stage)

    with room.take(unit.weight_bytes) as space:
        tasks = [
            pool.submit(read, slot, dest, item, a, min(a + step, dest.shape[0]))
            for (slot, item), dest in zip(unit.tensors, unit.dests(space), strict=True)
            for step in [max(1, AT_ONCE * dest.shape[0] // item[0][1].nbytes)]
            for a in range(0, dest.shape[0], step)
        ]
        for task in tasks:
            task.result()
        unit.pack(space)


def _read_runs(runs: list[list[Unit]], files: _Files, room: Room, pool: ThreadPoolExecutor, threads: int) -> None:
    work: queue.SimpleQueue[list[Unit]] = queue.SimpleQueue()
    for run in runs:
        work.put(run)
    stop = threading.Event()

    def reader() -> None:
        while not stop.is_set():
            try:
                run = work.get_nowait()
            except queue.Empty:
                return
            try:
                files.announce(run)
                for unit in run:
                    if stop.is_set():
                        return
                    _read_unit(unit, files, room)
                # Scratch memory lies between the weights packed since; its pages are not to add up.
                trim()
            except BaseException:
                stop.set()
                raise

    for done in [pool.submit(reader) for _ in range(threads)]:
        done.result()


def _units(model: Model, found: Found) -> list[Unit]:
    """All tensors by weight, in the order in which they lie in the files."""
    places = {_memory(w): p for p in model.places() if isinstance(w := p.get(), Tensor) and w.is_meta}
    units: dict[int, Unit] = {}
    layer, slots, top = -1, {}, model.slots()
    for number, item in enumerate(_items(found)):
        spec = item[0][0]
        if spec.layer is not None and spec.layer != layer:
            layer, slots = spec.layer, model.layer_slots(spec.layer)
        if spec.expert is not None:
            slot = model.expert_slot(spec)
            if len(item) == 2 and slot.dest.dtype == torch.uint8:
                # The experts stay packed: codes and scales have destinations of their own.
                units[-number] = Unit(None, [(model.expert_slot(one), ((one, own),)) for one, own in item])
                continue
        else:
            slot = (top if spec.layer is None else slots)[spec.kind]
        key = _memory(slot.dest)
        if key in places:
            units.setdefault(key, Unit(places[key], [])).tensors.append((slot, item))
        else:
            units[-number] = Unit(None, [(slot, item)])
    for unit in units.values():
        unit.tensors.sort(key=lambda t: (t[1][0][1].file, t[1][0][1].offset))
    return sorted(units.values(), key=lambda u: (u.first.file, u.first.offset))


def _memory(tensor: Tensor) -> int:
    """A number that views of one tensor share."""
    return int(tensor.untyped_storage()._cdata)


def _runs(units: list[Unit]) -> Iterator[list[Unit]]:
    """Units in the order of the files, in runs of about RUN_BYTES; shards interleaved so that several are read."""
    shards: dict[Path, list[list[Unit]]] = {}
    sizes: dict[Path, int] = {}
    for unit in units:
        file = unit.first.file
        if file not in shards or sizes[file] >= RUN_BYTES:
            shards.setdefault(file, []).append([])
            sizes[file] = 0
        shards[file][-1].append(unit)
        sizes[file] += unit.stored
    pending = [list(reversed(runs)) for runs in shards.values()]
    while pending:
        for runs in pending[:SHARDS_AT_ONCE]:
            yield runs.pop()
        pending = [runs for runs in pending if runs]


def _items(found: Found) -> Iterator[Item]:
    scales = {s.name: (s, e) for s, e in found.tensors if s.kind.endswith(".scale")}
    for spec, entry in found.tensors:
        if spec.kind.endswith(".packed"):
            yield (spec, entry), scales[spec.name.removesuffix("_packed") + "_scale"]
        elif not spec.kind.endswith(".scale"):
            yield ((spec, entry),)


def _as_stored(slot: Slot, entry: Entry) -> bool:
    return slot.fit is None and slot.dest.dtype == DTYPES[entry.dtype] and slot.dest.device.type in ("cpu", "meta")


def _piece(slot: Slot, item: Item) -> int:
    """Bytes of room in which a tensor's bytes are converted."""
    entry = item[0][1]
    limit = DEVICE_PIECE if slot.dest.device.type == "cuda" else PIECE
    if len(item) == 2:
        return min(limit, sum(e.nbytes for _, e in item))
    if slot.fit is not None:
        return entry.nbytes
    return 0 if _as_stored(slot, entry) else min(limit, entry.nbytes)


class _Files:
    """The open files, for all threads."""

    def __init__(self, paths: set[Path], on_bytes: Callable[[int], None] | None) -> None:
        self._open = {path: os.open(path, os.O_RDONLY) for path in paths}
        self._on_bytes = on_bytes
        self._unreported = 0
        self._lock = threading.Lock()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._report(0, 1)
        for fd in self._open.values():
            os.close(fd)

    def announce(self, run: list[Unit]) -> None:
        """Let the kernel begin to read all of a run, so that the disk works while pieces are converted."""
        if hasattr(os, "posix_fadvise"):
            first = run[0].first
            length = sum(u.stored for u in run)
            os.posix_fadvise(self._open[first.file], first.offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, entry: Entry, start: int, dest: Tensor) -> None:
        """Bytes from ``start`` of the tensor on into uint8 ``dest``, all of it."""
        fd, view = self._open[entry.file], memoryview(dest.numpy())
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done : done + AT_ONCE]], entry.offset + start + done)
            if got == 0:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name}: the file ended {len(view) - done:,} B early while being read"
                )
            done += got
            self._report(got, REPORT)

    def _report(self, count: int, at_least: int) -> None:
        """Pass on what has been read once it is ``at_least`` bytes."""
        if self._on_bytes is None:
            return
        with self._lock:
            self._unreported += count
            if self._unreported < at_least:
                return
            count, self._unreported = self._unreported, 0
        self._on_bytes(count)


def _read_unit(unit: Unit, files: _Files, room: Room) -> None:
    with room.take(unit.room) as space:
        stage = space[unit.weight_bytes :]
        for (slot, item), dest in zip(unit.tensors, unit.dests(space), strict=True):
            _read_rows(slot, dest, item, 0, dest.shape[0], files, stage)
        unit.pack(space)


def _read_rows(slot: Slot, dest: Tensor, item: Item, a: int, b: int, files: _Files, stage: Tensor) -> None:
    """Read what belongs in the rows a to b of a tensor's destination (all of them where it has a ``fit``)."""
    entry = item[0][1]
    if len(item) == 2:
        _read_mxfp4(dest, entry, item[1][1], a, b, files, stage)
        return
    dtype = DTYPES[entry.dtype]
    if slot.fit is not None:
        whole = stage[: entry.nbytes]
        files.read(entry, 0, whole)
        dest.copy_(slot.fit(whole.view(dtype).view(entry.shape)))
        return
    if not dest.is_contiguous() or dest.numel() * dtype.itemsize != entry.nbytes:
        raise BugError(f"{entry.name}: destination {list(dest.shape)} does not take {list(entry.shape)}")
    flat, width = dest.view(-1), dest.numel() // dest.shape[0]
    if _as_stored(slot, entry):
        files.read(entry, a * width * dtype.itemsize, flat[a * width : b * width].view(torch.uint8))
        return
    step = stage.numel() // dtype.itemsize
    for first in range(a * width, b * width, step):
        last = min(first + step, b * width)
        piece = stage[: (last - first) * dtype.itemsize]
        files.read(entry, first * dtype.itemsize, piece)
        flat[first:last].copy_(piece.view(dtype))


def _read_mxfp4(dest: Tensor, packed: Entry, scale: Entry, a: int, b: int, files: _Files, stage: Tensor) -> None:
    """Decode piece by piece; the staging buffer holds rows of codes and, behind them, their scales."""
    half, groups = packed.shape[1], scale.shape[1]
    step = stage.numel() // (half + groups)
    for first in range(a, b, step):
        n = min(step, b - first)
        codes, factors = stage[: n * half], stage[n * half : n * (half + groups)]
        files.read(packed, first * half, codes)
        files.read(scale, first * groups, factors)
        target = dest[first : first + n]
        host = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
        mxfp4.decode_into(codes.view(n, half), factors.view(n, groups), host)
        if host is not target:
            target.copy_(host)
