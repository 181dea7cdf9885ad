"""How much memory the arena may take, and the pools that follow: predicted before loading, and actual."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3stack.config.geometry import ModelGeometry
from k3stack.config.options import DEFAULT_CPU_ARENA_GIB, DEFAULT_MEM_FRACTION, EngineOptions
from k3stack.config.tensors import TensorSpec, expected_tensors, expert_tensors
from k3stack.errors import DoesNotFit, UserError
from k3stack.estimate.pools import BlockLayout, PoolPlan, block_layout, plan_pools
from k3stack.estimate.sglang import SglangSettings

GIB = 1 << 30
CPU_SHARE = 0.25
"""Most of the free memory that the arena takes on a CPU when nobody says how much: other programs live there too."""
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "fp8_e4m3": 1}
UNBOUNDED = 10_000_000
"""SGLang's own largest context, for sizes of a pool that nobody bounds."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Names of dtypes: of what is computed (windows too), of the recurrent state and of the cache rows."""

    compute: str
    state: str
    row: str
    as_stored: bool = False
    """Routed experts stay in MXFP4 where they are stored so, and the router's weight in the compute dtype."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.compute]


def precision_of(options: EngineOptions, device: str) -> Precision:
    """Resolve ``auto``; UserError for a combination that no kernel here computes."""
    compute = options.dtype if options.dtype != "auto" else ("bfloat16" if device.startswith("cuda") else "float32")
    state: str = "float32" if compute == "bfloat16" else compute
    if options.mamba_ssm_dtype != "auto":
        if compute == "float64":
            raise UserError(
                f"--mamba-ssm-dtype is {options.mamba_ssm_dtype}; with --dtype float64 the state is kept in float64",
                param="--mamba-ssm-dtype",
            )
        state = options.mamba_ssm_dtype
    row = compute if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    if row != compute and compute == "float64":
        raise UserError(
            f"--kv-cache-dtype is {row}; with --dtype float64 cache rows are kept in float64",
            param="--kv-cache-dtype",
        )
    return Precision(compute, state, row)


def layout_of(geometry: ModelGeometry, precision: Precision) -> BlockLayout:
    """The arena's layout for a model computed in ``precision`` on one device."""
    return block_layout(
        geometry,
        recurrent_itemsize=ITEMSIZE[precision.state],
        conv_itemsize=precision.itemsize,
        row_itemsize=ITEMSIZE[precision.row],
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank that runs alone has less of than its geometry says: experts here, cuts of the shared MLP."""

    experts: int
    shared: int = 1


def predicted_weight_bytes(geometry: ModelGeometry, precision: Precision, cut: Cut | None = None) -> int:
    """Bytes of the weights in memory: every value in the compute dtype; those stored in F32, the router's and the
    residual scorers' at least in float32.

    Routed experts in MXFP4 are decoded when they are read, unless they stay as stored.
    """
    return sum(weight_bytes_by_kind(geometry, precision, cut).values())


def weight_bytes_by_kind(geometry: ModelGeometry, precision: Precision, cut: Cut | None = None) -> dict[str, int]:
    """``predicted_weight_bytes`` by kind of tensor."""
    cut = cut or Cut(geometry.moe.experts)
    found: dict[str, int] = {}
    for spec in expected_tensors(geometry, vision=False, routed=False):
        size = _in_memory(spec, precision)
        if spec.kind == "kda.A_log":
            # Padded on disk: what is kept is one value a head.
            size = size // spec.numel * geometry.kda.heads
        elif spec.kind.startswith("moe.shared."):
            size //= cut.shared
        found[spec.kind] = found.get(spec.kind, 0) + size
    experts = cut.experts * len(geometry.moe_layers)
    for spec in expert_tensors(geometry, geometry.dense_layers, 0):
        found[spec.kind] = found.get(spec.kind, 0) + experts * _in_memory(spec, precision)
    return found


def _in_memory(spec: TensorSpec, precision: Precision) -> int:
    if spec.kind.endswith((".packed", ".scale")) and precision.as_stored:
        return spec.nbytes
    if spec.kind.endswith(".packed"):
        return spec.numel * 2 * precision.itemsize
    if spec.kind.endswith(".scale"):
        return 0
    wide = (
        spec.dtype == "F32"
        or (spec.kind == "moe.router" and not precision.as_stored)
        or spec.kind.startswith("residual.")
    )
    return spec.numel * (max(4, precision.itemsize) if wide else precision.itemsize)


def free_host_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise UserError(
        "this system does not tell how much memory is free; give --arena-gib instead of --mem-fraction-static",
        param="--arena-gib",
    )


def arena_budget(options: EngineOptions, *, on_cpu: bool, free_at_start: int, weight_bytes: int) -> tuple[int, str]:
    """Bytes for the arena, and how they came about.

    ``free_at_start``: free bytes of the device before the weights were loaded. Raises DoesNotFit when the weights
    leave nothing, or less than --arena-gib asks for.
    """
    if options.arena_gib is not None:
        over = options.arena_gib * GIB - (free_at_start - weight_bytes)
        if over > 0:
            raise DoesNotFit(
                f"--arena-gib {options.arena_gib:g} is {over / GIB:.2f} GiB more than what the "
                f"{free_at_start / GIB:.2f} GiB that are free leave beside weights of {weight_bytes / GIB:.2f} GiB. "
                "Lower --arena-gib, or take a larger device."
            )
        return int(options.arena_gib * GIB), f"--arena-gib {options.arena_gib:g}"
    if on_cpu and options.mem_fraction_static is None:
        budget = min(int(DEFAULT_CPU_ARENA_GIB * GIB), int((free_at_start - weight_bytes) * CPU_SHARE))
        return max(budget, 0), (
            f"on a CPU {DEFAULT_CPU_ARENA_GIB:g} GiB, at most {CPU_SHARE:.0%} of what is free; "
            "--arena-gib or --mem-fraction-static change it"
        )
    fraction = options.mem_fraction_static or DEFAULT_MEM_FRACTION
    budget = int(free_at_start * fraction) - weight_bytes
    if budget <= 0:
        raise DoesNotFit(
            f"the weights take {weight_bytes / GIB:.2f} GiB; {fraction:.0%} of the {free_at_start / GIB:.2f} GiB that "
            f"were free are {-budget / GIB:.2f} GiB less. Raise --mem-fraction-static, or take a larger device."
        )
    return budget, f"{fraction:.0%} of {free_at_start / GIB:.2f} GiB free at start, less the weights"


def pools_of(options: EngineOptions, layout: BlockLayout, budget_bytes: int, context: int) -> PoolPlan:
    """``plan_pools`` with the options that cap the kinds."""
    settings = None
    if options.engine == "sglang":
        settings = SglangSettings(
            overlap=not options.disable_overlap_schedule,
            radix_cache=not options.disable_radix_cache,
            max_running=options.max_running_requests,
            context=min(context, UNBOUNDED),
        )
    return plan_pools(
        layout,
        budget_bytes,
        engine=options.engine,
        max_running=options.max_running_requests,
        ratio=options.mamba_full_memory_ratio,
        max_states=options.max_mamba_cache_size,
        max_tokens=options.max_total_tokens,
        sglang=settings,
    )
