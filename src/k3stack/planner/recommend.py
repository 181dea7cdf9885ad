"""What should I run? The layouts of the hardware, what they admit and how fast they step; the rest with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from k3stack.config.geometry import ModelGeometry
from k3stack.config.hardware import Hardware
from k3stack.config.layout import ParallelLayout, check_layout
from k3stack.errors import UserError
from k3stack.planner.plan import Plan, make_plan
from k3stack.planner.setup import Setup
from k3stack.planner.times import PlanTimes

MAX_STAGES = 16
ALTERNATIVE_LOAD = 16
"""Requests at once by which alternatives are ranked."""
NETWORK_TP = 32
"""Widest tensor-parallel group that is tried across servers without NVLink between them."""


@dataclass(frozen=True)
class Candidate:
    """One layout that fits, with what ranks it."""

    plan: Plan
    admitted: int
    """Requests of the asked lengths over all copies."""
    running: int
    """Requests that the times are for: what is asked for or admitted, whichever is less."""
    step_s: float
    prefill_s: float
    rate: float
    """Requests a second at ``running``: roofline, prompts one after the other."""
    enough: bool
    """Whether the asked concurrency is admitted."""


@dataclass(frozen=True, slots=True)
class Rejected:
    layout: str
    reason: str
    missing_gib: float = 0.0


@dataclass(frozen=True)
class Recommendation:
    layouts: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    considered: int


def recommend(setup: Setup, input_len: int, output_len: int, concurrency: int | None = None) -> Recommendation:
    """Rank the layouts of ``setup.hardware`` for requests of these lengths. ``setup.layout`` is ignored.

    Ranked first by whether ``concurrency`` requests are admitted, then by requests a second, then by what is admitted.
    """
    if concurrency is not None and concurrency < 1:
        raise UserError(f"--concurrency is {concurrency}; it must be at least 1", param="--concurrency")
    tokens = input_len + output_len
    found: list[Candidate] = []
    rejected: dict[str, Rejected] = {}
    considered = 0
    for layout in layouts(setup.geometry, setup.hardware):
        considered += 1
        base = replace(layout, dcp=1)
        if base.label in rejected and rejected[base.label].missing_gib > 0:
            continue
        try:
            check_layout(layout, setup.geometry)
        except UserError as e:
            rejected.setdefault(layout.label, Rejected(layout.label, str(e)))
            continue
        plan = _plan_candidate(setup, layout, tokens)
        if plan.refused is not None:
            rejected[layout.label] = Rejected(layout.label, plan.refused.message)
        elif not plan.fits or plan.admitted_total < 1:
            reason = plan.reason or f"no request of {tokens:,} tokens is admitted"
            rejected[base.label] = Rejected(base.label, reason, plan.missing_gib)
        else:
            found.append(_candidate(plan, input_len, output_len, concurrency))
    found.sort(key=lambda c: (not c.enough, -c.rate, -c.admitted))
    return Recommendation(tuple(found), tuple(rejected.values()), considered)


def _plan_candidate(setup: Setup, layout: ParallelLayout, tokens: int) -> Plan:
    settings = replace(setup.settings, attention_dp=layout.dp)
    given = "ratio" in setup.flags or "max_mamba_cache_size" in setup.flags
    return make_plan(replace(setup, layout=layout, settings=settings), tokens, balance=not given)


def _candidate(plan: Plan, input_len: int, output_len: int, concurrency: int | None) -> Candidate:
    workers = plan.workers
    each = plan.admission.requests if plan.admission else 0
    rows = each if concurrency is None else min(each, max(1, -(-concurrency // workers)))
    times = PlanTimes(plan)
    return Candidate(
        plan=plan,
        admitted=plan.admitted_total,
        running=rows * workers,
        step_s=times.decode_s(rows, input_len + output_len // 2),
        prefill_s=times.prefill_s(input_len),
        rate=times.requests_per_second(input_len, output_len, rows),
        enough=concurrency is None or plan.admitted_total >= concurrency,
    )


def layouts(geometry: ModelGeometry, hardware: Hardware) -> Iterator[ParallelLayout]:
    """Layouts worth planning: equal copies over the GPUs, cut as the model's heads and experts allow.

    Widths are powers of two, as engines are run; at most an eighth of the GPUs may stay idle (a group of 64 in a rack
    of 72). Others are legal: plan one by giving its flags.
    """
    for gpus in _powers(hardware.count):
        replicas = hardware.count // gpus
        if replicas * gpus * 8 < hardware.count * 7:
            continue
        for pp in _powers(min(gpus, MAX_STAGES, geometry.layers)):
            tp = gpus // pp
            for dp in _powers(tp):
                attention = tp // dp
                if geometry.kda.heads % attention or geometry.mla.heads % attention:
                    continue
                if attention > max(hardware.gpu.nvlink_domain, NETWORK_TP):
                    continue
                for dcp in _context_widths(attention):
                    yield ParallelLayout(
                        tp=tp, pp=pp, ep=_expert_width(geometry, hardware, tp), dp=dp, dcp=dcp, dp_lm_head=dp > 1,
                        replicas=replicas,
                    )  # fmt: skip


def _expert_width(geometry: ModelGeometry, hardware: Hardware, tp: int) -> int:
    """Whole experts a rank where the group is wide or the GPU is Hopper, as public recipes do; else cut columns."""
    whole = tp if geometry.moe.experts % tp == 0 else 1
    return whole if tp > 8 or not hardware.gpu.blackwell else 1


def _context_widths(attention: int) -> list[int]:
    return sorted({1, min(8, attention), attention})


def _powers(n: int) -> list[int]:
    return [1 << i for i in range(n.bit_length())]


def alternatives(plan: Plan, limit: int = 3) -> list[str]:
    """What would fit instead of ``plan``: layouts of the same GPUs, else of more; best first at a light load."""
    setup = plan.setup
    node = setup.hardware.gpu.gpus_per_node
    for count in (setup.hardware.count, *(max(node, setup.hardware.count) * f for f in (1, 2, 4, 8))):
        if count > node and count % node:
            continue
        hardware = setup.hardware.with_count(count)
        output = max(1, plan.tokens // 9)
        found = recommend(_neutral(setup, hardware), max(1, plan.tokens - output), output, ALTERNATIVE_LOAD).layouts
        if found:
            return [_alternative(c, hardware, plan.tokens) for c in found[:limit]]
    return []


def _alternative(candidate: Candidate, hardware: Hardware, tokens: int) -> str:
    plan = candidate.plan
    return (
        f"{plan.setup.layout.label} on {hardware.name}: {plan.weights.gib_per_gpu:.1f} GiB of weights per GPU, "
        f"{candidate.admitted:,} requests of {tokens:,} tokens"
    )


def _neutral(setup: Setup, hardware: Hardware) -> Setup:
    """The setup without its own layout, ratio and budget, so that other layouts are judged by the defaults."""
    flags = {k: v for k, v in setup.flags.items() if k in ("kv_dtype", "ssm_dtype")}
    return replace(
        setup, hardware=hardware, command=None, flags=flags, budget_gib=None, layout=ParallelLayout(), own=None
    )
