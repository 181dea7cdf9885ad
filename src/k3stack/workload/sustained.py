"""The sustained rate: the highest rate at which a share (95 %) of the requests meets the target.

Single runs of four minutes have a spread of 5 to 8 points near the edge, so a rate is judged by several runs: it is
repeated until the interval of the mean share leaves the target on one side, or the repeats are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from k3stack.errors import UserError

Measure = Callable[[float, int], tuple[int, int]]
"""(rate, repeat) -> (requests within target, requests)."""

T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


class Point(msgspec.Struct, kw_only=True):
    """All runs at one rate."""

    rate: float
    shares: list[float]
    good: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        return self.good / self.total if self.total else 0.0

    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean share over runs (Student's t); one run says nothing of its spread."""
        n = len(self.shares)
        if n < 2:
            return (self.share - 0.08, self.share + 0.08)
        mean = sum(self.shares) / n
        sd = math.sqrt(sum((s - mean) ** 2 for s in self.shares) / (n - 1))
        half = T95[min(n - 2, len(T95) - 1)] * sd / math.sqrt(n)
        return (self.share - half, self.share + half)


class Sustained(msgspec.Struct, kw_only=True):
    """``rate`` passed, ``above`` did not (None: never failed up to ``max_rate``)."""

    rate: float
    above: float | None
    points: list[Point]
    runs: int


def find_sustained(
    measure: Measure,
    *,
    share: float = 0.95,
    start: float = 0.5,
    resolution: float = 0.03,
    min_repeats: int = 2,
    max_repeats: int = 6,
    max_rate: float = 1024.0,
    on_point: Callable[[Point], None] | None = None,
) -> Sustained:
    """Bracket by doubling or halving from ``start``, then bisect to ``resolution`` (relative).

    Returns the highest rate that passed. A rate passes when its pooled share is at least ``share``.
    """
    if start <= 0 or not 0 < resolution < 1:
        raise UserError("a search for the sustained rate needs start > 0 and 0 < resolution < 1")
    points: list[Point] = []

    def passes(rate: float) -> bool:
        point = _judge(measure, rate, share, min_repeats, max_repeats)
        points.append(point)
        if on_point is not None:
            on_point(point)
        return point.share >= share

    low, high = 0.0, math.inf
    rate = start
    while high == math.inf and rate <= max_rate:
        if passes(rate):
            low, rate = rate, rate * 1.6
        else:
            high = rate
    while low == 0.0 and high > start / 4096:
        rate = high / 1.6
        if passes(rate):
            low = rate
        else:
            high = rate
    while high < math.inf and low > 0 and high / low > 1 + resolution:
        rate = math.sqrt(low * high)
        if passes(rate):
            low = rate
        else:
            high = rate
    points.sort(key=lambda p: p.rate)
    runs = sum(len(p.shares) for p in points)
    return Sustained(rate=low, above=None if high == math.inf else high, points=points, runs=runs)


def _judge(measure: Measure, rate: float, share: float, min_repeats: int, max_repeats: int) -> Point:
    point = Point(rate=rate, shares=[])
    while len(point.shares) < max_repeats:
        good, total = measure(rate, len(point.shares))
        point.good += good
        point.total += total
        point.shares.append(good / total if total else 0.0)
        low, high = point.interval()
        if len(point.shares) >= min_repeats and not low <= share <= high:
            break
    return point
