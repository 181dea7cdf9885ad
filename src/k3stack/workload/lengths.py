"""Length distributions with a stated mean, and arrival processes. All draws come from a seeded numpy generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from k3stack.errors import UserError

Arrivals = Literal["poisson", "constant", "bursty"]


def truncated_exponential(rng: np.random.Generator, n: int, mean: float, low: int, high: int) -> NDArray[np.int64]:
    """``n`` whole numbers on [low, high] with the given mean: the maximum-entropy spread between two bounds.

    The rate may be negative, so means above the middle are reached too (answers that mostly run into the cap).
    """
    if not low < mean < high:
        raise UserError(f"a mean of {mean:g} tokens does not lie between {low} and {high}")
    width = float(high - low)
    rate = _bisect(lambda r: _truncated_mean(r, width) - (mean - low), -60.0 / width, 60.0 / width)
    u = rng.random(n)
    if abs(rate * width) < 1e-9:
        x = u * width
    else:
        x = -np.log1p(-u * (-math.expm1(-rate * width))) / rate
    return np.asarray(np.clip(np.rint(low + x), low, high), dtype=np.int64)


def _truncated_mean(rate: float, width: float) -> float:
    """Mean of the density ~ exp(-rate x) on [0, width]."""
    z = rate * width
    if abs(z) < 1e-6:
        return width * (0.5 - z / 12)
    return 1 / rate - width / math.expm1(z)


def lognormal(rng: np.random.Generator, n: int, mean: float, sigma: float, low: int, high: int) -> NDArray[np.int64]:
    """``n`` whole numbers, log-normal with the given spread, clipped to [low, high], location set for the mean."""
    if not low < mean < high:
        raise UserError(f"a mean of {mean:g} tokens does not lie between {low} and {high}")
    grid = np.exp(sigma * np.sqrt(2) * _erfinv_grid())

    def off(mu: float) -> float:
        return float(np.clip(math.exp(mu) * grid, low, high).mean()) - mean

    mu = _bisect(lambda m: -off(m), math.log(low) - 5, math.log(high) + 5)
    drawn = np.exp(mu + sigma * rng.standard_normal(n))
    return np.asarray(np.clip(np.rint(drawn), low, high), dtype=np.int64)


def _erfinv_grid(points: int = 4001) -> NDArray[np.float64]:
    """Quantiles of the normal distribution over sqrt(2), by Newton steps on erf (no scipy needed)."""
    from statistics import NormalDist

    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / points) for i in range(points)]) / math.sqrt(2)


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Root of a falling function on [low, high]."""
    for _ in range(200):
        mid = (low + high) / 2
        if f(mid) > 0:
            low = mid
        else:
            high = mid
    return (low + high) / 2


MAX_ARRIVALS = 5_000_000
"""Requests that are drawn for one run at most."""


def arrival_times(
    rng: np.random.Generator,
    rate: float,
    duration_s: float,
    kind: Arrivals = "poisson",
    burst: float = 4.0,
) -> NDArray[np.float64]:
    """Arrival times in [0, duration): Poisson, evenly spaced, or bursty.

    Bursty: gamma-distributed gaps whose squared coefficient of variation is ``burst`` (1 would be Poisson).
    """
    if not 0 < rate < math.inf:
        raise UserError(f"--rate is {rate:g}; it must be above 0 requests a second", param="rate")
    if not rate * duration_s <= MAX_ARRIVALS:
        raise UserError(
            f"--rate {rate:g} over {duration_s:g} s are {rate * duration_s:.3g} requests; a run keeps at most "
            f"{MAX_ARRIVALS:,}: lower --rate, --duration or --requests",
            param="rate",
        )
    if kind == "constant":
        return np.arange(0.0, duration_s, 1.0 / rate, dtype=np.float64)
    n = int(rate * duration_s + 12 * math.sqrt(rate * duration_s * max(burst, 1.0)) + 16)
    shape = 1.0 if kind == "poisson" else 1.0 / burst
    gaps = rng.gamma(shape, 1.0 / (rate * shape), n)
    times = np.cumsum(gaps, dtype=np.float64)
    return np.asarray(times[times < duration_s], dtype=np.float64)
