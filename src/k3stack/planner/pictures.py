"""The pictures of a plan: where the bytes are, weights by layout, state against cache, memory of a GPU, admission.

Matplotlib is imported here only, and only when pictures are asked for.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3stack.config.files import writing
from k3stack.config.hardware import GIB, MIB
from k3stack.config.layout import ParallelLayout
from k3stack.errors import DoesNotFit, UserError
from k3stack.estimate.pools import admitted, plan_stages, split_plan
from k3stack.estimate.sglang import SglangSettings, balanced_ratio, sglang_pools, slots_per_request
from k3stack.estimate.weights import weight_table
from k3stack.planner.plan import Plan
from k3stack.planner.recommend import Recommendation
from k3stack.planner.report import KIND_NAMES

INK, QUIET, GRID = "#1d2733", "#66727f", "#dde3e9"
STATE, CACHE, WEIGHTS, OTHER, ACCENT = "#c8553d", "#2f6f9f", "#8a97a6", "#cfd6dd", "#3a7d44"
LENGTHS = tuple(int(256 * 2 ** (i / 4)) for i in range(49))
"""Request lengths on the horizontal axes: 256 to 1,048,576 tokens, four steps an octave."""
MIDDLE = 16_384

Draw = Callable[[Any, Plan], None]


def write_pictures(
    plan: Plan, answer: Recommendation | None = None, *, html: str | None = None, png: str | None = None
) -> list[str]:
    """Draw the pictures into one HTML file, a PNG, or both. Returns the paths written."""
    written = []
    if png is not None:
        with writing(png, "--png"):
            Path(png).write_bytes(png_bytes(plan))
        written.append(png)
    if html is not None:
        from k3stack.planner.html import page

        with writing(html, "--html"):
            Path(html).write_text(page(plan, answer), encoding="utf-8")
        written.append(html)
    return written


def panels(plan: Plan) -> list[tuple[str, str, Draw]]:
    """(title, what it shows, drawing function) of each picture that this plan has."""
    found: list[tuple[str, str, Draw]] = [
        (
            "Where the bytes are",
            "The checkpoint by kind of tensor. Routed experts can be cut any way; the rest is partly copied.",
            draw_bytes,
        ),
        (
            "Weights per GPU by layout",
            f"Against the memory of a {plan.setup.hardware.gpu.name} (line). The darker part lies whole on every GPU.",
            draw_layouts,
        ),
        (
            "State against cache",
            "Memory of one request on one GPU by its length. Short requests cost state, long ones cache.",
            draw_crossing,
        ),
    ]
    if plan.fits:
        found += [
            (
                "Memory of one GPU",
                "What the layout puts on the fullest GPU, and what is left for requests.",
                draw_memory,
            ),
            (
                "Requests at once",
                "By request length, from the same budget: a fixed split with reserved slots, and one arena.",
                draw_admission,
            ),
        ]
    return found


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "axes.edgecolor": GRID,
            "axes.labelcolor": QUIET,
            "text.color": INK,
            "xtick.color": QUIET,
            "ytick.color": QUIET,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            # Letters as outlines: the page looks the same whatever fonts the reader has.
            "svg.fonttype": "path",
            "svg.hashsalt": "k3stack",
            "legend.frameon": False,
        }
    )
    import matplotlib.pyplot as plt

    return plt


def svg_text(draw: Draw, plan: Plan, width: float = 8.2, height: float = 4.2) -> str:
    """One picture as an SVG element (no outside assets)."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    draw(axes, plan)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def png_bytes(plan: Plan) -> bytes:
    """All pictures on one sheet."""
    plt = _pyplot()
    drawn = panels(plan)
    rows = -(-len(drawn) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(16.5, 4.7 * rows), layout="constrained", squeeze=False)
    cells = [cell for line in grid for cell in line]
    for cell, (title, _, draw) in zip(cells, drawn, strict=False):
        draw(cell, plan)
        cell.set_title(title, fontsize=13, pad=12)
    for i, cell in enumerate(cells[len(drawn) :]):
        cell.axis("off")
        if i == 0:
            _figures_panel(cell, plan)
    setup = plan.setup
    figure.suptitle(
        f"{setup.model}   ·   {setup.engine} {setup.layout.label} on {setup.hardware.name}",
        fontsize=15,
        x=0.01,
        ha="left",
    )
    figure.get_layout_engine().set(w_pad=0.25, h_pad=0.2, hspace=0.06, wspace=0.05)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def _figures_panel(axes: Any, plan: Plan) -> None:
    """The plan's figures as a short table, in a cell that no picture needs."""
    setup = plan.setup
    lines = [
        ("weights per GPU", f"{plan.weights.gib_per_gpu:,.1f} GiB of {setup.hardware.gpu.memory_gib:,.1f}"),
        ("state of a request", f"{plan.state_bytes / MIB:,.1f} MiB, {plan.slots_per_request} reserved"),
        (
            "cache row of a token",
            f"{plan.row_bytes:,} B" + (f" over {setup.layout.dcp}" if setup.layout.dcp > 1 else ""),
        ),
    ]
    if plan.fits:
        band = f" ± {plan.budget.band_gib:g}" if plan.budget.assumed else ""
        alone = ("" if plan.pools else " alone") + (f" on each of {plan.workers}" if plan.workers > 1 else "")
        lines += [
            ("for states and cache", f"{plan.budget.gib:,.1f}{band} GiB"),
            ("states", f"{plan.state_slots:,}" + alone),
            ("cache tokens", f"{plan.cache_tokens:,}" + alone),
            (f"requests of {plan.tokens:,}", f"{plan.admitted_total:,}, bound by {plan.binding.replace('_', ' ')}"),
            ("cache outweighs state", f"from {plan.crossing:,.0f} tokens"),
        ]
    else:
        lines.append(("missing", f"{plan.missing_gib:,.1f} GiB per GPU"))
    for i, (name, value) in enumerate(lines):
        y = 0.93 - i * 0.105
        axes.text(0.02, y, name, fontsize=11.5, color=QUIET, transform=axes.transAxes, va="center")
        axes.text(0.42, y, value, fontsize=12.5, transform=axes.transAxes, va="center", fontweight="bold")


