"""Streaming a checkpoint's bytes into memory, as they are stored.

Several threads read at a time, each a run of one shard. On a CPU the bytes go where the weights made of them will be
(``models.landing``), and ``models.prepare`` makes them in place afterwards: from the page cache what is there, and the
rest past it, through buffers from which other threads copy (``models.staging``). Tensors of a GPU are read through the
page cache and a staging buffer for each thread, and are complete when they have been read.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from k3stack.config.cores import usable_cores
from k3stack.errors import BugError
from k3stack.kernels.memory import populate
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.models.checkpoint import Entry
from k3stack.models.files import Files, Piece, pieces
from k3stack.models.landing import DTYPES, Convert, Landed
from k3stack.models.staging import Staging

STAGE = 4 << 20
"""Bytes of the files on their way to a GPU, for each thread."""
RUN_BYTES = 16 << 20
"""Bytes in a row that one thread reads in one go."""
CONVERTED_RUN = 64 << 20
"""The same of tensors that are converted as they are read, which the kernel is asked to read ahead."""
SHARDS_AT_ONCE = 4
BUFFERS = 4
"""For each reading thread, so that none waits for those that copy: a disk may answer many requests at once."""

Part = Piece | Convert


def stream_in(landed: Landed, *, threads: int = 4, on_bytes: Callable[[int], None] | None = None) -> None:
    """Read all tensors. ``on_bytes`` is called (from any thread) with bytes just read."""
    parts: list[Part] = [*pieces([r for landing in landed.landings for r in landing.reads()]), *landed.others]
    copiers = min(threads, usable_cores())
    before, collects = torch.get_num_threads(), gc.isenabled()
    try:
        # Looking through all of Python's objects takes a tenth of a second, in which no thread gets on.
        gc.disable()
        with (
            Files({part.file for part in parts}, on_bytes) as files,
            ThreadPoolExecutor(threads + copiers, initializer=lambda: torch.set_num_threads(1)) as pool,
        ):
            _read_runs(list(_runs(parts)), files, pool, threads, copiers)
    finally:
        if collects:
            gc.enable()
        torch.set_num_threads(before)


def _runs(parts: list[Part]) -> Iterator[list[Part]]:
    """In the order of the files, in runs of about RUN_BYTES or CONVERTED_RUN; shards interleaved, several at once."""
    shards: dict[Path, list[list[Part]]] = {}
    sizes: dict[Path, int] = {}
    for part in sorted(parts, key=lambda p: (p.file, p.begin)):
        file, limit = part.file, RUN_BYTES if isinstance(part, Piece) else CONVERTED_RUN
        if file not in shards or sizes[file] >= limit:
            shards.setdefault(file, []).append([])
            sizes[file] = 0
        shards[file][-1].append(part)
        sizes[file] += part.stored
    pending = [list(reversed(runs)) for runs in shards.values()]
    while pending:
        for runs in pending[:SHARDS_AT_ONCE]:
            yield runs.pop()
        pending = [runs for runs in pending if runs]


def _read_runs(runs: list[list[Part]], files: Files, pool: ThreadPoolExecutor, threads: int, copiers: int) -> None:
    work: queue.SimpleQueue[list[Part]] = queue.SimpleQueue()
    for run in runs:
        work.put(run)
    stop = threading.Event()
    staging = Staging(BUFFERS * threads, files)

    def reader() -> None:
        try:
            while not stop.is_set():
                try:
                    run = work.get_nowait()
                except queue.Empty:
                    return
                _read_run(run, files, staging, stop)
        except BaseException:
            stop.set()
            raise

    reading = [pool.submit(reader) for _ in range(threads)]
    copying = [pool.submit(staging.copy, stop) for _ in range(copiers)]
    try:
        for done in reading:
            done.result()
    except BaseException:
        stop.set()
        raise
    finally:
        wait(reading)
        staging.close(copiers)
    for done in copying:
        done.result()


def _read_run(run: list[Part], files: Files, staging: Staging, stop: threading.Event) -> None:
    file, begin, stored = run[0].file, run[0].begin, sum(part.stored for part in run)
    directly = False
    if any(isinstance(part, Piece) for part in run):
        # Through the page cache the kernel's own reading ahead keeps the disk busy, and takes a third less processor
        # time, since it gets memory in larger blocks.
        directly = files.directly(file, begin + stored // 2)
    else:
        files.announce(file, begin, stored)
    for part in run:
        if stop.is_set():
            return
        if isinstance(part, Convert):
            _convert(part, files)
        elif directly:
            staging.read(part)
        else:
            for read in part.reads:
                populate(read.dest.data_ptr(), read.stored)
            files.read_piece(part)


def _convert(read: Convert, files: Files) -> None:
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


def _convert_mxfp4(dest: Tensor, packed: Entry, scale: Entry, files: Files) -> None:
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
