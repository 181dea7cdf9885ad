"""The parallel layout: how many ranks, in which groups, and where each rank stands.

Ranks are numbered stage by stage: rank = stage · tp + t. Inside the ``tp`` ranks of a stage lie three cuts of the
same ranks: attention-DP groups of ``attn_tp`` consecutive ranks (each serves its own requests), DCP groups of
``dcp`` consecutive ranks inside those (they share out the cache rows), and expert groups: ``ep`` groups of
``tp / ep`` consecutive ranks, each owning whole experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from k3stack.config.geometry import ModelGeometry
from k3stack.config.tensors import MXFP4_GROUP
from k3stack.errors import UserError

SizingEngine = Literal["k3", "sglang", "vllm"]
"""Whose rules of cutting and sizing apply."""

A2A_REPLICATES_SHARED = ("deepep", "deepep_v2", "megamoe", "flashinfer_megamoe", "mooncake", "nixl", "mori", "pplx")
"""Expert dispatch back ends under which every rank holds the shared experts whole (SGLang)."""


@dataclass(frozen=True)
class ParallelLayout:
    """One copy of the model over ``tp * pp`` GPUs. ``replicas`` copies stand side by side."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    """Attention-DP inside ``tp``; 1: off."""
    dcp: int = 1
    dp_lm_head: bool = False
    """With attention-DP: the head is cut inside an attention group instead of over all ``tp`` ranks."""
    a2a: str = "none"
    """Expert dispatch back end; decides whether shared experts are cut or copied."""
    dense_attn_tp: bool = False
    """The dense MLP is cut over an attention group instead of over ``tp``."""
    shared_attn_tp: bool = False
    shared_tp: int | None = None
    """Ranks that the shared experts are cut over; None: the rule's own."""
    pp_partition: tuple[int, ...] | None = None
    """Layers a stage; None: the engine's own split."""
    replicas: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one copy."""
        return self.tp * self.pp

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.replicas

    @property
    def attn_tp(self) -> int:
        return self.tp // self.dp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def shared_copied(self) -> bool:
        return self.a2a in A2A_REPLICATES_SHARED

    @cached_property
    def label(self) -> str:
        """Short name such as ``tp8 dcp8`` or ``2 × tp16 ep16 dp2``."""
        parts = [f"tp{self.tp}"]
        parts += [f"{n}{v}" for n, v in (("pp", self.pp), ("ep", self.ep), ("dp", self.dp), ("dcp", self.dcp)) if v > 1]
        if self.a2a != "none":
            parts.append(self.a2a)
        return (f"{self.replicas} × " if self.replicas > 1 else "") + " ".join(parts)

    def as_dict(self) -> dict[str, int | str | bool]:
        """What ``--json`` prints as ``layout``."""
        return {
            "tp": self.tp,
            "pp": self.pp,
            "ep": self.ep,
            "attention_dp": self.dp,
            "dcp": self.dcp,
            "dp_lm_head": self.dp_lm_head,
            "moe_a2a": self.a2a,
            "gpus": self.gpus,
            "replicas": self.replicas,
        }


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands in each group."""

    stage: int
    tp: int
    dp: int
    attn_tp: int
    dcp: int
    ep: int
    moe_tp: int


def place(layout: ParallelLayout, rank: int) -> RankPlace:
    """The groups of rank ``rank`` (0 .. tp·pp − 1). Raises UserError outside that range."""
    if not 0 <= rank < layout.gpus:
        raise UserError(f"rank {rank} is outside the {layout.gpus} ranks of {layout.label}")
    stage, t = divmod(rank, layout.tp)
    dp, attn = divmod(t, layout.attn_tp)
    ep, moe = divmod(t, layout.moe_tp)
    return RankPlace(stage, t, dp, attn, attn % layout.dcp, ep, moe)


def check_layout(layout: ParallelLayout, geometry: ModelGeometry) -> None:
    """Raise UserError, with the numbers that would do, where the model cannot be cut like this."""
    for name in ("tp", "pp", "ep", "dp", "dcp", "replicas"):
        if getattr(layout, name) < 1:
            raise UserError(f"{name} is {getattr(layout, name)}; it must be at least 1", param=name)
    _divides(layout.dp, layout.tp, "--dp-size (attention-DP)", "--tp-size")
    _divides(layout.ep, layout.tp, "--ep-size", "--tp-size")
    _divides(layout.dcp, layout.attn_tp, "--dcp-size", "the attention TP width (tp / attention-DP)")
    for heads, what in ((geometry.kda.heads, "KDA"), (geometry.mla.heads, "MLA")):
        if heads % layout.attn_tp:
            fit = [n for n in range(1, heads + 1) if heads % n == 0]
            raise UserError(
                f"{heads} {what} heads cannot be cut over an attention TP width of {layout.attn_tp} "
                f"(tp {layout.tp} / attention-DP {layout.dp}); widths that divide them: {', '.join(map(str, fit))}",
                param="tp-size",
            )
    moe = geometry.moe
    if moe.experts % layout.ep:
        raise UserError(f"{moe.experts} experts cannot be shared out over ep {layout.ep}", param="ep-size")
    unit = MXFP4_GROUP if moe.mxfp4 else 1
    if moe.expert_width % (layout.moe_tp * unit):
        raise UserError(
            f"an expert's {moe.expert_width} columns cannot be cut into {layout.moe_tp} parts (tp / ep) of whole "
            f"groups of {unit}; raise --ep-size",
            param="ep-size",
        )
    if layout.pp > geometry.layers:
        raise UserError(f"pp {layout.pp} is above the model's {geometry.layers} layers", param="pp-size")
    part = layout.pp_partition
    if part is not None and (len(part) != layout.pp or sum(part) != geometry.layers or min(part) < 1):
        raise UserError(
            f"the stage partition {','.join(map(str, part))} must give each of {layout.pp} stages at least one layer "
            f"and {geometry.layers} in all",
            param="pp-partition",
        )


def _divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    if whole % part:
        raise UserError(f"{part_name} {part} does not divide {whole_name} {whole}", param=part_name)


def stage_layers(geometry: ModelGeometry, layout: ParallelLayout, engine: SizingEngine) -> tuple[range, ...]:
    """The layers (0-based) of each pipeline stage.

    sglang: ``layers div pp`` each, one more for each of the last ``layers mod pp`` stages (vllm: middle stages get
    the extra ones; read here as SGLang's). k3: along the cycle of KDA and MLA layers where the cycles share out
    evenly (8 stages of Kimi-K3: seven of 12 layers, one of 9), else the extra layers go to the first stages, since
    the last one also holds the head.
    """
    total, pp = geometry.layers, layout.pp
    if layout.pp_partition is not None:
        sizes = list(layout.pp_partition)
    elif engine == "k3":
        cycle = geometry.mla_layers[0] + 1 if geometry.mla_layers else 1
        cycles = -(-total // cycle)
        if cycles % pp == 0:
            sizes = [cycle * (cycles // pp)] * (pp - 1)
            sizes.append(total - sum(sizes))
        else:
            sizes = [total // pp + (1 if i < total % pp else 0) for i in range(pp)]
    else:
        sizes = [total // pp + (1 if i >= pp - total % pp else 0) for i in range(pp)]
    stages, start = [], 0
    for size in sizes:
        stages.append(range(start, start + size))
        start += size
    return tuple(stages)


def layer_kinds(geometry: ModelGeometry, layers: range) -> tuple[int, int]:
    """How many KDA and MLA layers lie in ``layers``."""
    kda = sum(1 for i in geometry.kda_layers if i in layers)
    return kda, len(layers) - kda