def draw_bytes(axes: Any, plan: Plan) -> None:
    """Points on a logarithmic axis, one a kind of tensor, largest on top, each with its GiB and share."""
    totals = {k: v for k, v in weight_table(plan.setup.geometry).totals().items() if v}
    items = sorted(totals.items(), key=lambda x: x[1])
    whole = sum(totals.values())
    names = [KIND_NAMES.get(k, k.replace("_", " ")) for k, _ in items]
    values = [v / GIB for _, v in items]
    low = min(values) * 0.6
    axes.hlines(range(len(items)), low, values, color=OTHER, linewidth=1.4)
    colours = [STATE if k == "routed_experts" else CACHE for k, _ in items]
    axes.scatter(values, range(len(items)), s=70, color=colours, zorder=3)
    axes.set_yticks(range(len(items)), names)
    axes.set_xscale("log")
    axes.set_xlim(low, max(values) * 30)
    for i, v in enumerate(values):
        share = v * GIB / whole
        text = f"{v:,.2f} GiB   {share:.1%}" if share >= 0.0005 else f"{v:,.3f} GiB"
        axes.text(v * 1.35, i, text, va="center", fontsize=9)
    axes.xaxis.set_major_formatter(_plain())
    axes.set_xlabel(f"GiB, logarithmic; {whole / GIB:,.0f} GiB in all")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.minorticks_off()
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def _plain() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}")


def compared_layouts(plan: Plan) -> list[tuple[str, ParallelLayout]]:
    """The plan's layout among the usual ones, narrow to wide."""
    usual = [
        ParallelLayout(tp=4),
        ParallelLayout(tp=8, dp=8, dp_lm_head=True),
        ParallelLayout(tp=8),
        ParallelLayout(tp=8, pp=2),
        ParallelLayout(tp=16, ep=16),
        ParallelLayout(tp=16, ep=16, dp=2, dp_lm_head=True),
        ParallelLayout(tp=32, ep=32),
        ParallelLayout(tp=64, ep=64, dp=8, dp_lm_head=True),
    ]
    own = replace(plan.setup.layout, dcp=1, replicas=1)
    if own not in usual:
        usual.append(own)
    named = [(("▸ " if x == own else "") + x.label, x) for x in usual]
    return [(name, x) for name, x in named if _legal(plan, x)]


def _legal(plan: Plan, layout: ParallelLayout) -> bool:
    try:
        weight_table(plan.setup.geometry).plan(layout, plan.setup.engine)
    except UserError:
        return False
    return True


COPIED = ("latent_projections", "router", "norms_and_scorers", "vision")


