"""How many bytes of weights lie on each GPU: sums over the tensor list, cut as the shard table says.

The 494,592 tensors of routed experts are never walked: one expert's six are, times the experts a rank owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from k3stack.config.geometry import ModelGeometry
from k3stack.config.hardware import GIB
from k3stack.config.layout import ParallelLayout, SizingEngine, check_layout, stage_layers
from k3stack.config.shard import largest_part_bytes, row
from k3stack.config.tensors import TensorSpec, expected_tensors, expert_tensors

GROUPS: tuple[tuple[str, str], ...] = (
    ("moe.expert.", "routed_experts"),
    ("moe.shared.", "shared_experts"),
    ("moe.latent_", "latent_projections"),
    ("moe.router", "router"),
    ("kda.", "kda_attention"),
    ("mla.", "mla_attention"),
    ("dense.", "dense_mlp"),
    ("embed", "embedding"),
    ("lm_head", "lm_head"),
    ("vision.", "vision"),
    ("residual.", "norms_and_scorers"),
    ("layer.", "norms_and_scorers"),
    ("norm", "norms_and_scorers"),
)
"""Prefix of a tensor kind -> the group that reports show it under."""


def group_of(kind: str) -> str:
    """The reporting group of a tensor kind."""
    return next(group for prefix, group in GROUPS if kind.startswith(prefix))


@dataclass(frozen=True, slots=True)
class _Bundle:
    """All tensors of one kind and shape: one of them, and the layers (None: of the whole model) that have it."""

    spec: TensorSpec
    layers: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Weights on each rank of one pipeline stage, in bytes by group."""

    layers: range
    by_group: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_group.values())


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Weights per GPU of one layout. Ranks of a stage hold equal bytes (the fullest where a cut leaves a rest)."""

    stages: tuple[StageWeights, ...]

    @property
    def fullest(self) -> StageWeights:
        return max(self.stages, key=lambda s: s.total)

    @property
    def bytes_per_gpu(self) -> int:
        """On the fullest stage: it decides, since pools take the minimum over ranks."""
        return self.fullest.total

    @property
    def gib_per_gpu(self) -> float:
        return self.bytes_per_gpu / GIB

    @property
    def by_group_gib(self) -> dict[str, float]:
        return {k: v / GIB for k, v in self.fullest.by_group.items() if v}


class WeightTable:
    """The tensor list of one geometry, bundled once; then any layout's bytes are a few hundred products."""

    def __init__(self, geometry: ModelGeometry) -> None:
        self.geometry = geometry
        self.bundles = _bundles(expected_tensors(geometry, routed=False))
        layers = tuple(geometry.moe_layers)
        if layers:
            self.experts = [_Bundle(s, layers) for s in expert_tensors(geometry, layers[0], 0)]
        else:
            self.experts = []
        self._plans: dict[tuple[ParallelLayout, SizingEngine], WeightPlan] = {}

    def plan(self, layout: ParallelLayout, engine: SizingEngine = "sglang") -> WeightPlan:
        """Bytes per GPU, stage by stage. Raises UserError for a layout the model cannot be cut into."""
        check_layout(layout, self.geometry)
        # Neither DCP nor copies side by side change what lies on a GPU.
        key = replace(layout, dcp=1, replicas=1), engine
        if key not in self._plans:
            self._plans[key] = self._plan(key[0], engine)
        return self._plans[key]

    def _plan(self, layout: ParallelLayout, engine: SizingEngine) -> WeightPlan:
        stages = stage_layers(self.geometry, layout, engine)
        owned = self.geometry.moe.experts // layout.ep
        part = {id(b): largest_part_bytes(b.spec, self.geometry, layout, engine) for b in self.bundles}
        expert = sum(largest_part_bytes(b.spec, self.geometry, layout, engine) for b in self.experts) * owned
        moe_layers = self.geometry.moe_layers
        out = []
        for i, layers in enumerate(stages):
            groups: dict[str, int] = {}
            for bundle in self.bundles:
                count = _count(bundle, layers, i == 0, i == len(stages) - 1, engine)
                if count:
                    group = group_of(bundle.spec.kind)
                    groups[group] = groups.get(group, 0) + count * part[id(bundle)]
            groups["routed_experts"] = expert * sum(1 for x in moe_layers if x in layers)
            out.append(StageWeights(layers, groups))
        return WeightPlan(tuple(out))

    def totals(self, *, vision: bool = True) -> dict[str, int]:
        """Bytes of the whole checkpoint by group."""
        groups: dict[str, int] = {}
        for bundle in self.bundles:
            group = group_of(bundle.spec.kind)
            if group != "vision" or vision:
                groups[group] = groups.get(group, 0) + bundle.spec.nbytes * len(bundle.layers)
        one = sum(b.spec.nbytes for b in self.experts)
        groups["routed_experts"] = one * self.geometry.moe.experts * len(self.geometry.moe_layers)
        return groups

    def tensor_count(self, *, vision: bool = True) -> int:
        """Tensors in the checkpoint."""
        dense = sum(len(b.layers) for b in self.bundles if vision or group_of(b.spec.kind) != "vision")
        return dense + len(self.experts) * self.geometry.moe.experts * len(self.geometry.moe_layers)


def _bundles(specs: Iterable[TensorSpec]) -> list[_Bundle]:
    found: dict[tuple[str, tuple[int, ...], str], tuple[TensorSpec, list[int | None]]] = {}
    for spec in specs:
        key = (spec.kind, spec.shape, spec.dtype)
        if key in found:
            found[key][1].append(spec.layer)
        else:
            found[key] = (spec, [spec.layer])
    return [_Bundle(spec, tuple(layers)) for spec, layers in found.values()]


def _count(bundle: _Bundle, layers: range, first: bool, last: bool, engine: SizingEngine) -> int:
    """How many tensors of the bundle lie on the stage that has ``layers``."""
    rule = row(bundle.spec.kind, engine)
    if rule is None:
        return 0
    if rule.where == "layer":
        return sum(1 for x in bundle.layers if x is not None and x in layers)
    here = rule.where == "every" or (first if rule.where == "first" else last)
    return len(bundle.layers) if here else 0


_TABLES: dict[int, WeightTable] = {}


def weight_table(geometry: ModelGeometry) -> WeightTable:
    """The table of ``geometry``, built once a process."""
    table = _TABLES.get(id(geometry))
    if table is None or table.geometry is not geometry:
        table = _TABLES[id(geometry)] = WeightTable(geometry)
    return table
