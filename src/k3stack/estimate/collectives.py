"""What ranks exchange in one pass over the model: how many sums, and how many bytes each."""

from __future__ import annotations

from dataclasses import dataclass

from k3stack.config.geometry import ModelGeometry
from k3stack.config.layout import ParallelLayout

ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of exchange in a pass. ``bytes_per_token``: payload of one such exchange for one token."""

    name: str
    kind: str
    """``sum``, ``gather``, ``exchange`` or ``send``."""
    count: int
    bytes_per_token: float
    ranks: int
    per_request: bool = False
    """Paid for sampled rows only, one for a chunk."""

    def bytes_for(self, tokens: int, chunk: bool = False) -> float:
        """Bytes for a decode step of ``tokens`` requests, or for a prompt chunk of ``tokens``."""
        return self.bytes_per_token * (1 if chunk and self.per_request else tokens)


def collectives(geometry: ModelGeometry, layout: ParallelLayout) -> tuple[Collective, ...]:
    """Exchanges of one pass. Two sums a layer: after attention (hidden width), after the feed-forward part.

    The second carries the routed experts' latent partials and the shared experts' partials in one buffer (the latent
    norm needs the complete latent). With a dispatch back end tokens are exchanged with the experts' ranks instead.
    """
    hidden, moe = geometry.hidden, geometry.moe
    found: list[Collective] = []
    attention, ranks = layout.attn_tp, layout.tp
    if attention > 1:
        found.append(Collective("attention sum", "sum", geometry.layers, hidden * ACTIVATION_BYTES, attention))
    n_moe = len(geometry.moe_layers)
    width = moe.latent + hidden if moe.latent else hidden
    if ranks > 1:
        if geometry.dense_layers:
            found.append(Collective("dense sum", "sum", geometry.dense_layers, hidden * ACTIVATION_BYTES, ranks))
        if layout.a2a == "none":
            found.append(Collective("expert sum", "sum", n_moe, width * ACTIVATION_BYTES, ranks))
        else:
            each = (moe.latent or hidden) * ACTIVATION_BYTES * min(moe.top_k, layout.ep)
            found.append(Collective("expert dispatch", "exchange", n_moe, each, layout.ep))
            found.append(Collective("expert combine", "exchange", n_moe, each, layout.ep))
            if not layout.shared_copied:
                found.append(Collective("shared sum", "sum", n_moe, hidden * ACTIVATION_BYTES, ranks))
        if layout.dp == 1:
            found.append(Collective("embedding sum", "sum", 1, hidden * ACTIVATION_BYTES, ranks))
        found.append(Collective("logits gather", "gather", 1, geometry.vocab * ACTIVATION_BYTES, ranks, True))
    if layout.dcp > 1:
        heads = geometry.mla.heads // layout.attn_tp * layout.dcp
        merge = heads * (geometry.mla.kv_lora_rank * ACTIVATION_BYTES + 4)
        found.append(Collective("partial attention merge", "exchange", len(geometry.mla_layers), merge, layout.dcp))
    if layout.pp > 1:
        # The residual bank travels with the running prefix from stage to stage.
        bank = (geometry.residual_rows + 1) * hidden * ACTIVATION_BYTES
        found.append(Collective("stage hand-over", "send", layout.pp - 1, bank, 2))
    return tuple(found)


def sums_per_step(geometry: ModelGeometry, layout: ParallelLayout) -> int:
    """The sums inside layers (``allreduce_per_step``): the embedding's sum and the gather of logits are apart."""
    return sum(c.count for c in collectives(geometry, layout) if c.kind == "sum" and c.name != "embedding sum")