def draw_layouts(axes: Any, plan: Plan) -> None:
    """Weights per GPU of usual layouts, what is copied whole set apart, against the card's memory."""
    table = weight_table(plan.setup.geometry)
    rows = []
    for name, layout in compared_layouts(plan):
        weights = table.plan(layout, plan.setup.engine)
        copied = sum(weights.fullest.by_group.get(k, 0) for k in COPIED) / GIB
        rows.append((name, weights.gib_per_gpu, copied))
    rows.sort(key=lambda r: r[1])
    memory = plan.setup.hardware.gpu.memory_gib
    for i, (name, gib, copied) in enumerate(rows):
        own = name.startswith("▸")
        fits = gib < memory
        colour = ACCENT if own and fits else CACHE if fits else STATE
        axes.barh(i, gib, color=colour, height=0.66, alpha=1.0 if own else 0.75)
        axes.barh(i, copied, color=INK, height=0.66, alpha=0.55)
        room = f"{memory - gib:,.0f} left" if fits else f"{gib - memory:,.0f} too many"
        axes.text(gib + max(memory, rows[-1][1]) * 0.012, i, f"{gib:,.1f}  ({room})", va="center", fontsize=9, zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
    axes.axvline(memory, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [r[0] for r in rows])
    axes.set_ylim(-0.6, len(rows) + 0.2)
    axes.text(
        memory, len(rows) - 0.35, f" {plan.setup.hardware.gpu.name}: {memory:,.1f} GiB", fontsize=9, va="center"
    )  # fmt: skip
    axes.set_xlim(0, max(memory * 1.12, rows[-1][1]) * 1.28)
    axes.set_xlabel("GiB per GPU (dark: copied to every GPU)")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def draw_crossing(axes: Any, plan: Plan) -> None:
    """Slots reserved, one state, and cache of one request by length, with the crossings."""
    dcp = plan.setup.layout.dcp
    cache = [n * plan.cell_bytes / dcp / MIB for n in LENGTHS]
    one, reserved = plan.slot_bytes / MIB, plan.slot_bytes * plan.slots_per_request / MIB
    axes.plot(LENGTHS, cache, color=CACHE, linewidth=2.2)
    levels = [(one, "one state", 1)]
    if plan.slots_per_request > 1:
        levels.append((reserved, f"{plan.slots_per_request} reserved slots", plan.slots_per_request))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for height, name, slots in levels:
        axes.axhline(height, color=STATE, linewidth=2.0, alpha=1.0 if slots == plan.slots_per_request else 0.55)
        at = slots * plan.slot_bytes * dcp / plan.cell_bytes
        # On the side that the cache's line has left.
        right = at < MIDDLE
        axes.text(
            LENGTHS[-1 if right else 0], height * 1.12, f"{name}: {height:,.1f} MiB", color=STATE, fontsize=9,
            ha="right" if right else "left",
        )  # fmt: skip
        if LENGTHS[0] < at < LENGTHS[-1]:
            axes.plot([at], [height], "o", color=INK, markersize=6, zorder=5)
            axes.annotate(
                f"{at:,.0f} tokens", (at, height), textcoords="offset points", xytext=(9, -14), fontsize=9.5,
                fontweight="bold",
            )  # fmt: skip
    axes.text(
        LENGTHS[-1], cache[-1] * 1.0, "cache ", color=CACHE, fontsize=10, fontweight="bold", ha="right", va="bottom"
    )
    _length_axis(axes)
    axes.yaxis.set_major_formatter(_plain())
    axes.set_ylabel("MiB on one GPU")
    axes.set_ylim(min(cache[0], one) * 0.7, max(cache[-1], reserved) * 2.2)


def _length_axis(axes: Any) -> None:
    ticks = [256, 1024, 4096, 16384, 65536, 262144, 1048576]
    axes.set_xlim(LENGTHS[0] * 0.93, LENGTHS[-1] * 1.07)
    axes.set_xticks(ticks, ["256", "1 K", "4 K", "16 K", "64 K", "256 K", "1 M"])
    axes.minorticks_off()
    axes.set_xlabel("tokens of a request (prompt and answer)")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def draw_memory(axes: Any, plan: Plan) -> None:
    """One GPU as a stack: weights, what is kept outside, and the pools."""
    memory = plan.setup.hardware.gpu.memory_gib
    budget = plan.budget.gib
    weights = plan.weights.gib_per_gpu + plan.draft_bytes / GIB
    if plan.pools is not None:
        parts = [("states", plan.pools.ratio_pool_bytes / GIB, STATE)]
        parts.append(("cache", plan.pools.rows * plan.cell_bytes / GIB, CACHE))
        if plan.pools.scratch_bytes:
            parts.append(("draft states", plan.pools.scratch_bytes / GIB, "#d9a441"))
    else:
        parts = [("arena (states and cache)", budget, ACCENT)]
    outside = memory - weights - sum(p[1] for p in parts)
    stack = [("weights", weights, WEIGHTS), *parts, ("kept outside", max(0.0, outside), OTHER)]
    left = 0.0
    for i, (name, size, colour) in enumerate(stack):
        axes.barh([0], [size], left=[left], color=colour, height=0.5, edgecolor="white", linewidth=1.5)
        up = i % 2 == 0
        x = left + size / 2
        axes.annotate(
            f"{name}\n{size:,.1f} GiB", (x, 0.25 if up else -0.25), xytext=(x, 0.62 if up else -0.62),
            ha="center", va="center", fontsize=10, arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 0.8},
        )  # fmt: skip
        left += size
    axes.set_ylim(-1.0, 1.0)
    axes.set_xlim(-memory * 0.03, memory * 1.06)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"GiB of {memory:,.1f} on the fullest GPU")


