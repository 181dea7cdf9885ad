"""The floor of a decode step on one rank, part by part: what each part of the network must read and write."""

from __future__ import annotations

from k3stack.config.shard import largest_part_bytes, row
from k3stack.estimate.weights import group_of, weight_table
from k3stack.estimate.work import RankModel, StepLoad

PART_OF_GROUP = {
    "kda_attention": "kda",
    "mla_attention": "mla",
    "routed_experts": "experts",
    "shared_experts": "shared",
    "latent_projections": "latent",
    "router": "router",
    "dense_mlp": "dense",
    "lm_head": "head",
    "norms_and_scorers": "residual",
}
"""Group of weights -> part of the step. 'residual' holds the norms too."""


def decode_floor(model: RankModel, load: StepLoad) -> dict[str, float]:
    """Bytes of ``load`` by part; together they are ``model.work(load).bytes``.

    States count for 'kda', cache rows for 'mla'.
    """
    parts = dict.fromkeys(PART_OF_GROUP.values(), 0.0)
    for bundle in weight_table(model.geometry).bundles:
        kind = bundle.spec.kind
        if row(kind, "k3") is None or kind in ("embed", "lm_head") or kind.startswith("vision."):
            continue
        part = largest_part_bytes(bundle.spec, model.geometry, model.layout, "k3")
        here = sum(1 for x in bundle.layers if x is None or x in model.layers)
        parts[PART_OF_GROUP[group_of(kind)]] += part * here
    work = model.work(load)
    parts["experts"] += work.expert_bytes
    parts["head"] += work.head_bytes
    parts["kda"] += work.state_bytes
    parts["mla"] += work.cache_bytes
    return parts
