"""Logits of one whole sequence, outside of any schedule: for comparing, scoring and tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3stack.estimate.pools import BlockLayout, PoolPlan
from k3stack.executor.torch.arena import DeviceArena
from k3stack.models.batch import ForwardBatch, HostIndex
from k3stack.models.network import Model
from k3stack.models.views import ArenaViews, cache_dtypes


def sequence_logits(
    model: Model,
    layout: BlockLayout,
    ids: Sequence[int],
    chunk_tokens: int,
    *,
    state: str | None = None,
    row: str | None = None,
) -> torch.Tensor:
    """Logits [len(ids), vocab] on the host, computed in chunks in an arena of their own (a state and their pages).
    ``state``, ``row``: dtypes that ``layout`` was made for, where they are not the usual ones of the model's."""
    pages = -(-len(ids) // layout.page_tokens) if layout.page_bytes else 0
    blocks = 1 + -(-pages // layout.pages_per_block)
    plan = PoolPlan(engine="k3", layout=layout, budget_bytes=blocks * layout.block_bytes, blocks=blocks)
    arena = DeviceArena(plan, model.device)
    state_dtype, window_dtype, row_dtype = cache_dtypes(model.dtype, state, row)
    types = {"state_dtype": state_dtype, "window_dtype": window_dtype, "row_dtype": row_dtype}
    views = ArenaViews(arena.buffer, layout, model.geometry, **types)
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=model.device)
    first_page = layout.pages_per_block  # block 0 is the state
    table = torch.arange(first_page, first_page + pages, device=model.device).unsqueeze(0)
    parts = []
    for start in range(0, len(ids), chunk_tokens):
        own = tokens[start : start + chunk_tokens]
        count = len(own)
        batch = ForwardBatch(
            ids=own,
            cu=[0, count],
            starts=[start],
            state_blocks=torch.zeros(1, dtype=torch.int64, device=model.device),
            page_table=table,
            logit_index=torch.arange(count, device=model.device),
            host=HostIndex([0], list(range(count))),
        )
        parts.append(model.forward(batch, views).cpu())
    return torch.cat(parts)
