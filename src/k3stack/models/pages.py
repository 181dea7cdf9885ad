"""The pages in which weights lie on a CPU: of 4 KiB while they are read, of 2 MiB soon afterwards.

Weights are read from end to end at every step, and with pages of 4 KiB the processor's prefetching stops at each:
decode of 16 sequences takes 3 to 5 % less time with large ones. Reading need not be faster: in a virtual machine whose
host takes back free memory, those are the blocks of 2 MiB, and getting one back takes ten times as long as the same
bytes in small pages do. So weights are read into small pages, and a thread moves them when the model can run.
Temporaries stay in small pages for the same reason.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterator

from k3stack.kernels.memory import HUGE_PAGE, PAGE, gather_pages, huge_pages_granted, in_small_pages
from k3stack.models.landing import Landed
from k3stack.models.network import Model

THREAD = "large-pages"
"""Name of the thread that moves a model's weights."""

Region = tuple[int, int]
"""Address and bytes."""


def small_pages(landed: Landed) -> list[Region]:
    """Have all weights' memory, to which nothing has been written yet, come in small pages; returns where it is."""
    if not huge_pages_granted():
        return []
    storages = {x.memory.untyped_storage().data_ptr(): x.memory.untyped_storage().nbytes() for x in landed.landings}
    regions: list[Region] = []
    for start, size in sorted(storages.items()):
        if regions and start - sum(regions[-1]) <= 2 * PAGE:
            # Neighbours in malloc's heap: a large page may hold parts of both.
            regions[-1] = (regions[-1][0], start + size - regions[-1][0])
        else:
            regions.append((start, size))
    return [region for region in regions if region[1] >= HUGE_PAGE and in_small_pages(*region)]


def move_to_large_pages(model: Model, regions: list[Region]) -> threading.Thread | None:
    """Begin to move the regions, in a thread of its own that ends with the model or the process.

    It works half of the time, so that the first requests have the processor's cores.
    """
    if not regions:
        return None
    alive, stop = weakref.ref(model), threading.Event()

    def move() -> None:
        for at in _large_pages(regions):
            # The memory is the model's for as long as it is held here.
            held, begin = alive(), time.perf_counter()
            if held is None or not gather_pages(at, HUGE_PAGE):
                break
            del held
            if stop.wait(time.perf_counter() - begin):
                return
        atexit.unregister(end)

    def end() -> None:
        stop.set()
        thread.join()

    thread = threading.Thread(target=move, name=THREAD, daemon=True)
    atexit.register(end)
    thread.start()
    return thread


def _large_pages(regions: list[Region]) -> Iterator[int]:
    """Addresses of those that lie in the regions."""
    for start, size in regions:
        yield from range(-(-start // HUGE_PAGE) * HUGE_PAGE, start + size - HUGE_PAGE + 1, HUGE_PAGE)
