"""What a step of a simulated server costs: the step model, with a drafter's verification and a pipeline's depth."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from k3stack.errors import UserError
from k3stack.estimate.measured import MeasuredCost
from k3stack.estimate.seconds import Efficiency, StepModel
from k3stack.estimate.work import StepLoad


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter as its accept-length distribution: ``shares[k]`` of the verifications commit k + 1 tokens.

    ``block`` drafted tokens are verified with the anchor: ``block + 1`` rows a request and step.
    """

    shares: tuple[float, ...]
    block: int = 7

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise UserError(f"a drafter's accept shares {self.shares} must be 0 or more and add up to 1")
        if len(self.shares) > self.block + 1:
            raise UserError(f"{len(self.shares)} accept shares for a block of {self.block}: at most {self.block + 1}")

    @property
    def mean(self) -> float:
        return sum((k + 1) * s for k, s in enumerate(self.shares))


def accept_shares(mean: float, block: int = 7) -> tuple[float, ...]:
    """Shares with the given mean, each drafted token accepted with one probability (a geometric law, cut at the block).

    Public runs give mean accept lengths; the law between them is an assumption.
    """
    if not 1.0 <= mean <= block + 1:
        raise UserError(f"an accept length of {mean:g} does not lie between 1 and {block + 1}", param="accept-length")
    low, high = 0.0, 1.0
    for _ in range(80):
        p = (low + high) / 2
        if sum(p**k for k in range(block + 1)) < mean:
            low = p
        else:
            high = p
    p = (low + high) / 2
    return (*(p**k * (1 - p) for k in range(block)), p**block)


class StepPrice:
    """Seconds of a step for the modelled executor. Remembers nothing but, with a drafter, its random numbers.

    With a drafter a step commits several tokens for each row. The scheduler here commits one token a row and step,
    so the verification's time is divided by the mean accept length drawn for the step's rows: rates and times are
    those of the drafted server, the raggedness between rows within a step is not shown.
    """

    def __init__(
        self,
        model: StepModel | MeasuredCost,
        drafter: Drafter | None = None,
        seed: int = 0,
        *,
        received: bool = False,
    ) -> None:
        """``received``: prompts come computed from elsewhere. What is left of one is its last token, which runs as a
        row of the decode step like any other and has none of a prompt step's costs."""
        self.model = model
        self.received = received
        self.drafter = drafter
        self._rng = random.Random(seed)
        self._lengths = tuple(range(1, len(drafter.shares) + 1)) if drafter else ()
        self._biased = tuple((k + 1) * s for k, s in enumerate(drafter.shares)) if drafter else ()
        self.verified = 0.0
        self.accepted = 0.0
        self._before: tuple[object, float, float, int] | None = None

    def __call__(self, load: StepLoad) -> float:
        if self.received and load.chunk_rows and load.chunk_tokens == load.chunk_rows:
            load = StepLoad(
                decode_rows=load.decode_rows + load.chunk_rows,
                decode_context=load.decode_context + load.chunk_prefix,
                samples=load.samples,
            )
        if self.drafter is None or not load.decode_rows:
            return self.model.seconds(load)
        drafted = replace(
            load, verify=self.drafter.block + 1, samples=load.samples + load.decode_rows * self.drafter.block
        )
        whole = self.model.seconds(drafted)
        if not load.chunk_tokens:
            return whole / self._accepted(load.decode_rows)
        alone = self.model.seconds(replace(load, decode_rows=0, decode_context=0, samples=load.chunk_rows))
        return alone + (whole - alone) / self._accepted(load.decode_rows)

    def ahead(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of ``steps`` decode steps in a row, the first with ``context`` cached tokens of all rows together.

        What was drawn for steps that do not come to pass is undone by ``rewind``.
        """
        verify = 1 if self.drafter is None else self.drafter.block + 1
        lines = self.model.decode_lines(rows, verify)
        if len(lines) == 1:
            rest, slope = lines[0]
            seconds = [rest + slope * c for c in range(context, context + rows * steps, rows)]
        else:
            seconds = [max([a + b * c for a, b in lines]) for c in range(context, context + rows * steps, rows)]
        if self.drafter is not None:
            self._before = (self._rng.getstate(), self.verified, self.accepted, rows)
            seconds = [s / self._accepted(rows) for s in seconds]
        return seconds

    def rewind(self, kept: int) -> None:
        """Of the steps that ``ahead`` has just priced only ``kept`` come to pass."""
        if self._before is not None:
            state, self.verified, self.accepted, rows = self._before
            self._rng.setstate(state)  # type: ignore[arg-type]
            for _ in range(kept):
                self._accepted(rows)

    def _accepted(self, rows: int) -> float:
        assert self.drafter is not None
        # Steps are counted by tokens, verifications are what takes time: a token is as likely to come from a long
        # acceptance as that is long. One row's draw is therefore size-biased, which makes the mean of 1 / sum exact.
        drawn = sum(self._rng.choices(self._lengths, self.drafter.shares, k=rows - 1)) if rows > 1 else 0
        drawn += self._rng.choices(self._lengths, self._biased)[0]
        self.verified += rows / drawn * rows
        self.accepted += rows
        return drawn / rows

    @property
    def front(self) -> Efficiency | MeasuredCost:
        """What knows the time before the scheduler (``before_s``) and the error band (``error``)."""
        return self.model if isinstance(self.model, MeasuredCost) else self.model.efficiency

    def latency(self, load: StepLoad) -> float:
        """Seconds from a step's start to its result: all pipeline stages one after the other, and the hand-ons."""
        if isinstance(self.model, MeasuredCost) or self.model.layout.pp == 1:
            return self(load)
        stages = self.model.layout.pp
        through = sum(self.model.step(load, i).seconds for i in range(stages))
        return through + (stages - 1) * self.model.handon_s(load.tokens)
