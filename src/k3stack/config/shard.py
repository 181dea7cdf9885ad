"""The shard table: for every kind of tensor and every axis, whether it is cut, copied or owned.

This is the only place that knows. Byte totals, the loader and the workers read it. ``cut``: each rank along the axis
holds an equal part; ``copied``: each holds all of it; ``owned``: each holds whole units (layers, experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from k3stack.config.geometry import ModelGeometry
from k3stack.config.layout import ParallelLayout, RankPlace, SizingEngine, place, stage_layers
from k3stack.config.tensors import ITEMSIZE, MXFP4_GROUP, PACKED_PER_BYTE, TensorSpec
from k3stack.errors import BugError

Axis = Literal["tp", "ep", "dp", "dcp", "pp"]
Fate = Literal["cut", "copied", "owned"]
AXES: tuple[Axis, ...] = ("tp", "ep", "dp", "dcp", "pp")

Over = Literal["tp", "attention", "dense", "shared", "head", "vocab", "expert", "none"]
"""Which ranks a cut runs over; see ``parts``."""
Unit = Literal["head", "row", "group"]
"""What must not be split: a head, a single row, or a group of columns that share a scale."""
Where = Literal["layer", "first", "last", "every"]
"""Which pipeline stages hold it: its layer's, the first, the last, or every one."""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One row of the table."""

    over: Over
    dim: int | None = None
    """Dimension that is cut; None: copied to every rank of the stage."""
    unit: Unit = "row"
    where: Where = "layer"
    why: str = ""

    def fate(self, axis: Axis, layout: ParallelLayout | None = None) -> Fate:
        """What happens along ``axis``. ``layout`` decides the rows that depend on settings (None: the usual)."""
        if axis == "pp":
            return "copied" if self.where == "every" else "owned"
        if axis == "ep":
            return "owned" if self.over == "expert" else "copied"
        if axis == "dcp" or self.dim is None:
            return "copied"
        if axis == "dp":
            # Attention-DP groups are parts of the tp ranks: what is cut over all of those is cut over dp too.
            return "copied" if self._inside_attention(layout) else "cut"
        return "copied" if layout is not None and parts(self, layout) == 1 else "cut"

    def _inside_attention(self, layout: ParallelLayout | None) -> bool:
        if self.over == "attention":
            return True
        if layout is None:
            return False
        return parts(self, layout) <= layout.attn_tp < layout.tp


