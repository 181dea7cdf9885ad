"""A network whose logits are a hash of the row's whole token history, read back from the arena.

It keeps every token in a cache row and a rolling hash in the state. The history is hashed anew from the cache rows at
every step; where the two disagree, or a row was never written, the logits are NaN. A wrong page, state block, copy,
length or last output thus changes the tokens or fails the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from k3stack.estimate.pools import BlockLayout, PoolPlan
from k3stack.models.batch import ForwardBatch

MODULUS = (1 << 61) - 1
FACTOR = 1_000_003
VOCAB = 101


@dataclass
class FakeViews:
    """rows [pages, 64] and states [blocks] as int64, in the layout of ``LAYOUT``."""

    rows: torch.Tensor
    states: torch.Tensor


LAYOUT = BlockLayout(
    cache_layers=1, row_bytes=8, state_layers=1, recurrent_bytes=1024, conv_bytes=8, pages_per_block=3
)  # fmt: skip


def pool_plan(blocks: int = 12, max_running: int = 8) -> PoolPlan:
    return PoolPlan(
        engine="k3", layout=LAYOUT, budget_bytes=blocks * LAYOUT.block_bytes, blocks=blocks, max_running=max_running
    )


def views_of(buffer: torch.Tensor) -> FakeViews:
    words = buffer.view(torch.int64)
    pages, block = LAYOUT.page_bytes // 8, LAYOUT.block_bytes // 8
    return FakeViews(words.view(-1, pages), words.as_strided((len(words) // block,), (block,)))


def extend(history_hash: int, token: int) -> int:
    return (history_hash * FACTOR + token + 1) % MODULUS


def logits_of(history_hash: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(history_hash).normal(0.0, 2.0, VOCAB)).to(dtype)


def lone_logits(ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), VOCAB] of a sequence run alone."""
    h, rows = 0, []
    for token in ids:
        h = extend(h, token)
        rows.append(logits_of(h))
    return torch.stack(rows)


def lone_greedy(prompt: list[int], count: int) -> list[int]:
    """Greedy continuation of a sequence run alone."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(lone_logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


class FakeNetwork:
    """See the module. ``fail_on``: a token whose appearance makes the whole step raise; ``nan_on``: NaN logits."""

    def __init__(
        self, fail_on: int | None = None, nan_on: int | None = None, error: type[Exception] = RuntimeError
    ) -> None:
        self.fail_on = fail_on
        self.error = error
        self.nan_on = nan_on
        self.steps = 0

    def forward(self, batch: ForwardBatch, views: FakeViews) -> torch.Tensor:
        self.steps += 1
        ids = batch.ids.tolist()
        if self.fail_on in ids:
            raise self.error(f"token {self.fail_on} is poisonous")
        logits: list[torch.Tensor] = []
        for r, start in enumerate(batch.starts):
            own = ids[batch.cu[r] : batch.cu[r + 1]]
            block = int(batch.state_blocks[r])
            logits += self._row(own, start, block, batch.page_table[r].tolist(), views)
        return torch.stack(logits)[batch.logit_index]

    def _row(self, own: list[int], start: int, block: int, pages: list[int], views: FakeViews) -> list[torch.Tensor]:
        history = 0
        for position in range(start):
            token = int(views.rows[pages[position // 64], position % 64])
            history = extend(history, token) if token >= 0 else -1
        state = int(views.states[block])
        found = []
        for position, token in enumerate(own, start):
            views.rows[pages[position // 64], position % 64] = token
            broken = history != state or token == self.nan_on
            history, state = extend(history, token), extend(state, token)
            found.append(torch.full((VOCAB,), torch.nan, dtype=torch.float64) if broken else logits_of(history))
        views.states[block] = state
        return found
