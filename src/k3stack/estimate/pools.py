"""The arena's address formula, and ``plan_pools``: how many blocks a budget holds, and what they admit.

One flat buffer a GPU is cut into pages of ``page_rows`` cache rows of all MLA layers on that GPU; ``P``
consecutive pages are a block, big enough for the state of one request. See docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from k3stack.config.geometry import ModelGeometry
from k3stack.config.layout import ParallelLayout, layer_kinds, stage_layers
from k3stack.errors import DoesNotFit
from k3stack.estimate.sglang import SglangPools, SglangSettings, sglang_pools

PAGE_ROWS = 64
Engine = Literal["k3", "sglang"]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sizes in bytes of one GPU's pages and states, and where each of them lies in the flat buffer."""

    cache_layers: int
    """MLA layers whose rows lie here."""
    row_bytes: int
    """One cache row of one layer."""
    state_layers: int
    """KDA layers whose state lies here."""
    recurrent_bytes: int
    """Recurrent state [heads, K, V] of one request in one layer."""
    conv_bytes: int
    """Convolution window [taps - 1, 3 * width] of one request in one layer."""
    pages_per_block: int
    page_rows: int = PAGE_ROWS
    dcp: int = 1
    """Decode context parallelism: one page of ``page_rows`` rows here stands for ``page_rows * dcp`` tokens."""

    @property
    def layer_state_bytes(self) -> int:
        return self.recurrent_bytes + self.conv_bytes

    @property
    def state_bytes(self) -> int:
        return self.state_layers * self.layer_state_bytes

    @property
    def page_bytes(self) -> int:
        return self.cache_layers * self.page_rows * self.row_bytes

    @property
    def page_tokens(self) -> int:
        return self.page_rows * self.dcp

    @property
    def block_bytes(self) -> int:
        """P pages; where this GPU has no cache rows (a pipeline stage of KDA alone), one state."""
        return max(self.pages_per_block * self.page_bytes, self.state_bytes)

    @property
    def padding_share(self) -> float:
        """Share of a block that a state leaves unused."""
        return 1.0 - self.state_bytes / self.block_bytes if self.state_bytes else 0.0

    def row_offset(self, page: int, layer: int, row: int) -> int:
        """Byte offset of cache row ``row`` of the ``layer``-th MLA layer here (0-based) in page ``page``."""
        return page * self.page_bytes + (layer * self.page_rows + row) * self.row_bytes

    def state_offset(self, block: int, layer: int) -> int:
        """Byte offset of the state of the ``layer``-th KDA layer here in block ``block``: recurrent, then window."""
        return block * self.block_bytes + layer * self.layer_state_bytes


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the arena is built from. ``memory`` takes this and nothing else.

    For engine ``sglang`` the two caps make a fixed split and ``slots_per_request`` states are reserved for each
    running request; for ``k3`` both caps are usually None and a running request holds one block.
    """

    engine: Engine
    layout: BlockLayout
    budget_bytes: int
    blocks: int
    max_states: int | None = None
    """Cap on blocks that hold states (running or snapshots); None: no cap."""
    max_pages: int | None = None
    """Cap on cache pages in use; None: no cap."""
    slots_per_request: int = 1
    max_running: int = 256
    notes: tuple[str, ...] = ()
    """What an operator should know of this plan: padding, caps, what was rounded."""

    @property
    def arena_bytes(self) -> int:
        return self.blocks * self.layout.block_bytes

    @property
    def states_alone(self) -> int:
        """States that fit when nothing is cached: what either kind alone could reach."""
        return self.blocks if self.max_states is None else min(self.blocks, self.max_states)

    @property
    def pages_alone(self) -> int:
        """Cache pages that fit when no state is held."""
        pages = self.blocks * self.layout.pages_per_block if self.layout.cache_layers else 0
        return pages if self.max_pages is None else min(pages, self.max_pages)

    @property
    def tokens_alone(self) -> int:
        return self.pages_alone * self.layout.page_tokens


def block_layout(
    geometry: ModelGeometry,
    *,
    recurrent_itemsize: int = 4,
    conv_itemsize: int = 2,
    row_itemsize: float = 2,
    tp: int = 1,
    dcp: int = 1,
    kda_layers: int | None = None,
    mla_layers: int | None = None,
) -> BlockLayout:
    """Sizes of state and cache row on one GPU (state cut by heads over attention ``tp``, rows not).

    ``kda_layers`` / ``mla_layers``: how many lie on this pipeline stage (default: all).
    """
    kda = geometry.kda
    heads = kda.heads // tp
    recurrent = heads * kda.head_dim * kda.head_dim * recurrent_itemsize
    conv = (kda.conv_kernel - 1) * 3 * heads * kda.head_dim * conv_itemsize
    n_kda = len(geometry.kda_layers) if kda_layers is None else kda_layers
    n_mla = len(geometry.mla_layers) if mla_layers is None else mla_layers
    row = int(geometry.mla.row_width * row_itemsize)
    page = n_mla * PAGE_ROWS * row
    state = n_kda * (recurrent + conv)
    per_block = -(-state // page) if state and page else 1
    return BlockLayout(n_mla, row, n_kda, recurrent, conv, per_block, PAGE_ROWS, dcp)


def stage_block_layouts(
    geometry: ModelGeometry,
    layout: ParallelLayout,
    *,
    engine: Engine = "k3",
    recurrent_itemsize: int = 4,
    conv_itemsize: int = 2,
    row_itemsize: float = 2,
) -> tuple[BlockLayout, ...]:
    """One BlockLayout a pipeline stage. Page ids are common to all stages, so P is the largest that any needs."""
    stages = []
    for layers in stage_layers(geometry, layout, engine):
        kda, mla = layer_kinds(geometry, layers)
        stages.append(
            block_layout(
                geometry,
                recurrent_itemsize=recurrent_itemsize,
                conv_itemsize=conv_itemsize,
                row_itemsize=row_itemsize,
                tp=layout.attn_tp,
                dcp=layout.dcp,
                kda_layers=kda,
                mla_layers=mla,
            )
        )
    pages = max(s.pages_per_block for s in stages)
    return tuple(replace(s, pages_per_block=pages) for s in stages)


def replay_ring_bytes(geometry: ModelGeometry, *, tp: int, kda_layers: int, length: int = 16) -> int:
    """Inputs of the last ``length`` tokens kept to redo a state after a verification, bytes of one slot on one GPU.

    A token and head: four bf16 vectors of the head's width, one fp32 scalar, one fp32 vector (SGLang's ring).
    """
    dim = geometry.kda.head_dim
    return kda_layers * (geometry.kda.heads // tp) * length * (4 * dim * 2 + 4 + dim * 4)


def plan_pools(
    layout: BlockLayout,
    budget_bytes: int,
    *,
    engine: Engine = "k3",
    max_running: int = 256,
    ratio: float | None = None,
    max_states: int | None = None,
    max_tokens: int | None = None,
    sglang: SglangSettings | None = None,
    within_budget: bool = True,
) -> PoolPlan:
    """Cut ``budget_bytes`` into blocks. Raises DoesNotFit when not even one request would run.

    ``ratio`` (state bytes : cache bytes), ``max_states`` and ``max_tokens`` cap the two kinds. For engine ``sglang``
    the split is that server's (``sglang`` holds its further settings; ratio 0.9 where none is given) and
    ``within_budget`` trims the cache until the padded blocks fit the budget, as a real arena must;
    ``within_budget=False`` keeps that server's figures to the token.
    """
    if engine == "sglang":
        settings = sglang or SglangSettings()
        settings = replace(
            settings,
            ratio=settings.ratio if ratio is None else ratio,
            max_mamba_cache_size=settings.max_mamba_cache_size if max_states is None else max_states,
            max_total_tokens=settings.max_total_tokens if max_tokens is None else max_tokens // layout.dcp,
            max_running=settings.max_running if sglang is not None else max_running,
        )
        return split_plan(layout, budget_bytes, sglang_pools((layout,), budget_bytes, settings), within_budget)
    return _arena_plan(layout, budget_bytes, max_running, ratio, max_states, max_tokens)


def plan_stages(stages: Sequence[BlockLayout], budget_bytes: int, *, max_running: int = 256) -> PoolPlan:
    """The k3 arena over a pipeline: block ids are common, so the stage with the largest blocks decides."""
    widest = max(stages, key=lambda s: s.block_bytes)
    return _arena_plan(widest, budget_bytes, max_running, None, None, None)


def _arena_plan(
    layout: BlockLayout,
    budget_bytes: int,
    max_running: int,
    ratio: float | None,
    max_states: int | None,
    max_tokens: int | None,
) -> PoolPlan:
    blocks = budget_bytes // layout.block_bytes
    need = (1 if layout.state_bytes else 0) + (1 if layout.page_bytes else 0)
    if blocks < need:
        raise DoesNotFit(
            f"the memory budget of {budget_bytes:,} B holds {blocks} blocks of {layout.block_bytes:,} B; one request "
            f"needs {need} (its state, and a block of cache pages): "
            f"{need * layout.block_bytes - budget_bytes:,} B short. "
            "Raise --mem-fraction-static or the budget, lower the state's or the cache's precision, or use more GPUs."
        )
    notes = []
    if layout.padding_share > 0.03:
        notes.append(
            f"a state leaves {layout.padding_share:.1%} of its block empty ({layout.state_bytes:,} B in "
            f"{layout.block_bytes:,} B); capped pools (--mamba-full-memory-ratio) do not avoid it, another precision "
            "of state or cache may"
        )
    states, pages = max_states, None
    if ratio is not None:
        states = max(1, int(blocks * ratio / (1 + ratio)))
        pages = max(1, blocks - states) * layout.pages_per_block
        notes.append(f"ratio {ratio:g}: at most {states} states and {pages * layout.page_tokens:,} tokens")
    if max_tokens is not None:
        cap = max(1, max_tokens // layout.page_tokens)
        pages = cap if pages is None else min(pages, cap)
    return PoolPlan("k3", layout, budget_bytes, blocks, states, pages, 1, max_running, tuple(notes))


def split_plan(layout: BlockLayout, budget_bytes: int, pools: SglangPools, within_budget: bool = True) -> PoolPlan:
    """SGLang's two pools as caps on an arena that just holds them (its dummy slot and draft rows need no blocks)."""
    states, pages = pools.slots, pools.rows // layout.page_rows
    blocks = states + -(-pages // layout.pages_per_block)
    notes = []
    fit = budget_bytes // layout.block_bytes
    if within_budget and blocks > fit:
        # Blocks are padded to whole pages, SGLang's slots are not: the cache gives up what the padding takes.
        if fit - states < 1:
            states = fit - 1
        if states < pools.slots_per_request:
            raise DoesNotFit(
                f"the budget of {budget_bytes:,} B holds {fit} blocks of {layout.block_bytes:,} B; one request "
                f"reserves {pools.slots_per_request} states and needs a block of cache pages: "
                f"{(pools.slots_per_request + 1) * layout.block_bytes - budget_bytes:,} B short. Raise the budget."
            )
        kept = (fit - states) * layout.pages_per_block
        if kept < pages:
            notes.append(f"padding of state blocks takes {pages - kept} pages of the cache")
            pages = kept
        blocks = fit
    running = min(pools.max_running, max(1, states // pools.slots_per_request))
    return PoolPlan(
        "sglang", layout, budget_bytes, blocks, states, pages, pools.slots_per_request, running, tuple(notes)
    )


@dataclass(frozen=True, slots=True)
class Admission:
    """How many requests of one length a plan holds at once, and which limit says so."""

    tokens: int
    requests: int
    binding: str
    """``state``, ``cache`` or ``max_running_requests``."""
    runner_up: str
    limits: dict[str, int]


def admitted(plan: PoolPlan, tokens: int, *, snapshots: int = 0) -> Admission:
    """Requests of ``tokens`` (prompt and output) that run at once, each with room for ``snapshots`` kept states.

    k3: one arena, so both kinds are paid from the same blocks; ``binding`` names the kind that takes more of it.
    sglang: each pool has its own limit and the smallest counts.
    """
    layout = plan.layout
    pages = -(-max(1, tokens) // layout.page_tokens) if layout.cache_layers else 0
    if plan.engine == "sglang" or plan.max_states is not None or plan.max_pages is not None:
        return _admitted_split(plan, tokens, pages, snapshots)
    states = (1 + snapshots) if layout.state_bytes else 0
    arena = _most(plan.blocks, states, pages, layout.pages_per_block)
    cache_blocks = pages / layout.pages_per_block
    kinds = ["state", "cache"] if states >= cache_blocks else ["cache", "state"]
    limits = {"arena": arena, "max_running_requests": plan.max_running}
    if plan.max_running < arena:
        return Admission(tokens, plan.max_running, "max_running_requests", kinds[0], limits)
    return Admission(tokens, arena, kinds[0], kinds[1], limits)


def _admitted_split(plan: PoolPlan, tokens: int, pages: int, snapshots: int) -> Admission:
    states = plan.states_alone
    limits = {"max_running_requests": plan.max_running}
    if plan.engine == "k3":
        per_block = plan.layout.pages_per_block
        limits["arena"] = _most(plan.blocks, 1 + snapshots, pages, per_block)
    # sglang: snapshots live in slots that are reserved anyway.
    limits["state"] = states // (plan.slots_per_request if plan.engine == "sglang" else 1 + snapshots)
    if pages:
        limits["cache"] = plan.pages_alone // pages
    order = sorted(limits, key=lambda k: (limits[k], k == "max_running_requests"))
    return Admission(tokens, limits[order[0]], order[0], order[1], limits)


def _most(blocks: int, states: int, pages: int, pages_per_block: int) -> int:
    """Largest n with n·states + ⌈n·pages / P⌉ <= blocks."""
    per = states + pages / pages_per_block
    if per == 0:
        return 0
    n = int(blocks / per) + 1
    while n > 0 and n * states + -(-n * pages // pages_per_block) > blocks:
        n -= 1
    return n
