"""Confidence intervals of a share: Wilson's, and one that knows that questions about one document are alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

Z = 1.959964
"""Two-sided 95 %."""


def wilson(right: float, n: float) -> tuple[float, float]:
    """Wilson score interval of ``right`` out of ``n`` (Wilson 1927); (0, 1) where nothing was asked."""
    if n <= 0:
        return 0.0, 1.0
    p = right / n
    middle = p + Z * Z / (2 * n)
    spread = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def clustered(right: Sequence[bool], groups: Sequence[int]) -> tuple[float, float]:
    """Wilson's interval with the number of independent questions that the spread between groups leaves.

    The variance of the share is that of a ratio over groups, sum((s_g - p n_g)^2) / n^2 * G / (G - 1). Where it is
    zero (all right, or all wrong) it tells nothing and each group counts as one question.
    """
    n = len(right)
    if n == 0:
        return 0.0, 1.0
    p = sum(right) / n
    totals: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for ok, group in zip(right, groups, strict=True):
        totals[group][0] += ok
        totals[group][1] += 1
    count = len(totals)
    if count == n:
        return wilson(p * n, n)
    variance = sum((s - p * m) ** 2 for s, m in totals.values()) / n**2 * count / max(1, count - 1)
    effective = float(count) if variance == 0 else min(float(n), max(float(count), p * (1 - p) / variance))
    return wilson(p * effective, effective)
