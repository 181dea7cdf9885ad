"""The latency target, exactly as the study states it.

First token within ``ttft_s``; then on average at most ``tpot_s`` a token over the request. An answer that is a tool
call arrives in one piece: it meets the target when it is complete within ``ttft_s`` plus ``tpot_s`` a token.
"""

from __future__ import annotations

import math

import msgspec

from k3stack.errors import UserError
from k3stack.workload.records import Record


class Target(msgspec.Struct, frozen=True):
    """Seconds. The study's target is the default; ``share`` is what a sustained rate must keep."""

    ttft_s: float = 2.0
    tpot_s: float = 0.025
    share: float = 0.95

    def validate(self) -> Target:
        if not (0 < self.ttft_s < math.inf and 0 < self.tpot_s < math.inf and 0 < self.share < 1):
            raise UserError(
                f"target is {self.ttft_s:g} s / {self.tpot_s * 1000:g} ms / {self.share:g}; "
                "times must be above 0 and the share between 0 and 1",
                param="target",
            )
        return self

    def scaled(self, factor: float) -> Target:
        """The same target for a machine ``factor`` times slower."""
        return Target(self.ttft_s * factor, self.tpot_s * factor, self.share)

    def met(self, r: Record) -> bool:
        """Whether the request met the target; one that failed or never ended did not."""
        if not r.ok or r.first_s is None or r.finished_s is None:
            return False
        if r.tool_call:
            return r.finished_s - r.arrival_s <= self.ttft_s + self.tpot_s * r.output_tokens + 1e-9
        if r.first_s - r.arrival_s > self.ttft_s + 1e-9:
            return False
        return r.output_tokens < 2 or (r.tpot_s or 0.0) <= self.tpot_s + 1e-9
