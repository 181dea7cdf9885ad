"""The arena's address formula, and ``plan_pools``: how many blocks a budget holds.

One flat buffer a GPU is cut into pages of ``page_rows`` cache rows of all MLA layers on that GPU; ``P``
consecutive pages are a block, big enough for the state of one request. See design.md, 'The arena'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3stack.config.geometry import ModelGeometry
from k3stack.errors import DoesNotFit

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

    @property
    def arena_bytes(self) -> int:
        return self.blocks * self.layout.block_bytes


def block_layout(
    geometry: ModelGeometry,
    *,
    recurrent_itemsize: int = 4,
    conv_itemsize: int = 2,
    row_itemsize: int = 2,
    tp: int = 1,
    dcp: int = 1,
    kda_layers: int | None = None,
    mla_layers: int | None = None,
) -> BlockLayout:
    """Sizes of state and cache row on one GPU (facts of the architecture: state cut by heads over ``tp``, rows not).

    ``kda_layers`` / ``mla_layers``: how many lie on this pipeline stage (default: all).
    """
    kda = geometry.kda
    heads = kda.heads // tp
    recurrent = heads * kda.head_dim * kda.head_dim * recurrent_itemsize
    conv = (kda.conv_kernel - 1) * 3 * heads * kda.head_dim * conv_itemsize
    n_kda = len(geometry.kda_layers) if kda_layers is None else kda_layers
    n_mla = len(geometry.mla_layers) if mla_layers is None else mla_layers
    row = geometry.mla.row_width * row_itemsize
    page = n_mla * PAGE_ROWS * row
    state = n_kda * (recurrent + conv)
    per_block = -(-state // page) if state and page else 1
    return BlockLayout(n_mla, row, n_kda, recurrent, conv, per_block, PAGE_ROWS, dcp)


def plan_pools(
    layout: BlockLayout,
    budget_bytes: int,
    *,
    engine: Engine = "k3",
    max_running: int = 256,
) -> PoolPlan:
    """Cut ``budget_bytes`` into blocks. Raises DoesNotFit when not even one request would run."""
    blocks = budget_bytes // layout.block_bytes
    need = (1 if layout.state_bytes else 0) + (1 if layout.page_bytes else 0)
    if blocks < need:
        raise DoesNotFit(
            f"the memory budget of {budget_bytes:,} B holds {blocks} blocks of {layout.block_bytes:,} B; one request "
            f"needs {need} (its state, and a block of cache pages): "
            f"{need * layout.block_bytes - budget_bytes:,} B short. "
            "Raise --mem-fraction-static or the budget, lower the state's or the cache's precision, or use more GPUs."
        )
    return PoolPlan(engine=engine, layout=layout, budget_bytes=budget_bytes, blocks=blocks, max_running=max_running)