def admission_curves(plan: Plan) -> list[tuple[str, str, str, list[int]]]:
    """(name, colour, line style, requests by length) from the plan's own budget, over all workers."""
    setup, budget, workers = plan.setup, plan.budget.bytes, plan.workers
    settings = replace(
        setup.settings if setup.engine == "sglang" else SglangSettings(), max_running=None, draft_tokens=0, replay=False
    )
    slots = slots_per_request(settings, setup.layout.pp)
    state, row = plan.state_bytes, plan.row_bytes
    arena = plan_stages(plan.stages, budget, max_running=1 << 20)
    tokens = plan.tokens
    ratio = setup.settings.ratio if setup.engine == "sglang" else _balanced(slots, state, row, setup.layout.dcp, tokens)
    curves = [("arena", ACCENT, "-", [admitted(arena, n).requests * workers for n in LENGTHS])]
    curves.append(
        (
            "arena, one snapshot kept each",
            ACCENT,
            "--",
            [admitted(arena, n, snapshots=1).requests * workers for n in LENGTHS],
        )
    )
    fixed = _split_counts(plan, settings, ratio, LENGTHS)
    if fixed is not None:
        curves.append((f"split at ratio {ratio:.3g}, {slots} slots", STATE, "-", fixed))
    best = []
    for n in LENGTHS:
        paged = -(-n // arena.layout.page_tokens) * arena.layout.page_tokens
        balanced = _balanced(slots, state, row, setup.layout.dcp, paged)
        best += _split_counts(plan, settings, balanced, (n,)) or [0]
    curves.append((f"split at the best ratio for each length, {slots} slots", STATE, ":", best))
    return curves


def _split_counts(plan: Plan, settings: SglangSettings, ratio: float, lengths: tuple[int, ...]) -> list[int] | None:
    """Requests by length of a fixed split at ``ratio`` in the plan's budget; None where it does not fit."""
    try:
        pools = sglang_pools(plan.stages, plan.budget.bytes, replace(settings, ratio=ratio))
    except DoesNotFit:
        return None
    widest = max(plan.stages, key=lambda s: s.block_bytes)
    split = replace(split_plan(widest, plan.budget.bytes, pools, within_budget=False), max_running=1 << 20)
    return [admitted(split, n).requests * plan.workers for n in lengths]


def _balanced(slots: int, state: int, row: int, dcp: int, tokens: int) -> float:
    return balanced_ratio(slots=slots, slot_bytes=state, cell_bytes=row, dcp=dcp, tokens=tokens)


def draw_admission(axes: Any, plan: Plan) -> None:
    """Requests at once by length: arena against split."""
    for name, colour, style, counts in admission_curves(plan):
        xs = [n for n, c in zip(LENGTHS, counts, strict=True) if c > 0]
        ys = [c for c in counts if c > 0]
        axes.plot(xs, ys, color=colour, linestyle=style, linewidth=2.1, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _length_axis(axes)
    axes.yaxis.set_major_formatter(_plain())
    axes.set_ylabel("requests at once")
    axes.axvline(plan.tokens, color=QUIET, linewidth=0.9, linestyle=(0, (2, 3)))
    axes.text(
        plan.tokens * 1.06, 0.97, f"{plan.tokens:,} tokens", fontsize=9, color=QUIET, va="top",
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.legend(loc="lower left", fontsize=9, frameon=True, facecolor="white", edgecolor="none", framealpha=0.95)
