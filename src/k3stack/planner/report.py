"""A plan as text for a terminal: the same figures as the JSON, rounded, with what binds and why."""

from __future__ import annotations

from k3stack.config.hardware import GIB, MIB
from k3stack.estimate.collectives import collectives
from k3stack.estimate.sglang import calculator_text
from k3stack.planner.document import CHUNK_TOKENS, DECODE_BATCH, SESSION_TOKENS, boot_lines, notes, sessions
from k3stack.planner.launch import commands
from k3stack.planner.plan import Plan
from k3stack.planner.recommend import Recommendation, alternatives
from k3stack.planner.times import PlanTimes, loading

KIND_NAMES = {
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "latent_projections": "latent projections",
    "kda_attention": "KDA attention",
    "mla_attention": "MLA attention",
    "dense_mlp": "dense MLP",
    "lm_head": "head",
    "norms_and_scorers": "norms, residual scorers",
}


def plan_text(plan: Plan, *, disk_gbps: float | None = None, session_len: int = SESSION_TOKENS) -> str:
    """The report of one plan."""
    setup = plan.setup
    lines = [f"{setup.engine} · {setup.model} · {setup.layout.label} on {setup.hardware.name}", ""]
    lines += [*_weights(plan), "", *_budget(plan), ""]
    if plan.refused is not None:
        lines += [f"REFUSED ({plan.refused.id}): {plan.refused.message}", f"  source: {plan.refused.source}", ""]
    if not plan.fits:
        lines += [f"DOES NOT FIT: {plan.reason}", f"  missing: {plan.missing_gib:.2f} GiB per GPU"]
    if not plan.fits or plan.refused is not None:
        lines += ["what would fit:"] + [f"  {a}" for a in alternatives(plan) or ["nothing found on this hardware"]]
    else:
        lines += _pools(plan, session_len)
    lines += ["", *_sums(plan), *_loading(plan, disk_gbps)]
    if plan.findings:
        lines += ["", "findings"]
        lines += [f"  [{f.severity}] {f.id}: {f.message} ({f.source})" for f in plan.findings]
    remarks = notes(plan)
    if remarks:
        lines += ["", "notes"] + [f"  {n}" for n in remarks]
    if plan.fits and plan.refused is None:
        lines += ["", *_commands(plan)]
    return "\n".join(lines)


def _weights(plan: Plan) -> list[str]:
    by = sorted(plan.weights.by_group_gib.items(), key=lambda x: -x[1])
    lines = [f"weights per GPU        {plan.weights.gib_per_gpu:8.2f} GiB"]
    lines += [f"  {KIND_NAMES.get(k, k.replace('_', ' ')):<22}{v:8.2f}" for k, v in by]
    if plan.draft_bytes:
        lines.append(f"drafter per GPU        {plan.draft_bytes / GIB:8.2f} GiB")
    stages = plan.weights.stages
    if len(stages) > 1:
        lines.append("  by stage: " + ", ".join(f"{len(s.layers)} layers {s.total / GIB:.1f}" for s in stages))
    return lines


def _budget(plan: Plan) -> list[str]:
    budget = plan.budget
    kind = f"assumed, ± {budget.band_gib:g}" if budget.assumed else "given"
    lines = [f"budget for states and cache {budget.gib:6.2f} GiB per GPU ({kind})"]
    if budget.assumed:
        lines += [f"  {t.gib:+9.2f}  {t.what}{f' (± {t.band_gib:g})' if t.band_gib else ''}" for t in budget.terms]
    return lines


