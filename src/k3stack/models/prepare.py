"""Making weights of a checkpoint's bytes, in the memory into which they were read.

Row by row, from the front: decoded or widened where they are stored otherwise, and laid out for the products. Memory
besides the weights' is a piece for each thread; only where the processor's layout is not known (``linear.blocked``) a
weight is there twice while it is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from k3stack.config.cores import usable_cores
from k3stack.config.tensors import PACKED_PER_BYTE
from k3stack.kernels.linear.blocked import scratch
from k3stack.kernels.memory import populate, trim
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.models.landing import Landing, Stored

PIECE = 1 << 20
"""Bytes of a weight made at a time; they stay in the CPU's cache."""
TRIM = 64 << 20
"""Bytes of weights after which what temporaries have left behind goes back to the system."""


def prepare(landings: list[Landing], *, threads: int = 4, on_bytes: Callable[[int], None] | None = None) -> None:
    """Make the weights. ``on_bytes`` is called (from any thread) with bytes of weights just made."""
    before = torch.get_num_threads()
    since = 0
    trim()

    def make(landing: Landing) -> None:
        nonlocal since
        _make(landing)
        since += landing.memory.numel()
        if since >= TRIM:
            since = 0
            trim()
        if on_bytes is not None:
            on_bytes(landing.memory.numel())

    try:
        with ThreadPoolExecutor(min(threads, usable_cores()), initializer=lambda: torch.set_num_threads(1)) as pool:
            # The largest first: at the end all threads have work.
            for done in [pool.submit(make, x) for x in sorted(landings, key=lambda x: -x.memory.numel())]:
                done.result()
    finally:
        torch.set_num_threads(before)
    trim()


def _make(landing: Landing) -> None:
    (out, width), dtype, blocked = landing.shape, landing.dtype, landing.blocked
    block = 1 if blocked is None else blocked.rows
    step = max(1, PIECE // (width * dtype.itemsize) // block) * block
    buffer = scratch(min(step, -(-out // block) * block), width, dtype)
    untouched = landing.memory.numel() - sum(part.stored for part in landing.parts)
    # They lie before the codes, where the first rows will be written.
    scales = [None if part.scale is None else part.scale.clone() for part in landing.parts]
    for a in range(0, out, step):
        n = min(step, out - a)
        piece = buffer[: -(-n // block) * block]
        for part, scale in zip(landing.parts, scales, strict=True):
            _fill(piece, part, scale, a, a + n, width)
        piece[n:] = 0
        start = a * width * dtype.itemsize
        if start < untouched:
            populate(landing.memory.data_ptr() + start, min(piece.shape[0] * width * dtype.itemsize, untouched - start))
        if blocked is None:
            _plain(landing)[a : a + n].copy_(piece)
        else:
            blocked.write(piece, landing.memory, a)
    if landing.place is not None and blocked is not None:
        landing.place.put(blocked.weight(landing.memory))
    elif landing.place is not None:
        landing.place.pack(_plain(landing))


def _plain(landing: Landing) -> Tensor:
    return landing.memory.view(landing.dtype).view(landing.shape)


def _fill(piece: Tensor, part: Stored, scale: Tensor | None, a: int, b: int, width: int) -> None:
    """The rows from a to b of the weight, as far as they are the part's, into ``piece``, which begins with row a."""
    first, last = max(a, part.first), min(b, part.first + part.rows)
    if first >= last:
        return
    target = piece[first - a : last - a]
    rows = slice(first - part.first, last - part.first)
    if scale is None:
        target.copy_(_rows(part.raw, part.dtype, width, rows))
        return
    codes = _rows(part.raw, torch.uint8, width // PACKED_PER_BYTE, rows)
    groups = scale.numel() // part.rows
    mxfp4.decode_into(codes, scale.view(part.rows, groups)[rows], target)


def _rows(raw: Tensor, dtype: torch.dtype, width: int, rows: slice) -> Tensor:
    size = width * dtype.itemsize
    piece = raw[rows.start * size : rows.stop * size]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(-1, width)
