"""The files of a checkpoint, open for all threads that read: through the page cache, or past it.

Past it (O_DIRECT) the disk writes to the memory that is given to it: no page of the cache has to be found, filled and
copied. It needs whole blocks of the file and memory aligned like them, so the bytes go through a buffer
(``models.staging``).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from k3stack.errors import CheckpointError
from k3stack.models.checkpoint import Entry
from k3stack.models.landing import Read

BLOCK = 4096
"""To which offsets, lengths and memory are aligned where the page cache is passed by; disks want 512 or this."""
PIECE = 2 << 20
"""Bytes of a file that are read at once, a multiple of BLOCK."""
MOST_READS = 512
"""Of a piece; the system takes 1,024 destinations in one call."""
AT_ONCE = 16 << 20
"""Most bytes of one call to the system."""
REPORT = 4 << 20
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system says that has no O_DIRECT, or wants it aligned otherwise."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes in a row of one file, which lie in one of the file's ranges of PIECE bytes, and where they go."""

    reads: tuple[Read, ...]

    @property
    def file(self) -> Path:
        return self.reads[0].file

    @property
    def begin(self) -> int:
        return self.reads[0].begin

    @property
    def end(self) -> int:
        return self.reads[-1].begin + self.reads[-1].stored

    @property
    def stored(self) -> int:
        return self.end - self.begin


def pieces(reads: list[Read]) -> Iterator[Piece]:
    """All of them, in the order of the files."""
    group: list[Read] = []
    file, end = None, 0
    for read in sorted(reads, key=lambda r: (str(r.file), r.begin)):
        for part in _split(read):
            # No piece goes beyond a multiple of PIECE, which is where reads have been split.
            if read.file != file or part.begin != end or end % PIECE == 0 or len(group) == MOST_READS:
                if group:
                    yield Piece(tuple(group))
                group, file = [], read.file
            group.append(part)
            end = part.begin + part.stored
    if group:
        yield Piece(tuple(group))


def _split(read: Read) -> Iterator[Read]:
    """At the multiples of PIECE in the file."""
    at, offset, stored = 0, read.begin, read.stored
    if 0 < stored <= PIECE - offset % PIECE:
        yield read
        return
    while at < stored:
        size = min(PIECE - (offset + at) % PIECE, stored - at)
        yield Read(read.entry, read.start + at, read.dest[at : at + size])
        at += size


class Files:
    """The open files."""

    def __init__(self, paths: set[Path], on_bytes: Callable[[int], None] | None) -> None:
        self._open = {path: os.open(path, os.O_RDONLY) for path in paths}
        self._direct = {path: fd for path in paths if (fd := _open_directly(path)) is not None}
        self._refused: set[Path] = set()
        self._on_bytes = on_bytes
        self._unreported = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._report(0, 1)
        for fd in (*self._open.values(), *self._direct.values()):
            os.close(fd)

    def announce(self, file: Path, start: int, length: int) -> None:
        """Let the kernel begin to read, so that the disk works while tensors are converted."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._open[file], start, length, os.POSIX_FADV_WILLNEED)

    def directly(self, file: Path, at: int) -> bool:
        """Whether to pass by the page cache: it can be done, and the byte ``at`` is not there."""
        if self._past_cache(file) is None or not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            os.preadv(self._open[file], [bytearray(1)], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError as e:
            # Not every file system says what it has.
            if e.errno not in REFUSED:
                raise
        return False

    def read(self, entry: Entry, start: int, dest: Tensor) -> None:
        """Bytes from ``start`` of the tensor on into uint8 ``dest``, all of it."""
        for at in range(0, dest.numel(), AT_ONCE):
            self.read_piece(Piece((Read(entry, start + at, dest[at : at + AT_ONCE]),)))

    def read_piece(self, piece: Piece) -> None:
        """To where it goes, through the page cache."""
        views = [memoryview(read.dest.numpy()) for read in piece.reads]
        at = piece.begin
        while views:
            got = os.preadv(self._open[piece.file], views, at)
            if got == 0:
                raise _ended(piece, at)
            at += got
            self.report(got)
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]

    def read_directly(self, piece: Piece, buffer: memoryview) -> int:
        """Into ``buffer``, PIECE bytes aligned to BLOCK, past the page cache; returns where in it the piece begins.

        Through the cache after all where the file system refuses, and once the file has ended within a block.
        """
        skipped = piece.begin % BLOCK
        start, wanted = piece.begin - skipped, skipped + piece.stored
        done = 0
        while done < wanted:
            direct = self._past_cache(piece.file) if done % BLOCK == 0 else None
            try:
                if direct is None:
                    got = os.preadv(self._open[piece.file], [buffer[done:wanted]], start + done)
                else:
                    got = os.preadv(direct, [buffer[done : -(-wanted // BLOCK) * BLOCK]], start + done)
            except OSError as e:
                if direct is None or e.errno not in REFUSED:
                    raise
                self._refused.add(piece.file)
                continue
            if got == 0:
                raise _ended(piece, max(start + done, piece.begin))
            done += got
        return skipped

    def _past_cache(self, file: Path) -> int | None:
        return None if file in self._refused else self._direct.get(file)

    def report(self, count: int) -> None:
        """Pass on what has been read, in steps of REPORT bytes."""
        self._report(count, REPORT)

    def _report(self, count: int, at_least: int) -> None:
        if self._on_bytes is None:
            return
        with self._lock:
            self._unreported += count
            if self._unreported < at_least:
                return
            count, self._unreported = self._unreported, 0
        self._on_bytes(count)


def _open_directly(path: Path) -> int | None:
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as e:
        if e.errno not in REFUSED:
            raise
        return None


def _ended(piece: Piece, at: int) -> CheckpointError:
    """The file has no byte ``at`` of a piece of it."""
    entry = next(r.entry for r in piece.reads if r.begin + r.stored > at)
    missing = entry.offset + entry.nbytes - at
    return CheckpointError(f"{entry.file}: tensor {entry.name}: the file ended {missing:,} B early while being read")