_HEADS = ShardRow("attention", 0, "head")
_HEADS_IN = ShardRow("attention", 1, "head")
_COPY = ShardRow("none")
_COMMON: dict[str, ShardRow] = {
    "layer.input_norm": _COPY,
    "layer.post_attention_norm": _COPY,
    "residual.attn_norm": _COPY,
    "residual.attn_proj": _COPY,
    "residual.mlp_norm": _COPY,
    "residual.mlp_proj": _COPY,
    **{f"kda.{n}": _HEADS for n in ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_b_proj")},
    **{f"kda.{n}": _HEADS for n in ("b_proj", "A_log", "dt_bias", "g_proj", "g_b_proj")},
    "kda.f_a_proj": ShardRow("none", why="its 128 outputs feed every head"),
    "kda.g_a_proj": ShardRow("none", why="its 128 outputs feed every head"),
    "kda.o_norm": ShardRow("none", why="one weight of a head's width, shared by all heads"),
    "kda.o_proj": _HEADS_IN,
    "mla.q_proj": _HEADS,
    "mla.q_a_proj": ShardRow("none", why="the low-rank query feeds every head"),
    "mla.q_a_layernorm": _COPY,
    "mla.q_b_proj": _HEADS,
    "mla.kv_a_proj_with_mqa": ShardRow("none", why="the latent and the shared key belong to all heads"),
    "mla.kv_a_layernorm": _COPY,
    "mla.kv_b_proj": _HEADS,
    "mla.g_proj": _HEADS,
    "mla.o_proj": _HEADS_IN,
    "dense.gate_proj": ShardRow("dense", 0),
    "dense.up_proj": ShardRow("dense", 0),
    "dense.down_proj": ShardRow("dense", 1),
    "moe.router": _COPY,
    "moe.router_bias": _COPY,
    "moe.latent_down": ShardRow("none", why="the latent feeds every expert"),
    "moe.latent_norm": _COPY,
    "moe.latent_up": ShardRow("none", why="runs after the sum over ranks, on the complete latent"),
    "moe.shared.gate_proj": ShardRow("shared", 0),
    "moe.shared.up_proj": ShardRow("shared", 0),
    "moe.shared.down_proj": ShardRow("shared", 1),
    **{f"moe.expert.{w}.{part}": ShardRow("expert", 0) for w in ("w1", "w3") for part in ("weight", "packed", "scale")},
    **{f"moe.expert.w2.{part}": ShardRow("expert", 1, "group") for part in ("weight", "packed", "scale")},
    "norm": ShardRow("none", where="last"),
    "residual.output_norm": ShardRow("none", where="last"),
    "residual.output_proj": ShardRow("none", where="last"),
}
_VISION = ShardRow("none", where="every", why="the tower has 12 heads and is small: every rank holds it")
_VISION_KINDS = ("patch_embed", "pos_emb", "norm", "wqkv", "wo", "fc0", "fc1", "projector")

TABLE: dict[SizingEngine, dict[str, ShardRow]] = {
    "k3": {
        **_COMMON,
        "embed": ShardRow("tp", 0, where="first"),
        "lm_head": ShardRow("tp", 0, where="last"),
    },
    "sglang": {
        **_COMMON,
        "embed": ShardRow("vocab", 0, where="first", why="whole on every rank under attention-DP"),
        "lm_head": ShardRow("head", 0, where="last", why="inside an attention group with --enable-dp-lm-head"),
        **{f"vision.{k}": _VISION for k in _VISION_KINDS},
    },
}
TABLE["vllm"] = TABLE["sglang"]
"""vLLM's published sizes agree with SGLang's rule (about 188 GB a GPU at TP8); nothing finer is known of it."""


def row(kind: str, engine: SizingEngine) -> ShardRow | None:
    """The table's row for ``kind``; None where the engine does not hold it (vision in ``k3``)."""
    found = TABLE[engine].get(kind)
    if found is None and not kind.startswith("vision."):
        raise BugError(f"the shard table has no row for tensors of kind {kind!r}")
    return found


def parts(rule: ShardRow, layout: ParallelLayout) -> int:
    """Into how many parts one tensor is cut (for experts: one expert's tensors, inside its group)."""
    if rule.dim is None:
        return 1
    match rule.over:
        case "tp":
            return layout.tp
        case "attention":
            return layout.attn_tp
        case "dense":
            return layout.attn_tp if layout.dense_attn_tp else layout.tp
        case "shared":
            if layout.shared_tp is not None:
                return layout.shared_tp
            if layout.shared_copied:
                return 1
            return layout.attn_tp if layout.shared_attn_tp else layout.tp
        case "vocab":
            return layout.tp if layout.dp == 1 else 1
        case "head":
            return layout.attn_tp if layout.dp_lm_head else layout.tp
        case "expert":
            return layout.moe_tp
        case _:
            return 1


def _index(rule: ShardRow, at: RankPlace, n: int) -> int:
    """Which of the ``n`` parts the rank at ``at`` holds."""
    return (at.moe_tp if rule.over == "expert" else at.tp) % n


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a stored tensor: [start, stop) along ``dim``; the whole tensor where ``dim`` is None."""

    dim: int | None = None
    start: int = 0
    stop: int = 0


def rank_slice(
    spec: TensorSpec, geometry: ModelGeometry, layout: ParallelLayout, engine: SizingEngine, rank: int
) -> Slice | None:
    """What rank ``rank`` holds of ``spec``; None: nothing. The loader reads just that."""
    rule = row(spec.kind, engine)
    if rule is None:
        return None
    at = place(layout, rank)
    if not _on_stage(rule, spec, geometry, layout, engine, at.stage):
        return None
    if rule.over == "expert":
        each = geometry.moe.experts // layout.ep
        if spec.expert is None or not at.ep * each <= spec.expert < (at.ep + 1) * each:
            return None
    n = parts(rule, layout)
    if rule.dim is None or n == 1:
        return Slice()
    start, stop = _cut(spec, rule, geometry, n, _index(rule, at, n))
    return Slice(cut_dim(spec, rule), start, stop)


def _on_stage(
    rule: ShardRow, spec: TensorSpec, geometry: ModelGeometry, layout: ParallelLayout, engine: SizingEngine, stage: int
) -> bool:
    match rule.where:
        case "every":
            return True
        case "first":
            return stage == 0
        case "last":
            return stage == layout.pp - 1
        case _:
            return spec.layer in stage_layers(geometry, layout, engine)[stage]


def cut_dim(spec: TensorSpec, rule: ShardRow) -> int:
    """The dimension that ``rule`` cuts of ``spec``."""
    if rule.dim is None:
        raise BugError(f"{spec.kind} is copied, not cut")
    # Kimi-Linear stores A_log as [1, 1, heads, 1].
    return 2 if spec.kind == "kda.A_log" and len(spec.shape) == 4 else rule.dim


def _cut(spec: TensorSpec, rule: ShardRow, geometry: ModelGeometry, n: int, index: int) -> tuple[int, int]:
    """[start, stop) of part ``index`` of ``n``, in whole units; a remainder makes the last parts shorter."""
    size = spec.shape[cut_dim(spec, rule)]
    if rule.unit == "head":
        heads = geometry.kda.heads if spec.kind.startswith("kda.") else geometry.mla.heads
        # A_log is padded on disk: its first `heads` entries count.
        unit = 1 if spec.kind == "kda.A_log" else size // heads
        size = heads * unit
    elif rule.unit == "group":
        unit = _group_width(spec.kind)
    else:
        unit = 1
    each = -(-size // (n * unit)) * unit
    return min(index * each, size), min((index + 1) * each, size)


def _group_width(kind: str) -> int:
    if kind.endswith(".packed"):
        return MXFP4_GROUP // PACKED_PER_BYTE
    return 1 if kind.endswith(".scale") else MXFP4_GROUP


def largest_part_bytes(spec: TensorSpec, geometry: ModelGeometry, layout: ParallelLayout, engine: SizingEngine) -> int:
    """Bytes that the fullest rank of its stage holds of ``spec`` (an expert's: of one it owns); 0: not held."""
    rule = row(spec.kind, engine)
    if rule is None:
        return 0
    return _part_bytes(spec, geometry, rule, parts(rule, layout))


def _part_bytes(spec: TensorSpec, geometry: ModelGeometry, rule: ShardRow, n: int) -> int:
    if rule.dim is None or n == 1:
        return spec.nbytes
    start, stop = _cut(spec, rule, geometry, n, 0)
    return spec.numel // spec.shape[cut_dim(spec, rule)] * (stop - start) * ITEMSIZE[spec.dtype]


@lru_cache(maxsize=4)
def table_markdown(engine: SizingEngine) -> str:
    """The table as the documentation shows it."""
    lines = ["| kind | tp | ep | attention-DP | dcp | pp | note |", "|---|---|---|---|---|---|---|"]
    for kind, rule in TABLE[engine].items():
        fates = " | ".join(rule.fate(axis) for axis in AXES)
        lines.append(f"| `{kind}` | {fates} | {rule.why} |")
    return "\n".join(lines)
