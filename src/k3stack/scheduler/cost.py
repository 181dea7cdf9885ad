"""What a policy knows of how long steps take: given from outside and corrected by measured steps, or only learned."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from k3stack.estimate.work import StepLoad

WEIGHT = 0.05
"""Of a new measurement in the running correction."""
BOUNDS = (0.02, 50.0)
"""Of the correction: a measurement outside says that something other than the step was measured."""


class StepCost(Protocol):
    """Predicts the seconds of a step (``estimate.seconds.StepModel`` is one)."""

    def seconds(self, load: StepLoad) -> float: ...


@runtime_checkable
class LearningCost(StepCost, Protocol):
    """A ``StepCost`` that measured steps improve."""

    def learn(self, load: StepLoad, seconds: float) -> None:
        """A step with ``load`` has taken ``seconds`` (0 or less: it was not measured)."""
        ...


class CorrectedCost:
    """``StepCost`` times a factor learned on line, one for steps with a chunk and one for those without."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.factors = [1.0, 1.0]
        """For steps without and with a chunk."""
        self._seen = [0, 0]

    def seconds(self, load: StepLoad) -> float:
        return self.cost.seconds(load) * self.factors[load.chunk_tokens > 0]

    def learn(self, load: StepLoad, seconds: float) -> None:
        predicted = self.cost.seconds(load)
        if seconds <= 0 or predicted <= 0:
            return
        ratio = seconds / predicted
        if not BOUNDS[0] <= ratio <= BOUNDS[1]:
            return
        kind = int(load.chunk_tokens > 0)
        self._seen[kind] += 1
        weight = max(WEIGHT, 1.0 / self._seen[kind])  # a plain mean at first
        self.factors[kind] += weight * (ratio - self.factors[kind])


PRIOR = (2e-3, 2e-5, 1e-9, 2e-3, 2e-4, 1e-8)
"""Seconds of a step with a chunk, of a chunk's token and attended pair; of a step with decode rows, of a decode row and
of a token behind one: where learning begins, of no hardware in particular."""
FORGET = 0.995
"""Weight of a step relative to the one after it."""
LEAST = 1e-3
"""Of what ``PRIOR`` says: no prediction is below."""


class LearnedCost:
    """Step times as a sum of six terms (``PRIOR``), their factors fitted on line to relative errors.

    For machines that ``estimate`` has no figures of. Recursive least squares with forgetting; factors below 0 count
    as 0.
    """

    def __init__(self) -> None:
        self.factors: npt.NDArray[np.float64] = np.ones(len(PRIOR))
        self._prior = np.array(PRIOR)
        self._spread = np.eye(len(PRIOR)) * 100.0
        self._rates = PRIOR
        """``PRIOR`` times factors: plain numbers, since a policy asks many times a turn."""

    @staticmethod
    def _counts(load: StepLoad) -> tuple[float, ...]:
        return (
            float(load.chunk_tokens > 0),
            float(load.chunk_tokens),
            load.chunk_pairs,
            float(load.decode_rows > 0),
            float(load.decode_rows),
            float(load.decode_context),
        )

    def seconds(self, load: StepLoad) -> float:
        a, b, c, d, e, f = self._counts(load)
        ra, rb, rc, rd, re, rf = self._rates
        pa, pb, pc, pd, pe, pf = PRIOR
        least = pa * a + pb * b + pc * c + pd * d + pe * e + pf * f
        return max(ra * a + rb * b + rc * c + rd * d + re * e + rf * f, LEAST * least)

    def learn(self, load: StepLoad, seconds: float) -> None:
        if seconds <= 0:
            return
        x = self._prior * self._counts(load) / seconds  # relative errors: a short step teaches as much as a long one
        spread = self._spread @ x
        gain = spread / (FORGET + float(x @ spread))
        self.factors = self.factors + gain * (1.0 - float(x @ self.factors))
        grown = (self._spread - np.outer(gain, spread)) / FORGET
        # Directions that no step excites would grow without bound.
        self._spread = grown if float(np.trace(grown)) < 1e6 else self._spread - np.outer(gain, spread)
        rates = np.maximum(self.factors, 0.0) * self._prior
        self._rates = tuple(rates.tolist())
