"""Step times of a machine that was measured, without asking why: a line in what a step computes.

Fitted to the step log of a running server (``k3 serve --step-log``). It answers for that machine, model and layout
alone, and for loads inside the range that was seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from k3stack.errors import UserError
from k3stack.estimate.work import StepLoad

Matrix = npt.NDArray[np.float64]
LEAST_STEPS = 20
"""Steps of a kind without which nothing can be said about it."""
OUTLIERS = 0.01
"""Share of the slowest steps of each kind that are left out: another program had the processor."""


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
        base = self.chunk if load.chunk_tokens else self.decode if load.decode_rows else 0.0
        return (
            base
            + self.row * load.decode_rows
            + self.context * load.decode_context
            + self.chunk_row * load.chunk_rows
            + self.token * load.chunk_tokens
            + self.prefix * load.chunk_prefix
            + self.pair * load.chunk_pairs
        )

    def decode_lines(self, rows: int, verify: int = 1, samples: int | None = None) -> tuple[tuple[float, float], ...]:
        """A decode step's time as a line in its cached tokens: (seconds, seconds a token)."""
        return ((self.decode + self.row * rows, self.context),)

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
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}", param="fit-steps") from None
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
            raw.pop("device_s", None)
            steps.append((StepLoad(**raw), seconds))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as e:
            raise UserError(f"{path}: line {number} is not a step ({e})", param="fit-steps") from None
    return head, steps


def fit_steps(steps: Iterable[tuple[StepLoad, float]], source: str = "") -> MeasuredCost:
    """The line through measured steps: no term below zero, and the mean of each kind of step kept.

    Decode steps give ``decode``, ``row`` and ``context``; steps with prompt tokens the rest.
    """
    kept = list(steps)
    decode = _trimmed([s for s in kept if s[0].decode_rows and not s[0].chunk_tokens])
    chunk = _trimmed([s for s in kept if s[0].chunk_tokens])
    if len(decode) < LEAST_STEPS or len(chunk) < LEAST_STEPS:
        raise UserError(
            f"the step log has {len(decode)} decode steps and {len(chunk)} with prompt tokens; at least {LEAST_STEPS} "
            "of each are needed",
            param="fit-steps",
        )
    a = _line([[1, x.decode_rows, x.decode_context] for x, _ in decode], [t for _, t in decode])
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
        source=source,
    )
    errors = sorted(abs(cost.seconds(x) / t - 1) for x, t in [*decode, *chunk])
    return msgspec.structs.replace(cost, error=errors[int(0.9 * (len(errors) - 1))])


def _trimmed(steps: list[tuple[StepLoad, float]]) -> list[tuple[StepLoad, float]]:
    ordered = sorted(steps, key=lambda s: s[1])
    return ordered[: len(ordered) - int(OUTLIERS * len(ordered))]


def _line(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares without negative coefficients, relative to each step's time; then scaled to keep the total."""
    x, y = np.array(columns, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scale = np.where(x.max(axis=0) > 0, x.max(axis=0), 1.0)
    weight = 1.0 / np.maximum(y, 1e-6)
    found = _non_negative(x / scale * weight[:, None], y * weight)
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
