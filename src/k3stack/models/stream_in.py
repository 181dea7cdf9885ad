"""Streaming a checkpoint's bytes into memory, as they are stored.

Several threads read at a time, each a run of one shard. On a CPU the bytes go where the weights made of them will be
(``models.landing``), and ``models.prepare`` makes them in place afterwards. Tensors of a GPU are read through a staging
buffer for each thread, and are complete when they have been read.
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

from k3stack.errors import BugError, CheckpointError
from k3stack.kernels.memory import populate
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.models.checkpoint import Entry, Found
from k3stack.models.landing import DTYPES, Convert, Landed, Read

STAGE = 4 << 20
"""Bytes of the files on their way to a GPU, for each thread."""
RUN_BYTES = 64 << 20
"""Bytes in a row that one thread reads in one go."""
AT_ONCE = 16 << 20
"""Most bytes of one call to the system."""
SHARDS_AT_ONCE = 4
REPORT = 4 << 20


def stream_in(landed: Landed, *, threads: int = 4, on_bytes: Callable[[int], None] | None = None) -> None:
    """Read all tensors. ``on_bytes`` is called (from any thread) with bytes just read."""
    reads = [part for landing in landed.landings for read in landing.reads() for part in _split(read)]
    runs = _runs([*reads, *landed.others])
    before = torch.get_num_threads()
    try:
        with (
            _Files({read.entry.file for read in (*reads, *landed.others)}, on_bytes) as files,
            ThreadPoolExecutor(threads, lambda: torch.set_num_threads(1)) as pool,
        ):
            _read_runs(list(runs), files, pool, threads)
    finally:
        torch.set_num_threads(before)


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


def _split(read: Read) -> Iterator[Read]:
    for a in range(0, read.stored, AT_ONCE):
        yield Read(read.entry, a, read.dest[a : a + AT_ONCE])


def _runs(reads: list[Read | Convert]) -> Iterator[list[Read | Convert]]:
    """In the order of the files, in runs of about RUN_BYTES; shards interleaved so that several are read."""
    shards: dict[Path, list[list[Read | Convert]]] = {}
    sizes: dict[Path, int] = {}
    for read in sorted(reads, key=lambda r: (r.entry.file, r.entry.offset + r.start)):
        file = read.entry.file
        if file not in shards or sizes[file] >= RUN_BYTES:
            shards.setdefault(file, []).append([])
            sizes[file] = 0
        shards[file][-1].append(read)
        sizes[file] += read.stored
    pending = [list(reversed(runs)) for runs in shards.values()]
    while pending:
        for runs in pending[:SHARDS_AT_ONCE]:
            yield runs.pop()
        pending = [runs for runs in pending if runs]


def _read_runs(runs: list[list[Read | Convert]], files: _Files, pool: ThreadPoolExecutor, threads: int) -> None:
    work: queue.SimpleQueue[list[Read | Convert]] = queue.SimpleQueue()
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
                for read in run:
                    if stop.is_set():
                        return
                    if isinstance(read, Read):
                        populate(read.dest.data_ptr(), read.stored)
                        files.read(read.entry, read.start, read.dest)
                    else:
                        _convert(read, files)
            except BaseException:
                stop.set()
                raise

    for done in [pool.submit(reader) for _ in range(threads)]:
        done.result()


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

    def announce(self, run: list[Read | Convert]) -> None:
        """Let the kernel begin to read all of a run, so that the disk works while tensors are converted.

        Not where bytes are only copied: the kernel's own reading ahead keeps the disk busy then, and takes a third less
        processor time, since it gets memory in larger blocks.
        """
        if hasattr(os, "posix_fadvise") and not any(isinstance(read, Read) for read in run):
            first = run[0]
            length = sum(read.stored for read in run)
            start = first.entry.offset + first.start
            os.posix_fadvise(self._open[first.entry.file], start, length, os.POSIX_FADV_WILLNEED)

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


def _convert(read: Convert, files: _Files) -> None:
    """Read a tensor piece by piece (all of it where it has a ``fit``) and convert it on its way."""
    dest, entry, fit = read.slot.dest, read.entry, read.slot.fit
    if len(read.item) == 2:
        _convert_mxfp4(dest, entry, read.item[1][1], files)
        return
    dtype = DTYPES[entry.dtype]
    if fit is not None:
        whole = torch.empty(entry.nbytes, dtype=torch.uint8)
        files.read(entry, 0, whole)
        dest.copy_(fit(whole.view(dtype).view(entry.shape)))
        return
    if not dest.is_contiguous() or dest.numel() * dtype.itemsize != entry.nbytes:
        raise BugError(f"{entry.name}: destination {list(dest.shape)} does not take {list(entry.shape)}")
    flat, step = dest.view(-1), STAGE // dtype.itemsize
    stage = torch.empty(min(STAGE, entry.nbytes), dtype=torch.uint8)
    for first in range(0, flat.numel(), step):
        last = min(first + step, flat.numel())
        piece = stage[: (last - first) * dtype.itemsize]
        files.read(entry, first * dtype.itemsize, piece)
        flat[first:last].copy_(piece.view(dtype))


def _convert_mxfp4(dest: Tensor, packed: Entry, scale: Entry, files: _Files) -> None:
    """Decode rows at a time."""
    (rows, half), groups = packed.shape, scale.shape[1]
    step = max(1, STAGE // (half + groups))
    for first in range(0, rows, step):
        n = min(step, rows - first)
        codes, factors = (torch.empty(n, size, dtype=torch.uint8) for size in (half, groups))
        files.read(packed, first * half, codes.view(-1))
        files.read(scale, first * groups, factors.view(-1))
        host = torch.empty(n, dest.shape[1], dtype=dest.dtype)
        mxfp4.decode_into(codes, factors, host)
        dest[first : first + n].copy_(host)
