"""Step times of a machine that was measured, without asking why: a line in what a step computes, and a bent one in
the rows that decode, whose first ones cost more than later ones (experts shared, a product of one row by itself).

Fitted to the step log of a running server (``k3 serve --step-log``). It answers for that machine, model and layout
alone, and for loads inside the range that was seen.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from k3stack.config.files import read_text
from k3stack.errors import UserError
from k3stack.estimate.work import StepLoad

Matrix = npt.NDArray[np.float64]
LEAST_STEPS = 20
"""Steps of a kind without which nothing can be said about it."""
OUTLIER = 3.0
"""A step that took so many times the median of its size is left out: another program had the processor."""


class MeasuredCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: ``decode`` or ``chunk`` once, and so much for each row, cached token, prompt token, pair."""

    decode: float
    """A step that only decodes."""
    row: float
    context: float
    """Each cached token of the decoding rows."""
    chunk: float
    """A step with prompt tokens."""
    chunk_row: float
    token: float
    prefix: float
    """Each cached token in front of a chunk."""
    pair: float
    """Each attended pair inside chunks."""
    knots: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of steps that only decode, with nothing cached, at each number of rows that was seen often: these
    hold there instead of the line ``decode`` + ``row``, which goes on outside of them."""
    host_s: float = 0.0
    """Time of a request outside steps before its first token."""
    host_token_s: float = 0.0
    error: float = 0.2
    """Relative error of a step's time, 90th percentile over the steps fitted."""
    source: str = ""

    def prompt_s(self, tokens: int, chunk_tokens: int) -> float:
        """Seconds of the steps that compute a prompt of ``tokens`` alone, none of it cached."""
        total = 0.0
        for start in range(0, tokens, chunk_tokens):
            n = min(chunk_tokens, tokens - start)
            pairs = n * (start + n / 2)
            total += self.seconds(StepLoad(chunk_rows=1, chunk_tokens=n, chunk_prefix=start, chunk_pairs=pairs))
        return total

    def seconds(self, load: StepLoad) -> float:
        if load.chunk_tokens:
            base = self.chunk + self.row * load.decode_rows
        else:
            base = self._decode_s(load.decode_rows) if load.decode_rows else 0.0
        return (
            base
            + self.context * load.decode_context
            + self.chunk_row * load.chunk_rows
            + self.token * load.chunk_tokens
            + self.prefix * load.chunk_prefix
            + self.pair * load.chunk_pairs
        )

    def decode_lines(self, rows: int, verify: int = 1, samples: int | None = None) -> tuple[tuple[float, float], ...]:
        """A decode step's time as a line in its cached tokens: (seconds, seconds a token)."""
        return ((self._decode_s(rows), self.context),)

    def _decode_s(self, rows: int) -> float:
        """A step that only decodes, but for its cached tokens."""
        knots = self.knots
        if not knots:
            return self.decode + self.row * rows
        i = bisect_right(knots, (rows, float("inf")))
        if i == 0 or i == len(knots):
            n, seconds = knots[0] if i == 0 else knots[-1]
            return seconds + self.row * (rows - n)
        (a, before), (b, after) = knots[i - 1], knots[i]
        return before + (after - before) * (rows - a) / (b - a)

    def before_s(self, prompt_tokens: int) -> float:
        """Seconds between a request's arrival and its place in the scheduler's queue."""
        return self.host_s + self.host_token_s * prompt_tokens


