"""Buffers between a disk and the weights' memory.

Some threads read into them past the page cache, others get new memory for the weights and copy to it. So the disk
always has requests waiting, and both take place at once. The buffers lie in large pages, of which a disk takes all of
a piece in one request; in small pages it takes 1 MiB at most, and in a virtual machine a third of the rate.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from k3stack.kernels.memory import HUGE_PAGE, in_large_pages, populate
from k3stack.models.files import PIECE, Files, Piece

COPIED = 512 << 10
"""Bytes for which new memory is got and filled at once: they are still in the processor's cache."""


class Staging:
    """``count`` buffers of a piece each, in turns free and filled."""

    def __init__(self, count: int, files: Files) -> None:
        self._files = files
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[Piece, Tensor, int] | None] = queue.SimpleQueue()
        memory = torch.frombuffer(_new_memory(count * PIECE + HUGE_PAGE), dtype=torch.uint8)
        first = -memory.data_ptr() % HUGE_PAGE
        in_large_pages(memory.data_ptr() + first, count * PIECE)
        for i in range(count):
            self._free.put(memory[first + i * PIECE : first + (i + 1) * PIECE])

    def read(self, piece: Piece) -> None:
        """Fill a buffer, as soon as one is free."""
        buffer = self._free.get()
        try:
            begin = self._files.read_directly(piece, memoryview(buffer.numpy()))
        except BaseException:
            self._free.put(buffer)
            raise
        self._filled.put((piece, buffer, begin))

    def copy(self, stop: threading.Event) -> None:
        """Empty filled buffers until ``close``. After an error, which sets ``stop``, they are only freed, so that no
        ``read`` waits for ever."""
        try:
            self._empty(_copy)
        except BaseException:
            stop.set()
            self._empty(None)
            raise

    def _empty(self, copy: Callable[[Piece, Tensor], None] | None) -> None:
        while (filled := self._filled.get()) is not None:
            piece, buffer, begin = filled
            try:
                if copy is not None:
                    copy(piece, buffer[begin:])
                    self._files.report(piece.stored)
            finally:
                self._free.put(buffer)

    def close(self, threads: int) -> None:
        """Let so many ``copy`` end when all has been copied that has been read."""
        for _ in range(threads):
            self._filled.put(None)


def _copy(piece: Piece, source: Tensor) -> None:
    for read in piece.reads:
        start = read.begin - piece.begin
        for at in range(0, read.stored, COPIED):
            part = read.dest[at : at + COPIED]
            populate(part.data_ptr(), part.numel())
            part.copy_(source[start + at : start + at + part.numel()])


def _new_memory(size: int) -> mmap.mmap:
    """Of this process alone: memory that is shared comes in small pages."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
