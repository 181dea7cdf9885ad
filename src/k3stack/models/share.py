"""Which part of a model one rank holds, where it runs alone: heads, vocabulary, experts and MLP columns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from k3stack.config.geometry import ModelGeometry
from k3stack.config.layout import ParallelLayout, check_layout, place
from k3stack.errors import UserError


@dataclass(frozen=True, slots=True)
class Share:
    """What the geometry of a rank cannot say: its experts among all that the router names, and the shared MLP's cut."""

    tp: int = 1
    ep: int = 1
    ep_rank: int = 0
    tp_rank: int = 0

    def experts(self, total: int) -> range:
        """The routed experts that lie here, whole."""
        each = total // self.ep
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


WHOLE = Share()


def rank_share(geometry: ModelGeometry, layout: ParallelLayout, rank: int) -> tuple[ModelGeometry, Share]:
    """The geometry and share of rank ``rank``: cut as the shard table cuts (``config.shard``).

    Raises UserError for layouts of which a rank alone is not implemented.
    """
    check_layout(layout, geometry)
    if layout.pp > 1 or layout.dp > 1 or layout.dcp > 1:
        raise UserError(f"a rank of {layout.label} cannot run alone: only --tp-size with --ep-size", param="--pp-size")
    if layout.moe_tp > 1 and layout.ep > 1:
        raise UserError(
            f"a rank of {layout.label} cannot run alone: --ep-size must be 1 or equal to --tp-size", param="--ep-size"
        )
    tp, at = layout.tp, place(layout, rank)
    moe = geometry.moe
    if layout.ep == 1:
        moe = dataclasses.replace(moe, expert_width=moe.expert_width // tp)
    own = dataclasses.replace(
        geometry,
        kda=dataclasses.replace(geometry.kda, heads=geometry.kda.heads // tp),
        mla=dataclasses.replace(geometry.mla, heads=geometry.mla.heads // tp),
        moe=moe,
        dense_width=geometry.dense_width // tp,
        vocab=geometry.vocab // tp,
    )
    # With cut experts the geometry's own width has done the shared MLP's cut.
    return own, Share(tp=tp if layout.ep > 1 else 1, ep=layout.ep, ep_rank=at.ep, tp_rank=at.tp)
