"""Options of policy ``slo``."""

from __future__ import annotations

from dataclasses import dataclass

from k3stack.errors import UserError


@dataclass(frozen=True, slots=True)
class SloOptions:
    """How policy ``slo`` trades. ``validate`` raises UserError naming the field."""

    guard_s: float = 20.0
    """No request waits longer than this for its start, as far as ``guard_share`` allows."""
    guard_share: float = 0.1
    """Most of the time that prompts started by the guard may take while others could still be on time."""
    guard_credit_s: float = 30.0
    """Time whose share the guard may have saved up, so that after a burst it starts all who have waited, where it has
    had little to do before. 0: none."""
    risk: float = 0.6
    """A prompt that waiting would make late is begun although streams have no room for it, if fewer streams than this
    are to be expected to miss their target for it. 0: never."""
    told_lengths: bool = False
    """``max_tokens`` are the lengths of the answers (where that is known, and to see what knowing them is worth)."""
    max_gap_s: float | None = None
    """Longest time between two tokens of a stream that a step may cause; chunks are cut to keep it."""
    mixed: bool = True
    """Streams decode in the same step as a chunk."""
    outside_s: float = 0.0
    """Time between the end of a prompt's last step and the moment its first token counts as delivered."""

    def validate(self) -> SloOptions:
        if self.guard_s <= 0 or not 0 < self.guard_share <= 1 or self.outside_s < 0:
            raise UserError(
                f"guard {self.guard_s:g} s, guard share {self.guard_share:g}, outside {self.outside_s:g} s: the guard "
                "must be above 0, its share above 0 and at most 1, the time outside 0 or more",
                param="guard_s",
            )
        if self.guard_credit_s < 0:
            raise UserError(
                f"the guard's credit is {self.guard_credit_s:g} s; it must be 0 or more", param="guard_credit_s"
            )
        if self.max_gap_s is not None and self.max_gap_s <= 0:
            raise UserError(f"max_gap_s is {self.max_gap_s:g}; it must be above 0", param="max_gap_s")
        return self
