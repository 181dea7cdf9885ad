"""One rank of a layout running alone (``--emulate-rank``): real geometry and kernels, random weights, no partners.

It holds what the shard table gives the rank, computes its part of every layer, and leaves the sums over ranks out: its
answers mean nothing, its durations do. Experts are chosen as the mean rank or the slowest one would see them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.config.geometry import ModelGeometry
from k3stack.config.layout import ParallelLayout
from k3stack.kernels.select import Kernels
from k3stack.models.layers.ffn import MoeFfn
from k3stack.models.network import Model
from k3stack.models.share import rank_share

Routing = Literal["mean", "slowest"]
DRAWN = 1024
"""Tokens for which experts are drawn; a step of more goes through them again."""


@dataclass(frozen=True, slots=True)
class Emulation:
    """Which rank of what runs alone. ``rows``: of the decode steps for which routing ``slowest`` is the slowest."""

    layout: ParallelLayout
    rank: int
    routing: Routing = "mean"
    rows: int = 64


class EmulatedRank(Model):
    """The rank's part of ``geometry``. Token ids are taken modulo its part of the vocabulary; logits [N, vocab] are
    its own part's, the others' places -inf, as wide as the gathered ones would be."""

    def __init__(self, geometry: ModelGeometry, emulation: Emulation, **options: Any) -> None:
        own, share = rank_share(geometry, emulation.layout, emulation.rank)
        super().__init__(own, share=share, **options)
        self.emulation = emulation
        self._others = geometry.vocab - own.vocab

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids % self.geometry.vocab)

    def head(self, normed: Tensor) -> Tensor:
        return F.pad(super().head(normed), (0, self._others), value=float("-inf"))

    def finish(self) -> None:
        super().finish()
        generator = torch.Generator().manual_seed(self.emulation.rank)
        for layer in self.layers:
            if isinstance(layer.ffn, MoeFfn):
                self._choose_for(layer.ffn, generator)

    def _choose_for(self, ffn: MoeFfn, generator: torch.Generator) -> None:
        moe = ffn.moe
        ids = torch.rand(DRAWN, moe.experts, generator=generator).topk(moe.top_k, -1).indices
        if self.emulation.routing == "slowest":
            ids = busiest_to(ids, self.emulation.rows, ffn.local, moe.experts)
        choose_always(ffn, self.kernels, ids.to(self.device))


def choose_always(ffn: MoeFfn, kernels: Kernels, ids: Tensor) -> None:
    """From now on the layer's tokens choose the experts ``ids`` [T, k] (more tokens: over again). The router itself,
    of ``kernels``, still runs."""
    route, choose = kernels.route, kernels.choose

    def chosen(count: int) -> Tensor:
        return ids[:count] if count <= len(ids) else ids.repeat(-(-count // len(ids)), 1)[:count]

    def own_route(*given: Any) -> tuple[Tensor, Tensor]:
        return chosen(len(given[0])), route(*given)[1]

    def own_choose(*given: Any) -> tuple[Tensor, ...]:
        assert choose is not None
        return chosen(given[0].shape[-2]), *choose(*given)[1:]

    ffn.kernels = dataclasses.replace(ffn.kernels, route=own_route, choose=None if choose is None else own_choose)


def busiest_to(ids: Tensor, rows: int, local: range, total: int) -> Tensor:
    """``ids`` [T, k] of ``total`` experts, renumbered so that the rank of which the first ``rows`` tokens touch most
    experts is the one that holds ``local``."""
    each = len(local)
    touched = torch.bincount(ids[:rows].unique() // each, minlength=total // each)
    return (ids + local.start - int(touched.argmax()) * each) % total
