"""What a setup will do: weights, budget, pools, admission, limits and findings. One plan, from one setup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from k3stack.config.hardware import GIB, MIB
from k3stack.config.layout import check_layout, layer_kinds, stage_layers
from k3stack.errors import DoesNotFit, UserError
from k3stack.estimate.budget import Budget, assumed_budget, given_budget
from k3stack.estimate.collectives import sums_per_step
from k3stack.estimate.pools import (
    Admission,
    BlockLayout,
    PoolPlan,
    admitted,
    plan_stages,
    replay_ring_bytes,
    split_plan,
    stage_block_layouts,
)
from k3stack.estimate.sglang import (
    SglangPools,
    balanced_ratio,
    calculator_ratio,
    crossing_tokens,
    sglang_pools,
    slots_per_request,
)
from k3stack.estimate.weights import StageWeights, WeightPlan, weight_table
from k3stack.planner.landmines import Finding, findings
from k3stack.planner.own import OwnBoot
from k3stack.planner.setup import Setup, budget_floor_bytes

DEFAULT_INPUT = 8192
DEFAULT_OUTPUT = 1024
VLLM_MIN_EXPERT_COLUMNS = 256
"""Columns that vLLM pads an expert's share to on each rank (vllm-project/vllm#51124)."""
VLLM_DEFAULT_SEQUENCES = 1024
UNLIMITED = 1 << 20
"""Running requests where no cap is asked for: the arena alone decides."""


@dataclass(frozen=True)
class Plan:
    """The answer for one setup. Bytes and counts per GPU and per attention-DP worker unless named otherwise."""

    setup: Setup
    tokens: int
    """Prompt and output tokens of the request that ratios and admission are given for."""
    weights: WeightPlan
    draft_bytes: int
    budget: Budget
    stages: tuple[BlockLayout, ...]
    slots_per_request: int
    slot_bytes: int
    cell_bytes: int
    """What one cache row costs on the deciding GPU (drafter's rows included)."""
    pools: SglangPools | None
    pool_plan: PoolPlan | None
    admission: Admission | None
    """Requests of ``tokens`` on one attention-DP worker."""
    with_snapshots: Admission | None
    findings: tuple[Finding, ...] = ()
    missing_gib: float = 0.0
    reason: str = ""

    @property
    def fits(self) -> bool:
        return not self.reason

    @property
    def refused(self) -> Finding | None:
        """The finding because of which the command cannot work as written, if any."""
        return next((f for f in self.findings if f.refuse), None)

    @property
    def state_bytes(self) -> int:
        return max(s.state_bytes for s in self.stages)

    @property
    def row_bytes(self) -> int:
        """One token's rows on the GPU that has most MLA layers, without a drafter."""
        return max(s.cache_layers * s.row_bytes for s in self.stages)

    @property
    def state_slots(self) -> int:
        if self.pools is not None:
            return self.pools.slots
        return self.pool_plan.states_alone if self.pool_plan else 0

    @property
    def cache_tokens(self) -> int:
        if self.pools is not None:
            return self.pools.tokens
        return self.pool_plan.tokens_alone if self.pool_plan else 0

    @property
    def max_running(self) -> int:
        """sglang: the server's cap; k3 and vllm: what one pool admits at ``tokens``."""
        if self.pools is not None:
            return self.pools.max_running
        return self.admission.requests if self.admission else 0

    @property
    def binding(self) -> str:
        return self.admission.binding if self.admission else "weights"

    @property
    def runner_up(self) -> str:
        return self.admission.runner_up if self.admission else ""

    @property
    def workers(self) -> int:
        """Attention-DP workers over all replicas: each has pools of this size."""
        return self.setup.layout.dp * self.setup.layout.replicas

    @property
    def admitted_total(self) -> int:
        """Requests of ``tokens`` that run at once on everything that was planned."""
        return (self.admission.requests if self.admission else 0) * self.workers

    def ratio_calculator(self, tokens: int | None = None) -> float:
        """The published calculator's ratio (unrounded)."""
        s = self.setup
        plain_draft = s.drafter is not None and not s.settings.replay and s.role != "prefill"
        return calculator_ratio(
            slots=self.slots_per_request,
            state_bytes=self.state_bytes,
            row_bytes=self.row_bytes,
            dcp=s.layout.dcp,
            tokens=tokens or self.tokens,
            drafter=s.drafter is not None,
            draft_states=s.drafter.verify_width if plain_draft and s.drafter else 0,
        )

    def ratio_balanced(self, tokens: int | None = None) -> float:
        """The ratio at which both pools admit the same (unrounded)."""
        return balanced_ratio(
            slots=self.slots_per_request,
            slot_bytes=self.slot_bytes,
            cell_bytes=self.cell_bytes,
            dcp=self.setup.layout.dcp,
            tokens=tokens or self.tokens,
        )

    @property
    def crossing(self) -> float:
        return crossing_tokens(
            slots=self.slots_per_request,
            slot_bytes=self.slot_bytes,
            cell_bytes=self.cell_bytes,
            dcp=self.setup.layout.dcp,
        )

    @property
    def sums(self) -> int:
        return sums_per_step(self.setup.geometry, self.setup.layout)


