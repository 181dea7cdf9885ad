"""What a policy knows of how long steps take: a cost function given from outside, corrected by measured steps."""

from __future__ import annotations

from typing import Protocol

from k3stack.estimate.work import StepLoad

WEIGHT = 0.05
"""Of a new measurement in the running correction."""
BOUNDS = (0.02, 50.0)
"""Of the correction: a measurement outside says that something other than the step was measured."""


class StepCost(Protocol):
    """Predicts the seconds of a step (``estimate.seconds.StepModel`` is one)."""

    def seconds(self, load: StepLoad) -> float: ...


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
        """A step with ``load`` has taken ``seconds``; steps that were not measured (0) teach nothing."""
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
