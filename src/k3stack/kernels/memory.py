"""How the process's memory is laid out for weights and large temporaries on a CPU (Linux; elsewhere nothing happens).

All of them are hints to the C library and the kernel; results do not depend on them.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

PAGE = 4096
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, MADV_COLLAPSE = 14, 15, 23, 25
HUGE_PAGE = 2 << 20
HEAP_LIMIT = 32 << 20
"""Largest block that malloc can be told to take from its heap."""


def huge_pages_granted() -> bool:
    """Whether Linux gives pages of 2 MiB to who asks for them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[never]" not in setting.read_text()


def in_small_pages(start: int, size: int) -> bool:
    """Have memory that is not there yet come in pages of 4 KiB, whoever asked for larger ones before."""
    return _advise(start, size, MADV_NOHUGEPAGE)


def in_large_pages(start: int, size: int) -> bool:
    """Have memory that is not there yet come in pages of 2 MiB, where the system has them."""
    return _advise(start, size, MADV_HUGEPAGE)


def gather_pages(start: int, size: int) -> bool:
    """Move what lies in [start, start + size) into pages of 2 MiB, now; values stay. False where the system (Linux
    before 6.1) cannot, or has no such pages left."""
    return in_large_pages(start, size) and _advise(start, size, MADV_COLLAPSE)


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed memory for the next step instead of returning it to the kernel.

    By default every temporary of some megabytes is mapped anew, zeroed page by page and unmapped again: a fifth of a
    long prefill's time on a CPU. Costs memory of the size of the largest step's temporaries. Returns False where the
    C library has no such setting.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, HEAP_LIMIT), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_TOP_PAD, 2 * HEAP_LIMIT))
    return sum(mallopt(name, value) for name, value in settings) == len(settings)


def populate(start: int, size: int) -> bool:
    """Have the system provide the whole pages in [start, start + size) at once, with the values that they have.

    It is done anyway at the first write to each page, but that takes half as long again. False where the system has
    no such call (Linux before 5.14).
    """
    return _advise(start, size, MADV_POPULATE_WRITE)


def _advise(start: int, size: int, advice: int) -> bool:
    first, last = -(-start // PAGE) * PAGE, (start + size) // PAGE * PAGE
    if last <= first or not sys.platform.startswith("linux"):
        return False
    return _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice) == 0


def trim() -> bool:
    """Return whole free pages of malloc's heaps to the system; False where the C library cannot."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    return malloc_trim is not None and malloc_trim(0) == 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