def make_plan(setup: Setup, tokens: int, *, balance: bool = False) -> Plan:
    """Plan ``setup`` for requests of ``tokens`` in all. Raises UserError only for illegal layouts.

    ``balance`` gives a server with two pools the ratio that admits equally from both, whatever its flags say.
    A setup that does not fit, or that cannot work, is an answer: see ``Plan.fits``, ``reason`` and ``refused``.
    """
    if tokens < 1:
        raise UserError(f"a request of {tokens} tokens: input and output must be at least 1 together")
    check_layout(setup.layout, setup.geometry)
    if setup.own is not None:
        plan = _own_plan(setup, setup.own, tokens)
        return replace(plan, findings=findings(setup.engine, facts(plan)))
    weights = _weights(setup)
    drafter, layout = setup.drafter, setup.layout
    draft_bytes = drafter.weight_bytes(layout.attn_tp) if drafter else 0
    budget = _budget(setup, weights, draft_bytes)
    stages = stage_block_layouts(
        setup.geometry,
        layout,
        engine="k3" if setup.engine == "k3" else "sglang",
        recurrent_itemsize=setup.state_itemsize,
        row_itemsize=setup.row_itemsize,
    )
    settings = replace(
        setup.settings,
        ring_bytes=_ring(setup),
        draft_row_bytes=int(drafter.row_bytes(layout.attn_tp, 1) * setup.draft_itemsize) if drafter else 0,
    )
    setup = replace(setup, settings=settings)
    plan = _solve(setup, tokens, weights, draft_bytes, budget, stages, balance)
    return replace(plan, findings=findings(setup.engine, facts(plan)))


def _own_plan(setup: Setup, own: OwnBoot, tokens: int) -> Plan:
    """Our own server on one device: nothing is computed here that its boot does not compute."""
    layout = own.layout
    per_request = own.plan.slots_per_request if own.plan else 1
    cell = layout.cache_layers * layout.row_bytes
    return Plan(
        setup, tokens, own.weights, 0, own.budget, (layout,), per_request, layout.state_bytes, cell, None, own.plan,
        admitted(own.plan, tokens) if own.plan else None,
        admitted(own.plan, tokens, snapshots=1) if own.plan else None,
        missing_gib=0.0 if own.plan else max(0.0, layout.block_bytes * 2 / GIB - own.budget.gib),
        reason=own.reason,
    )  # fmt: skip


def _weights(setup: Setup) -> WeightPlan:
    plan = weight_table(setup.geometry).plan(setup.layout, setup.engine)
    padding = vllm_padding(setup)
    if padding == 1.0:
        return plan
    stages = tuple(
        StageWeights(s.layers, {k: int(v * padding) if k == "routed_experts" else v for k, v in s.by_group.items()})
        for s in plan.stages
    )
    return WeightPlan(stages)


def vllm_padding(setup: Setup) -> float:
    """Factor by which vLLM's minimum width of an expert's share grows the routed experts."""
    if setup.engine != "vllm":
        return 1.0
    share = setup.geometry.moe.expert_width / setup.layout.moe_tp
    return max(1.0, VLLM_MIN_EXPERT_COLUMNS / share)


def _budget(setup: Setup, weights: WeightPlan, draft_bytes: int) -> Budget:
    if setup.budget_gib is not None:
        return given_budget(setup.budget_gib)
    return assumed_budget(
        setup.hardware.gpu,
        setup.engine,
        weights_bytes=weights.bytes_per_gpu,
        fraction=setup.fraction,
        draft_bytes=draft_bytes,
        dcp=setup.layout.dcp,
        drafter=setup.drafter is not None,
        feature_buffer=setup.feature_buffer,
        ranks=setup.layout.gpus,
    )


def _ring(setup: Setup) -> int:
    layers = max(layer_kinds(setup.geometry, s)[0] for s in stage_layers(setup.geometry, setup.layout, setup.engine))
    return replay_ring_bytes(setup.geometry, tp=setup.layout.attn_tp, kda_layers=layers, length=setup.ring_length)


