"""Where every Triton kernel is started: one place, so that a test can compile what would have been started.

A kernel with a parameter ``PDL`` begins while the one before it still runs (programmatic dependent launch) and waits
for that one's results by ``await_inputs``, before it reads or writes any memory.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

from k3stack.kernels.restart import starts_if_known

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# None: every start goes Triton's way.
STARTS = None if INTERPRETED else starts_if_known()


@triton.jit
def let_come(PDL: tl.constexpr):
    """Let the next kernel's programs come already, one that reads nothing but weights before it waits: it may begin
    while the kernel before this one still runs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait until all results before this kernel are in memory, then let the next kernel's programs begin to come: they
    may read what the kernel before this one wrote even before they wait."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` on ``grid`` programs; ``options`` are its compile-time arguments, warps and stages."""
    if not all(grid) or (STARTS is not None and STARTS.again(kernel, grid, args, options)):
        return
    compiled = kernel[grid](*args, **options_of(kernel, options))
    if STARTS is not None and compiled is not None:
        STARTS.remember(kernel, args, options, compiled)


def options_of(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with those that concern the start itself."""
    if "PDL" not in kernel.arg_names:
        return options
    return options | {"PDL": not INTERPRETED, "launch_pdl": not INTERPRETED}


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
