"""Our own server on one device: the plan from the functions that its boot runs, so that the two agree to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3stack.config.flags import parse_serve
from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.config.hardware import CPU, GIB, Hardware
from k3stack.config.models import PACKAGED, model_geometry
from k3stack.config.options import EngineOptions
from k3stack.engine.budget import (
    arena_budget,
    free_host_bytes,
    layout_of,
    pools_of,
    precision_of,
    predicted_weight_bytes,
    weight_bytes_by_kind,
)
from k3stack.errors import DoesNotFit, UserError
from k3stack.estimate.budget import Budget, Term, overheads, total_band_gib
from k3stack.estimate.pools import BlockLayout, PoolPlan
from k3stack.estimate.weights import StageWeights, WeightPlan, group_of
from k3stack.models.builtin import resolve


@dataclass(frozen=True)
class OwnBoot:
    """What our boot will compute from its options on one device."""

    options: EngineOptions
    geometry: ModelGeometry
    weights: WeightPlan
    layout: BlockLayout
    budget: Budget
    plan: PoolPlan | None
    """None: it does not fit; ``reason`` says why."""
    context: int
    reason: str = ""


def own_geometry(model_path: str) -> ModelGeometry:
    """Geometry of what ``k3 serve --model-path`` would load: built-in, packaged by name, or a folder."""
    return model_geometry(model_path) if model_path.lower() in PACKAGED else load_geometry(resolve(model_path).path)


def own_boot(words: Sequence[str], model: str, hardware: Hardware, budget_gib: float | None = None) -> OwnBoot:
    """Plan ``k3 serve`` with the flags ``words`` on one device. Raises UserError as the server would."""
    flags = list(words)
    if not any(w.split("=")[0] in ("--model-path", "--model") for w in flags):
        flags += ["--model-path", model]
    if budget_gib is not None:
        flags += ["--arena-gib", str(budget_gib)]
    options = parse_serve(flags).engine
    geometry = own_geometry(options.model_path)
    on_cpu = hardware.gpu.name == CPU
    if on_cpu != (options.device == "cpu") and options.device != "auto":
        raise UserError(f"--device {options.device} does not go with --hardware {hardware.name}", param="--device")
    precision = precision_of(options, "cpu" if on_cpu else "cuda")
    if options.context_length is not None and options.context_length > geometry.context:
        raise UserError(
            f"--context-length is {options.context_length:,}; the model has {geometry.context:,}",
            param="--context-length",
        )
    context = options.context_length or geometry.context
    layout = layout_of(geometry, precision)
    by_group: dict[str, int] = {}
    for kind, size in weight_bytes_by_kind(geometry, precision).items():
        by_group[group_of(kind)] = by_group.get(group_of(kind), 0) + size
    weights = WeightPlan((StageWeights(range(geometry.layers), by_group),))
    weight_bytes = predicted_weight_bytes(geometry, precision)
    free, terms = _free(hardware, on_cpu)
    try:
        size, how = arena_budget(options, on_cpu=on_cpu, free_at_start=free, weight_bytes=weight_bytes)
        plan = pools_of(options, layout, size, context)
    except DoesNotFit as e:
        short = Budget((free - weight_bytes) / GIB, (*terms, Term("weights in memory", -weight_bytes / GIB)))
        return OwnBoot(options, geometry, weights, layout, short, None, context, str(e))
    given = options.arena_gib is not None or (on_cpu and options.mem_fraction_static is None)
    budget = Budget(
        size / GIB, (Term(how, size / GIB),), assumed=not given, band_gib=0.0 if given else total_band_gib() / 3
    )
    return OwnBoot(options, geometry, weights, layout, budget, plan, context)


def _free(hardware: Hardware, on_cpu: bool) -> tuple[int, tuple[Term, ...]]:
    """Bytes that are free at start: this machine's for ``cpu``, the catalogue's less the context for a GPU."""
    if on_cpu:
        free = free_host_bytes()
        return free, (Term("free memory of this machine", free / GIB),)
    before = overheads("k3", sm=hardware.gpu.sm)
    free = hardware.gpu.memory_bytes - int(sum(t.gib for t in before) * GIB)
    return free, (Term(f"{hardware.gpu.name} memory less the context", free / GIB),)
