"""A plan as data: the fields of ``k3 plan --json``, numbers unrounded."""

from __future__ import annotations

from typing import Any

from k3stack.config.hardware import GIB, MIB
from k3stack.estimate.collectives import collectives
from k3stack.estimate.headers import has_files, header_totals
from k3stack.planner.launch import commands
from k3stack.planner.plan import Plan
from k3stack.planner.recommend import Candidate, Recommendation, alternatives
from k3stack.planner.times import PlanTimes, loading

SESSION_TOKENS = 128_000
DECODE_BATCH = 64
CHUNK_TOKENS = 8192
"""Sizes of sums are given for a decode step of 64 requests and for a prompt chunk of 8,192 tokens."""


def plan_document(plan: Plan, *, disk_gbps: float | None = None, session_len: int = SESSION_TOKENS) -> dict[str, Any]:
    """The JSON object of one plan. One that does not fit has ``missing_gib`` and ``alternatives`` instead of pools."""
    document: dict[str, Any] = {
        "engine": plan.setup.engine,
        "model": plan.setup.model,
        "hardware": plan.setup.hardware.name,
        "layout": plan.setup.layout.as_dict(),
        "fits": plan.fits and plan.refused is None,
        "weights_gib_per_gpu": plan.weights.gib_per_gpu,
        "weights_by_kind_gib": plan.weights.by_group_gib,
        "draft_weights_gib_per_gpu": plan.draft_bytes / GIB,
        "weights_gib_by_stage": [s.total / GIB for s in plan.weights.stages],
        "memory_gib": plan.setup.hardware.gpu.memory_gib,
        "state_block_mib": plan.state_bytes / MIB,
        "slot_mib": plan.slot_bytes / MIB,
        "cache_row_bytes": plan.row_bytes,
        "cell_bytes": plan.cell_bytes,
        "slots_per_request": plan.slots_per_request,
        "budget_gib": plan.budget.gib,
        "budget_band_gib": plan.budget.band_gib,
        "budget_terms": [
            {"what": t.what, "gib": t.gib, "band_gib": t.band_gib, "source": t.source} for t in plan.budget.terms
        ],
        "request_tokens": plan.tokens,
    }
    if plan.fits:
        document |= _pools(plan, session_len)
    else:
        document |= {"missing_gib": plan.missing_gib, "reason": plan.reason, "alternatives": alternatives(plan)}
    if plan.refused is not None:
        document |= {"refused": plan.refused.as_dict(), "missing_gib": plan.missing_gib}
        document.setdefault("alternatives", alternatives(plan))
    document |= {
        "crossing_tokens": plan.crossing,
        "ratio_calculator": plan.ratio_calculator(),
        "ratio_balanced": plan.ratio_balanced(),
        "allreduce_per_step": plan.sums,
        "collectives": [
            {
                "name": c.name, "kind": c.kind, "count": c.count, "ranks": c.ranks,
                "bytes_decode_64": c.bytes_for(DECODE_BATCH), "bytes_chunk_8192": c.bytes_for(CHUNK_TOKENS, True),
            }
            for c in collectives(plan.setup.geometry, plan.setup.layout)
        ],
        "loading": [
            {"gb_per_second": x.rate_gbps, "gigabytes_per_node": x.bytes_per_node / 1e9, "seconds": x.seconds}
            for x in loading(plan, disk_gbps)
        ],
        "warnings": [f.as_dict() for f in plan.findings],
        "notes": notes(plan),
        "commands": commands(plan) if plan.fits and plan.refused is None else {},
    }  # fmt: skip
    return document


def _pools(plan: Plan, session_len: int) -> dict[str, Any]:
    admission, kept = plan.admission, plan.with_snapshots
    times = PlanTimes(plan)
    rows = admission.requests if admission else 0
    context = plan.tokens
    document: dict[str, Any] = {
        "state_slots": plan.state_slots,
        "cache_tokens": plan.cache_tokens,
        "max_running_requests": plan.max_running,
        "binding": plan.binding,
        "runner_up": plan.runner_up,
        "attention_dp_workers": plan.workers,
        "admitted_requests": plan.admitted_total,
        "admitted_with_snapshots": (kept.requests if kept else 0) * plan.workers,
        "limits": admission.limits if admission else {},
        "sessions": {"tokens": session_len, "count": sessions(plan, session_len)},
        "step_ms_at_1": times.decode_s(1, context) * 1e3,
        "step_ms_at_admitted": times.decode_s(max(1, rows), context) * 1e3,
        "prefill_s": times.prefill_s(max(1, plan.tokens)),
        "time_error_band": times.efficiency.error,
    }
    if plan.pool_plan is not None:
        layout = plan.pool_plan.layout
        document |= {
            "pages_per_block": layout.pages_per_block,
            "block_mib": layout.block_bytes / MIB,
            "block_padding": layout.padding_share,
            "blocks": plan.pool_plan.blocks,
        }
    if plan.setup.own is not None and plan.pool_plan is not None:
        pools = plan.pool_plan
        document["boot"] = {
            "weight_bytes": plan.weights.bytes_per_gpu,
            "arena_bytes": pools.arena_bytes,
            "blocks": pools.blocks,
            "block_bytes": pools.layout.block_bytes,
            "states_alone": pools.states_alone,
            "tokens_alone": pools.tokens_alone,
        }
    if plan.pools is not None:
        document |= {
            "rows": plan.pools.rows,
            "logged_tokens": plan.pools.logged_tokens,
            "request_caps": plan.pools.caps,
            "ratio": plan.setup.settings.ratio,
            "boot_lines": boot_lines(plan),
        }
    return document


