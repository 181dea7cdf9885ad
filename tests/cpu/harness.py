"""A trivial arena for tests: poisoned memory, blocks and pages handed out in shuffled order, no policy."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3stack.estimate.pools import block_layout
from k3stack.models.batch import ForwardBatch
from k3stack.models.capture import Capture
from k3stack.models.load import load_model
from k3stack.models.network import Model
from k3stack.models.views import ArenaViews, cache_dtypes

GOLDEN = Path(__file__).parents[1] / "golden"
DEVICE = "cpu"
"""Where models and arenas are; the tests of a GPU set it."""
NAMES = ("k3_tiny_open", "k3_tiny_8h_open", "kimi_linear_tiny_open")


@dataclass
class Sequence:
    block: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class TestArena:
    """Every byte is 0xFF (NaN in each dtype) until something is written there."""

    __test__ = False

    def __init__(self, model: Model, blocks: int = 12, seed: int = 0) -> None:
        self.model = model
        state, window, row = cache_dtypes(model.dtype)
        self.layout = block_layout(
            model.geometry, recurrent_itemsize=state.itemsize, conv_itemsize=window.itemsize, row_itemsize=row.itemsize
        )
        self.buffer = torch.full((blocks * self.layout.block_bytes,), 0xFF, dtype=torch.uint8, device=model.device)
        self.views = ArenaViews(
            self.buffer, self.layout, model.geometry, state_dtype=state, window_dtype=window, row_dtype=row
        )
        order = list(range(blocks))
        rng = random.Random(seed)
        rng.shuffle(order)
        self._blocks = order[: blocks // 2]
        per = self.layout.pages_per_block
        self._pages = [b * per + i for b in order[blocks // 2 :] for i in range(per)]
        rng.shuffle(self._pages)

    def open(self) -> Sequence:
        block = self._blocks.pop()
        start = block * self.layout.block_bytes
        self.buffer[start : start + self.layout.state_bytes] = 0
        return Sequence(block)

    def batch(
        self, work: list[tuple[Sequence, list[int]]], *, every: bool = False, wanted: list[int] | None = None
    ) -> ForwardBatch:
        """A step of these rows, with pages for their new tokens; logits of the tokens ``wanted``, of every token, or of
        the last of each row."""
        cu, starts = [0], []
        for seq, ids in work:
            starts.append(seq.length)
            seq.length += len(ids)
            while len(seq.pages) * self.layout.page_tokens < seq.length:
                seq.pages.append(self._pages.pop())
            cu.append(cu[-1] + len(ids))
        width = max(len(s.pages) for s, _ in work) + 1
        if wanted is None:
            wanted = list(range(cu[-1])) if every else [end - 1 for end in cu[1:]]
        device = self.model.device
        return ForwardBatch(
            ids=torch.tensor([i for _, ids in work for i in ids], device=device),
            cu=cu,
            starts=starts,
            state_blocks=torch.tensor([s.block for s, _ in work], device=device),
            page_table=torch.tensor([s.pages + [1 << 40] * (width - len(s.pages)) for s, _ in work], device=device),
            logit_index=torch.tensor(wanted, dtype=torch.int64, device=device),
        )

    def run(
        self,
        work: list[tuple[Sequence, list[int]]],
        *,
        every: bool = False,
        wanted: list[int] | None = None,
        capture: Capture | None = None,
    ) -> Tensor:
        """Run one step; its logits."""
        return self.model.forward(self.batch(work, every=every, wanted=wanted), self.views, capture)

    def rows(self, seq: Sequence, layer: int) -> Tensor:
        """[length, row width] of the ``layer``-th MLA layer."""
        rows = self.views.rows(layer)
        return rows[torch.tensor(seq.pages, device=rows.device)].reshape(-1, rows.shape[2])[: seq.length]


def model(name: str, dtype: str, eps: float = 1e-6) -> Model:
    """A golden checkpoint, loaded once a test run."""
    return _model(name, dtype, eps, DEVICE)


@cache
def _model(name: str, dtype: str, eps: float, device: str) -> Model:
    return load_model(GOLDEN / name, dtype=dtype, device=device, latent_norm_eps=eps, progress=False)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return dict(arrays)


def off(mine: Tensor, theirs: np.ndarray | Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    mine, theirs = mine.cpu(), torch.as_tensor(theirs).cpu()
    assert mine.shape == theirs.shape
    return float(torch.nan_to_num((mine.double() - theirs.double()).abs(), nan=float("inf")).max())


def relative(mine: Tensor, theirs: np.ndarray | Tensor, *, dim: int | None = None) -> Tensor:
    """Relative L2 distance, of the whole or along ``dim``; NaN counts as infinite."""
    mine, theirs = mine.cpu(), torch.as_tensor(theirs).cpu().double()
    assert mine.shape == theirs.shape
    distance = torch.linalg.vector_norm(mine.double() - theirs, dim=dim) / torch.linalg.vector_norm(theirs, dim=dim)
    return torch.nan_to_num(distance, nan=float("inf"))