def _solve(
    setup: Setup, tokens: int, weights: WeightPlan, draft_bytes: int, budget: Budget, stages: tuple[BlockLayout, ...],
    balance: bool,
) -> Plan:  # fmt: skip
    split = setup.engine == "sglang" or (setup.engine == "k3" and setup.behaviour == "sglang")
    per_request = slots_per_request(setup.settings, setup.layout.pp) if split else 1
    state = max(s.state_bytes for s in stages)
    ring = setup.settings.ring_bytes if setup.settings.replay else 0
    slot = state + ring
    cell = max(s.cache_layers * s.row_bytes for s in stages) + setup.layout.dcp * setup.settings.draft_row_bytes
    base = Plan(
        setup, tokens, weights, draft_bytes, budget, stages, per_request, slot, cell, None, None, None, None,
    )  # fmt: skip
    if balance and split:
        settings = replace(setup.settings, ratio=base.ratio_balanced())
        setup = replace(setup, settings=settings, flags={**setup.flags, "ratio": settings.ratio})
        base = replace(base, setup=setup)
    over = setup.gpus_used - setup.hardware.count
    if over > 0:
        return replace(
            base,
            missing_gib=over * weights.gib_per_gpu,
            reason=f"the layout needs {setup.gpus_used} GPUs and there are {setup.hardware.count}",
        )
    try:
        pools, pool_plan = _pools(setup, stages, budget.bytes, split)
    except DoesNotFit as e:
        floor = budget_floor_bytes(setup, slot, cell, per_request, stages[0].page_rows)
        reason = _shortage(setup, weights, budget, floor) if budget.assumed else str(e)
        return replace(base, missing_gib=max(0.0, floor / GIB - budget.gib), reason=reason)
    return replace(
        base,
        pools=pools,
        pool_plan=pool_plan,
        admission=admitted(pool_plan, tokens),
        with_snapshots=admitted(pool_plan, tokens, snapshots=1),
    )


def _shortage(setup: Setup, weights: WeightPlan, budget: Budget, floor: float) -> str:
    """Why an assumed budget does not do: the weights alone, or what they leave."""
    memory = setup.hardware.gpu.memory_gib
    left = memory - weights.gib_per_gpu
    start = f"{weights.gib_per_gpu:.1f} GiB of weights on a GPU of {memory:.1f} GiB"
    if left < 0:
        return f"{start}: {-left:.1f} GiB too many before anything else"
    return (
        f"{start} leave {left:.1f} GiB for everything else, and {budget.gib:.1f} GiB for states and cache; one request "
        f"needs {floor / GIB:.2f} GiB"
    )


def _pools(
    setup: Setup, stages: tuple[BlockLayout, ...], budget: int, split: bool
) -> tuple[SglangPools | None, PoolPlan]:
    if budget <= 0:
        raise DoesNotFit(f"the budget is {budget / GIB:.1f} GiB")
    if split:
        pools = sglang_pools(stages, budget, setup.settings)
        widest = max(stages, key=lambda s: s.block_bytes)
        return pools, split_plan(widest, budget, pools, within_budget=False)
    running = setup.max_running or (VLLM_DEFAULT_SEQUENCES if setup.engine == "vllm" else UNLIMITED)
    return None, plan_stages(stages, budget, max_running=running // setup.layout.dp)


def facts(plan: Plan) -> Mapping[str, Any]:
    """What landmine conditions may name, from the setup and the plan."""
    s, layout, gpu = plan.setup, plan.setup.layout, plan.setup.hardware.gpu
    flags = s.flags
    channels = 3 * s.geometry.kda.width // layout.attn_tp
    knobs = ("prefill_attention", "decode_attention", "draft_attention")
    padding = vllm_padding(s)
    return {
        **{k: flags.get(k) for k in ("hicache", "hicache_storage", "unified_memory", "symm_mem", "eplb", "moe_runner")},
        "kv_dtype": str(flags.get("kv_dtype", "auto")),
        "port": flags.get("port", 30000),
        "engine": s.engine,
        "version": s.settings.version,
        "gpu": gpu.name,
        "sm": gpu.sm,
        "blackwell": gpu.blackwell,
        "nvlink_domain": gpu.nvlink_domain,
        "gpus": s.hardware.count,
        "copy_gpus": layout.gpus,
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "dp": layout.dp,
        "dcp": layout.dcp,
        "attn_tp": layout.attn_tp,
        "a2a": layout.a2a,
        "dp_lm_head": layout.dp_lm_head,
        "role": s.role,
        "speculative": s.drafter.algorithm if s.drafter else None,
        "replay": s.settings.replay,
        "strategy": s.settings.strategy,
        "fraction": s.fraction,
        "chunk": s.chunk,
        "context": s.context,
        "context_given": "context_length" in flags,
        "max_running_given": "max_running" in flags,
        "ratio_given": "ratio" in flags,
        "max_mamba_given": "max_mamba_cache_size" in flags,
        "states_per_path_given": "max_states_per_path" in flags,
        "attention_knobs": sum(1 for k in knobs if flags.get(k)),
        "exec_timeout": _number(s.env.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300")),
        "slots_per_request": plan.slots_per_request,
        "binding": plan.binding,
        "state_slots": plan.state_slots if plan.pool_plan else None,
        "cache_tokens": plan.cache_tokens if plan.pool_plan else None,
        "max_running": plan.max_running,
        "twice_running": 2 * plan.max_running,
        "tokens": plan.tokens,
        "ratio_balanced": plan.ratio_balanced(),
        "state_mib": plan.state_bytes / MIB,
        "weights_gib": plan.weights.gib_per_gpu,
        "conv_channels": channels,
        "conv_elements": channels * s.chunk,
        "moe_padding": padding,
        "moe_padding_percent": (padding - 1) * 100,
    }


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
