"""Streaming a checkpoint's bytes into a model's weights.

Several threads read at a time. A tensor stored in the dtype of its destination is read straight into it; others
pass through a small staging buffer a thread, piece by piece, so that memory stays near the final weights: at most
``threads`` staging buffers over them, less than one large tensor.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from k3stack.config.tensors import TensorSpec
from k3stack.errors import BugError, CheckpointError
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.models.checkpoint import Entry, Found
from k3stack.models.layers.part import Slot
from k3stack.models.network import Model

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
STAGE_BYTES = 4 << 20
RUN_BYTES = 64 << 20
"""Consecutive tensors that one thread reads in one go."""

Item = tuple[tuple[TensorSpec, Entry], ...]
"""One tensor, or an expert matrix's packed codes with their scales."""


def stream_in(model: Model, found: Found, *, threads: int = 4, on_bytes: Callable[[int], None] | None = None) -> None:
    """Fill the model's weights from the files. ``on_bytes`` is called (from any thread) with bytes just read."""
    work: queue.SimpleQueue[list[Item]] = queue.SimpleQueue()
    for run in _runs(found):
        work.put(run)
    stop = threading.Event()

    def reader() -> None:
        with _Files(on_bytes) as files:
            stage = torch.empty(STAGE_BYTES, dtype=torch.uint8)
            while not stop.is_set():
                try:
                    run = work.get_nowait()
                except queue.Empty:
                    return
                try:
                    for item in run:
                        _read_item(model, item, files, stage)
                except BaseException:
                    stop.set()
                    raise

    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
        for done in [pool.submit(reader) for _ in range(threads)]:
            done.result()


def _runs(found: Found) -> Iterator[list[Item]]:
    """Items in file order, in runs of about RUN_BYTES; shards interleaved so that several are read at a time."""
    shards: dict[Path, list[list[Item]]] = {}
    sizes: dict[Path, int] = {}
    for item in sorted(_items(found), key=lambda i: (i[0][1].file, i[0][1].offset)):
        file = item[0][1].file
        if file not in shards or sizes[file] >= RUN_BYTES:
            shards.setdefault(file, []).append([])
            sizes[file] = 0
        shards[file][-1].append(item)
        sizes[file] += sum(e.nbytes for _, e in item)
    pending = [list(reversed(runs)) for runs in shards.values()]
    at_once = 4
    while pending:
        for runs in pending[:at_once]:
            yield runs.pop()
        pending = [runs for runs in pending if runs]


def _items(found: Found) -> Iterator[Item]:
    scales = {s.name: (s, e) for s, e in found.tensors if s.kind.endswith(".scale")}
    for spec, entry in found.tensors:
        if spec.kind.endswith(".packed"):
            yield (spec, entry), scales[spec.name.removesuffix("_packed") + "_scale"]
        elif not spec.kind.endswith(".scale"):
            yield ((spec, entry),)


class _Files:
    """Open files of one thread."""

    def __init__(self, on_bytes: Callable[[int], None] | None) -> None:
        self._open: dict[Path, int] = {}
        self._on_bytes = on_bytes

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def read(self, entry: Entry, start: int, dest: Tensor) -> None:
        """Bytes from ``start`` of the tensor on into uint8 ``dest``, all of it."""
        if entry.file not in self._open:
            self._open[entry.file] = os.open(entry.file, os.O_RDONLY)
        fd, view = self._open[entry.file], memoryview(dest.numpy())
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done : done + (16 << 20)]], entry.offset + start + done)
            if got == 0:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name}: the file ended {len(view) - done:,} B early while being read"
                )
            done += got
            if self._on_bytes is not None:
                self._on_bytes(got)


def _read_item(model: Model, item: Item, files: _Files, stage: Tensor) -> None:
    spec, entry = item[0]
    if len(item) == 2:
        slot = model.expert_slot(spec)
        if slot.dest.dtype == torch.uint8:
            for one, own in item:
                _read_plain(model.expert_slot(one), own, files, stage)
        else:
            _read_mxfp4(slot.dest, entry, item[1][1], files, stage)
        return
    if spec.expert is not None:
        slot = model.expert_slot(spec)
    else:
        slot = (model.slots() if spec.layer is None else model.layer_slots(spec.layer))[spec.kind]
    _read_plain(slot, entry, files, stage)


def _read_plain(slot: Slot, entry: Entry, files: _Files, stage: Tensor) -> None:
    dest, dtype = slot.dest, DTYPES[entry.dtype]
    if slot.fit is not None:
        whole = torch.empty(entry.nbytes, dtype=torch.uint8)
        files.read(entry, 0, whole)
        dest.copy_(slot.fit(whole.view(dtype).view(entry.shape)))
        return
    if not dest.is_contiguous() or dest.numel() * dtype.itemsize != entry.nbytes:
        raise BugError(f"{entry.name}: destination {list(dest.shape)} does not take {list(entry.shape)}")
    flat = dest.view(-1)
    if dest.dtype == dtype and dest.device.type == "cpu":
        files.read(entry, 0, flat.view(torch.uint8))
        return
    step = STAGE_BYTES // dtype.itemsize
    for a in range(0, flat.numel(), step):
        b = min(a + step, flat.numel())
        piece = stage[: (b - a) * dtype.itemsize]
        files.read(entry, a * dtype.itemsize, piece)
        flat[a:b].copy_(piece.view(dtype))


def _read_mxfp4(dest: Tensor, packed: Entry, scale: Entry, files: _Files, stage: Tensor) -> None:
    """Decode piece by piece; the staging buffer holds rows of codes and, behind them, their scales."""
    rows, half = packed.shape
    groups = scale.shape[1]
    step = max(1, stage.numel() // 4 // (half + groups))
    for a in range(0, rows, step):
        n = min(step, rows - a)
        codes, factors = stage[: n * half], stage[n * half : n * (half + groups)]
        files.read(packed, a * half, codes)
        files.read(scale, a * groups, factors)
        target = dest[a : a + n]
        if target.device.type == "cpu":
            mxfp4.decode_into(codes.view(n, half), factors.view(n, groups), target)
        else:
            host = torch.empty(target.shape, dtype=target.dtype)
            mxfp4.decode_into(codes.view(n, half), factors.view(n, groups), host)
            target.copy_(host)