def with_host(cost: MeasuredCost, first_tokens: Iterable[tuple[int, float]], chunk_tokens: int) -> MeasuredCost:
    """``cost`` with the time outside steps, from (prompt tokens, seconds to the first token) of requests that came one
    at a time and found nothing cached."""
    seen = [(n, t - cost.prompt_s(n, chunk_tokens)) for n, t in first_tokens]
    if len(seen) < LEAST_STEPS:
        raise UserError(f"{len(seen)} requests cannot tell the time outside steps; at least {LEAST_STEPS} are needed")
    middle = sorted(seen, key=lambda s: s[1])[len(seen) // 10 : len(seen) - len(seen) // 10]
    x = np.array([[1.0, n / 1000] for n, _ in middle])
    found = _non_negative(x, np.array([max(t, 0.0) for _, t in middle]))
    return msgspec.structs.replace(cost, host_s=float(found[0]), host_token_s=float(found[1]) / 1000)


def read_step_log(path: str | Path) -> tuple[dict[str, Any], list[tuple[StepLoad, float]]]:
    """What a step log says of its server, and loads and seconds of its steps; UserError names a line that is none."""
    lines = read_text(path, param="fit-steps").splitlines()
    head: dict[str, Any] = {}
    steps: list[tuple[StepLoad, float]] = []
    for number, line in enumerate(lines, start=1):
        try:
            raw: dict[str, Any] = json.loads(line)
            if number == 1:
                if raw.get("k3stack_steps") != 1:
                    raise UserError(f"{path}: not a step log of `k3 serve --step-log`", param="fit-steps")
                head = raw
                continue
            seconds = float(raw.pop("seconds"))
            for name in ("at", "device_s"):
                raw.pop(name, None)
            steps.append((StepLoad(**raw), seconds))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
            raise UserError(f"{path}: line {number} is not a step ({e})", param="fit-steps") from None
    return head, steps


def fit_steps(steps: Iterable[tuple[StepLoad, float]], source: str = "") -> MeasuredCost:
    """The line through measured steps: no term below zero, and the mean of each kind of step kept.

    Decode steps give ``decode``, ``row``, ``context`` and ``knots``; steps with prompt tokens the rest.
    """
    kept = list(steps)
    decode = [s for s in kept if s[0].decode_rows and not s[0].chunk_tokens]
    chunk = [s for s in kept if s[0].chunk_tokens]
    if len(decode) < LEAST_STEPS or len(chunk) < LEAST_STEPS:
        raise UserError(
            f"the step log has {len(decode)} decode steps and {len(chunk)} with prompt tokens; at least {LEAST_STEPS} "
            "of each are needed",
            param="fit-steps",
        )
    decode = _trimmed(decode, lambda x: x.decode_rows)
    chunk = _trimmed(chunk, lambda x: x.chunk_tokens.bit_length())
    context, knots = _knots(decode)
    rests = [t - context * x.decode_context for x, t in decode]
    a = [*_line([[1, x.decode_rows] for x, _ in decode], rests), context]
    rest = [t - a[1] * x.decode_rows - a[2] * x.decode_context for x, t in chunk]
    b = _line([[1, x.chunk_rows, x.chunk_tokens, x.chunk_prefix, x.chunk_pairs] for x, _ in chunk], rest)
    cost = MeasuredCost(
        decode=a[0],
        row=a[1],
        context=a[2],
        chunk=b[0],
        chunk_row=b[1],
        token=b[2],
        prefix=b[3],
        pair=b[4],
        knots=knots,
        source=source,
    )
    errors = sorted(abs(cost.seconds(x) / t - 1) for x, t in [*decode, *chunk])
    return msgspec.structs.replace(cost, error=errors[int(0.9 * (len(errors) - 1))])


def _knots(decode: Sequence[tuple[StepLoad, float]]) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Seconds a cached token, and seconds at each number of rows that at least ``LEAST_STEPS`` steps had.

    Rows and cached tokens grow together, so what a cached token costs is told from steps with the same rows.
    """
    counts = Counter(x.decode_rows for x, _ in decode)
    often = sorted(rows for rows, n in counts.items() if n >= LEAST_STEPS)
    if not often:
        return _line([[1, x.decode_rows, x.decode_context] for x, _ in decode], [t for _, t in decode])[2], ()
    kept = [(x, t) for x, t in decode if counts[x.decode_rows] >= LEAST_STEPS]
    columns = [[*(float(x.decode_rows == rows) for rows in often), x.decode_context] for x, _ in kept]
    *seconds, context = _line(columns, [t for _, t in kept])
    return context, _rising(list(zip(often, seconds, strict=True)), [counts[rows] for rows in often])


def _trimmed(steps: list[tuple[StepLoad, float]], size: Callable[[StepLoad], int]) -> list[tuple[StepLoad, float]]:
    """Without those that are slow for their size: the slowest of all would be the largest."""
    by: dict[int, list[float]] = {}
    for load, seconds in steps:
        by.setdefault(size(load), []).append(seconds)
    most = {n: OUTLIER * float(np.median(seconds)) for n, seconds in by.items()}
    return [(load, seconds) for load, seconds in steps if seconds <= most[size(load)]]


def _rising(knots: Sequence[tuple[int, float]], weights: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """The knots with neighbours averaged until none is below the one before: more rows do not take less time, and where
    it looks so a few steps were disturbed."""
    pools: list[tuple[float, int, int]] = []  # seconds, weight, knots
    for (_, seconds), weight in zip(knots, weights, strict=True):
        pools.append((seconds, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m, i), (b, n, j) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n, i + j)]
    level = [seconds for seconds, _, n in pools for _ in range(n)]
    return tuple((rows, seconds) for (rows, _), seconds in zip(knots, level, strict=True))


def _line(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares without negative coefficients, relative to each step's time; then scaled to keep the total.

    Relative to what the pass before predicts, not to what was measured: where the end of a step was noticed late, the
    next one looks short, and would outweigh all the others.
    """
    x, y = np.array(columns, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scale = np.where(x.max(axis=0) > 0, x.max(axis=0), 1.0)
    weight = np.ones(len(y))
    for _ in range(3):
        found = _non_negative(x / scale * weight[:, None], y * weight)
        weight = 1.0 / np.maximum(x / scale @ found, 1e-6)
    total = float((x / scale @ found).sum())
    return [float(v) for v in found / scale * (float(y.sum()) / total if total else 1.0)]


def _non_negative(a: Matrix, b: Matrix) -> Matrix:
    """Lawson and Hanson's active set: least squares over coefficients of zero and more."""
    n = a.shape[1]
    x = np.zeros(n)
    free: list[int] = []
    while True:
        gradient = a.T @ (b - a @ x)
        held = [i for i in range(n) if i not in free and gradient[i] > 1e-9 * float(np.abs(a.T @ b).max())]
        if not held:
            return x
        free.append(max(held, key=lambda i: gradient[i]))
        while True:
            z = np.zeros(n)
            z[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if min(z[free]) > 0:
                x = z
                break
            steps = [x[i] / (x[i] - z[i]) for i in free if z[i] <= 0]
            x = x + min(steps) * (z - x)
            free = [i for i in free if x[i] > 1e-15]
            if not free:
                return np.zeros(n)