def _pools(plan: Plan, session_len: int) -> list[str]:
    setup, admission, kept = plan.setup, plan.admission, plan.with_snapshots
    if admission is None or kept is None or plan.pool_plan is None:
        return []
    layout = plan.pool_plan.layout
    worker = f" on each of {plan.workers} workers" if plan.workers > 1 else ""
    lines = [
        f"state of a request     {plan.state_bytes / MIB:8.2f} MiB"
        + (f" (+ ring: {plan.slot_bytes / MIB:.2f} MiB a slot)" if plan.slot_bytes > plan.state_bytes else "")
        + f", {plan.slots_per_request} reserved for a running request",
        f"cache row of a token   {plan.row_bytes:8,} B"
        + (f" ({plan.cell_bytes:,} B with the drafter's)" if plan.cell_bytes > plan.row_bytes else "")
        + (f", shared by {setup.layout.dcp} GPUs (DCP)" if setup.layout.dcp > 1 else ""),
    ]
    if plan.pools is not None:
        lines += [
            f"state slots            {plan.state_slots:8,}{worker} (and one dummy), ratio {setup.settings.ratio:g}",
            f"cache tokens           {plan.cache_tokens:8,}{worker}",
            f"running requests       {plan.max_running:8,}{worker}, capped by {_name(plan.pools.binding)}; then "
            f"{_name(plan.pools.runner_up)} at {plan.pools.caps[plan.pools.runner_up]:,}",
        ]
    else:
        lines += [
            f"arena                  {plan.pool_plan.blocks:8,} blocks of {layout.block_bytes / MIB:.2f} MiB{worker} "
            f"({layout.pages_per_block} pages; {layout.padding_share:.1%} padding)",
            f"  states alone {plan.state_slots:,}, or cache alone {plan.cache_tokens:,} tokens",
        ]
    lines.append(
        f"requests of {plan.tokens:,} tokens: {plan.admitted_total:,} at once, bound by {_name(admission.binding)} "
        f"(runner-up: {_name(admission.runner_up)}); {kept.requests * plan.workers:,} with one snapshot kept for each"
    )
    if plan.pools is not None:
        limits = ", ".join(f"{_name(k)} {v:,}" for k, v in sorted(admission.limits.items(), key=lambda x: x[1]))
        lines.append(f"  limits for that length: {limits}")
    lines.append(f"sessions of {session_len:,} tokens kept: {sessions(plan, session_len):,}")
    lines.append(
        f"cache outweighs state from {plan.crossing:,.0f} tokens; best ratio for {plan.tokens:,} tokens "
        f"{plan.ratio_balanced():.4g} (published calculator: {calculator_text(plan.ratio_calculator())})"
    )
    times = PlanTimes(plan)
    lines.append(
        f"step {times.decode_s(1, plan.tokens) * 1e3:.1f} ms at 1 request, "
        f"{times.decode_s(max(1, admission.requests), plan.tokens) * 1e3:.1f} ms at {admission.requests:,}{worker}; "
        f"prompt of {plan.tokens:,} tokens {times.prefill_s(plan.tokens):.2f} s "
        f"(roofline, ± {times.efficiency.error:.0%})"
    )
    boot = boot_lines(plan)
    if boot:
        lines += ["boot lines to expect"] + [f"  {line}" for line in boot]
    return lines


def _name(limit: str) -> str:
    return limit.replace("_", " ")


def _sums(plan: Plan) -> list[str]:
    lines = [f"sums in layers a step: {plan.sums}"]
    for c in collectives(plan.setup.geometry, plan.setup.layout):
        lines.append(
            f"  {c.count:>4} × {c.name} over {c.ranks}: {_size(c.bytes_for(DECODE_BATCH))} for {DECODE_BATCH} "
            f"requests, {_size(c.bytes_for(CHUNK_TOKENS, True))} for a chunk of {CHUNK_TOKENS:,}"
        )
    return lines


def _size(n: float) -> str:
    return f"{n / 1e6:.2f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


def _loading(plan: Plan, disk_gbps: float | None) -> list[str]:
    return [
        f"loading {x.bytes_per_node / 1e12:.2f} TB a node at {x.rate_gbps:g} GB/s: {x.seconds / 60:.0f} min"
        for x in loading(plan, disk_gbps)
    ]


def _commands(plan: Plan) -> list[str]:
    lines = ["commands"]
    for engine, found in commands(plan).items():
        lines.append(f"  {engine}")
        lines += [f"    {c}" for c in found[:4]]
        if len(found) > 4:
            lines.append(f"    … {len(found) - 4} more of the same, one a node")
    return lines


def recommendation_text(answer: Recommendation, tokens: int, shown: int = 8, disk_gbps: float | None = None) -> str:
    """The ranked table, the best layout in full, and why others were rejected."""
    if not answer.layouts:
        lines = [f"no layout fits requests of {tokens:,} tokens"]
        lines += [f"  {r.layout}: {r.reason}" for r in answer.rejected[:shown]]
        return "\n".join(lines)
    lines = [
        f"{len(answer.layouts)} of {answer.considered} layouts fit requests of {tokens:,} tokens; best first:",
        f"  {'layout':<28}{'GiB/GPU':>9}{'admitted':>10}{'running':>9}{'ms/token':>10}{'prompt s':>10}{'req/s':>8}"
        "  bound by",
    ]
    for c in answer.layouts[:shown]:
        plan = c.plan
        lines.append(
            f"  {plan.setup.layout.label:<28}{plan.weights.gib_per_gpu:>9.1f}{c.admitted:>10,}{c.running:>9,}"
            f"{c.step_s * 1e3:>10.1f}{c.prefill_s:>10.2f}{c.rate:>8.2f}  {_name(plan.binding)}"
            + ("" if c.enough else " (too few)")
        )
    if answer.rejected:
        lines += ["rejected:"] + [f"  {r.layout}: {r.reason}" for r in answer.rejected[:shown]]
        if len(answer.rejected) > shown:
            lines.append(f"  … and {len(answer.rejected) - shown} more (--json lists all)")
    lines += ["", "the first in full", "", plan_text(answer.layouts[0].plan, disk_gbps=disk_gbps)]
    return "\n".join(lines)
