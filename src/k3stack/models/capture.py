"""A hook through which tests see a forward pass layer by layer, and can force the router's choices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor


class Capture:
    """Keeps copies of what the network reports.

    Names: 'attn_in', 'attn_out', 'ffn_in', 'ffn_out', 'stream' (the residual stream or running prefix after the
    layer), 'router_ids', 'router_weights', 'router_scores' (with the correction bias), all by layer [T, ...]; and,
    without layer (None), 'final_mix' and 'final_norm' of the tokens whose logits are wanted.
    """

    def __init__(self, forced: Mapping[int, Tensor] | None = None) -> None:
        self.values: dict[str, dict[int | None, Tensor]] = defaultdict(dict)
        self._forced = forced or {}

    def put(self, name: str, layer: int | None, value: Tensor) -> None:
        self.values[name][layer] = value.detach().clone()

    def forced(self, layer: int) -> Tensor | None:
        """int64 [T, k] experts that this layer must take instead of choosing."""
        return self._forced.get(layer)
