"""Where every Triton kernel is started: one place, so that a test can compile what would have been started."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` on ``grid`` programs; ``options`` are its compile-time arguments, warps and stages."""
    if all(grid):
        kernel[grid](*args, **options)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
