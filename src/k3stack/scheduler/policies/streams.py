"""The streams that can still meet their target: how long they can spare the device, and who is at risk if they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from k3stack.estimate.work import StepLoad
from k3stack.scheduler.policies.slo_options import SloOptions

INF = float("inf")
DEFAULT_ANSWER = 200.0
"""Tokens of an answer before any has ended."""
PRIOR = 8.0
"""Answers that the default is worth against those seen."""
LEAST_GAIN = 0.02
"""Of its pace: slack that a stream is taken to win by a step at least, so that estimates stay finite."""
MOST_DECODE = 0.8
"""Share of the device that streams are taken to need at most, when estimating how long prompts take beside them."""

Floats = npt.NDArray[np.float64]


class Answers:
    """Lengths of the answers that have ended by themselves lately, ascending, and what they say of others."""

    def __init__(self, lengths: npt.NDArray[np.int64]) -> None:
        self.lengths = lengths
        self.mean = (float(lengths.sum()) + PRIOR * DEFAULT_ANSWER) / (len(lengths) + PRIOR)
        """Tokens to expect of an answer."""

    def ends_within(self, outputs: Floats, more: Floats) -> Floats:
        """Probability that a stream with so many ``outputs`` ends within so many ``more``: the share of the answers
        that did, among those that got as far; few of them are filled up with an even hazard."""
        reached = np.searchsorted(self.lengths, outputs, "right")
        ended = np.searchsorted(self.lengths, outputs + more, "right") - reached
        even = 1.0 - np.exp(-more / self.mean)
        result: Floats = (ended + PRIOR * even) / (len(self.lengths) - reached + PRIOR)
        return result


class Streams:
    """Those with a schedule, as they will be at ``start``, one an array element.

    ``slack``: seconds that the next token may come after ``start``; ``pace``: seconds a token; ``outputs``: tokens so
    far; ``left``: tokens until its limit; ``answers`` is asked only where it matters.
    """

    def __init__(
        self,
        start: float,
        load: StepLoad,
        step: float,
        slack: Floats,
        pace: Floats,
        outputs: Floats,
        left: Floats,
        answers: Callable[[], Answers],
        options: SloOptions,
    ) -> None:
        self.start = start
        self.load = load
        self.step = step
        """Seconds of one decode step of all streams."""
        told = options.told_lengths
        if told:
            # What counts is the last token: until then each step wins some slack.
            slack = slack + np.maximum(left - 1, 0.0) * np.maximum(pace - step, 0.0)
        least = float(slack.min()) if len(slack) else INF
        if least <= 0.0:
            # A stream that lags by more than it can be expected to make up again is given up.
            expected = 0.0 if told else answers().mean
            saved = slack > -expected * np.maximum(pace - step, 0.0)
            slack, pace, outputs = slack[saved], pace[saved], outputs[saved]
            least = float(slack.min()) if len(slack) else INF
        self.slack, self._pace = slack, pace
        self._outputs = outputs
        self._answers = answers
        self._told = told
        self.room = INF
        """Seconds that a step with a chunk may take before one of them is late."""
        self.stretch = 1.0
        """By how much the streams' needs stretch the time that prompts take."""
        if len(self.slack):
            self.room = least - (0.0 if options.mixed else step)
            self.stretch = 1.0 / (1.0 - min(step / float(pace.min()), MOST_DECODE))

    @cached_property
    def gain(self) -> Floats:
        """Slack that each wins by a decode step."""
        gain: Floats = np.maximum(self._pace - self.step, LEAST_GAIN * self._pace)
        return gain

    def wait(self, seconds: float) -> float:
        """How long to decode until a step of so many seconds has room."""
        if not len(self.slack):
            return 0.0
        return max(0.0, float(((seconds - self.slack) / self.gain).max())) * self.step

    def risk(self, seconds: float) -> float:
        """Streams that are to be expected to end before they have made up for a step of so many seconds now."""
        behind = np.maximum(seconds - self.slack, 0.0) / self.gain
        if self._told:
            return float((behind > 0).sum())
        return float(self._answers().ends_within(self._outputs, behind)[behind > 0].sum())
