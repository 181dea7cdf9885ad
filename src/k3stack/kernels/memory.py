"""How the process's allocator treats large temporaries."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed memory for the next step instead of returning it to the kernel.

    By default every temporary of some megabytes is mapped anew, zeroed page by page and unmapped again: a fifth of a
    long prefill's time on a CPU. Costs address space the size of the largest step's temporaries. Returns False where
    the C library has no such setting, and nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 1 << 30), (M_TOP_PAD, 64 << 20))
    return all(mallopt(name, value) == 1 for name, value in settings)