def sessions(plan: Plan, tokens: int) -> int:
    """Idle sessions of ``tokens`` whose rows and one snapshot each stay in memory, over all workers."""
    if plan.pool_plan is None:
        return 0
    layout = plan.pool_plan.layout
    if plan.pools is not None:
        page = layout.page_tokens
        each = min(plan.pools.slots, plan.pools.tokens // (-(-tokens // page) * page))
    else:
        pages = -(-tokens // layout.page_tokens)
        each = int(plan.pool_plan.blocks / (1 + pages / layout.pages_per_block))
    return each * plan.workers


def boot_lines(plan: Plan) -> list[str]:
    """What SGLang's log will say, by the phrases that people search for."""
    pools, setup = plan.pools, plan.setup
    if pools is None:
        return []
    lines = [
        f"Mamba Cache is allocated: {pools.slots + 1} slots (one is a dummy), {pools.ratio_pool_bytes / GIB:.2f} GiB",
        f"KV Cache is allocated: {pools.rows:,} rows, {pools.rows * plan.row_bytes / GIB:.2f} GiB",
        f"max_total_num_tokens={pools.logged_tokens} (SGLang {'.'.join(map(str, pools.version))} logs "
        f"{'tokens' if pools.version >= (0, 5, 21) else 'rows of one rank'})",
    ]
    if setup.drafter and setup.max_running is None:
        lines.append("max_running_requests is reset to 48 for speculative decoding")
    if pools.binding == "state":
        lines.append(
            f"max_running_requests is capped to {pools.max_running} ({pools.slots} slots / {pools.slots_per_request})"
        )
    if pools.beyond_budget_bytes:
        lines.append(f"the state pool is enlarged past the budget by {pools.beyond_budget_bytes / GIB:.2f} GiB")
    return lines


def notes(plan: Plan) -> list[str]:
    """Remarks that are no findings: unused GPUs, unread flags, what the figures leave out."""
    setup = plan.setup
    found = []
    idle = setup.hardware.count - setup.gpus_used
    if idle > 0:
        found.append(f"{idle} of {setup.hardware.count} GPUs are not used by {setup.layout.label}")
    if setup.command is not None:
        for flag in setup.command.unknown:
            meant = f" (did you mean {flag.meant}?)" if flag.meant else ""
            found.append(f"{flag.flag} is not known here and was not read{meant}")
        nodes = -(-setup.layout.gpus // setup.hardware.gpus_per_node)
        if nodes > 1 and "nnodes" not in setup.flags and setup.engine != "vllm":
            found.append(f"the layout spans {nodes} nodes: the commands need --nnodes {nodes}")
        elif setup.flags.get("nnodes", nodes) != nodes:
            found.append(
                f"--nnodes {setup.flags['nnodes']} does not go with {setup.layout.gpus} GPUs in nodes of "
                f"{setup.hardware.gpus_per_node}: {nodes} nodes"
            )
    if setup.engine == "k3" and setup.gpus_used > 1:
        found.append("k3 serve runs one GPU in this version: the plan shows what its arena would hold on this layout")
    if setup.engine == "vllm":
        found.append("vLLM's pool is planned as one arena of blocks; its own block rounding is not modelled")
    if setup.drafter is not None and not setup.drafter.published:
        found.append(f"{setup.drafter.name}: its shape is not public; DSPARK's sizes stand in")
    if plan.pool_plan is not None:
        found += plan.pool_plan.notes
    if has_files(setup.model):
        found.append(f"{setup.model}: {header_totals(setup.model, setup.geometry).sentence()}")
    return found


def candidate_document(candidate: Candidate, *, disk_gbps: float | None = None) -> dict[str, Any]:
    """One entry of a recommendation: the plan's object and what ranked it."""
    return {
        **plan_document(candidate.plan, disk_gbps=disk_gbps),
        "admitted_requests": candidate.admitted,
        "running_requests": candidate.running,
        "step_ms": candidate.step_s * 1e3,
        "prefill_s": candidate.prefill_s,
        "requests_per_second": candidate.rate,
        "enough_for_concurrency": candidate.enough,
    }


def recommendation_document(answer: Recommendation, *, disk_gbps: float | None = None) -> dict[str, Any]:
    """The JSON object of a recommendation: ``layouts`` best first, and ``rejected`` with reasons."""
    return {
        "layouts": [candidate_document(c, disk_gbps=disk_gbps) for c in answer.layouts],
        "rejected": [
            {"layout": r.layout, "reason": r.reason, "missing_gib": r.missing_gib} for r in answer.rejected
        ],
        "considered": answer.considered,
    }  # fmt: skip
