"""What a plan computes, as a ``StepLoad``: needs the rows' lengths, which only plans tell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3stack.estimate.work import StepLoad
from k3stack.scheduler.loads import step_load
from k3stack.scheduler.plan import GroupPlan


class LoadMeter:
    """Follows the plans of one group. ``rows``: size of the row table."""

    def __init__(self, rows: int) -> None:
        self.lengths: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        """Tokens in cache and state of each row once the last plan seen has run."""
        self.decode: tuple[int, ...] = ()
        self.index: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        """``decode``, the rows of the last plan's decode set, as an array."""

    def load(self, group: GroupPlan) -> StepLoad:
        """What ``group`` computes; moves the lengths on. Plans must be shown in order, none left out."""
        lengths = self.lengths
        for add in group.added:
            lengths[add.row] = add.length
        decode = group.decode
        if decode is not self.decode:
            self.decode = decode
            self.index = np.array(decode, np.intp)
        context = 0
        if decode:
            context = int(lengths[self.index].sum())
            lengths[self.index] += 1
        for work in group.work:
            lengths[work.row] = work.start + work.count
        return step_load(len(decode), context, group.work)
