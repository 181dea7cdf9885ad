"""CUDA graphs of decode steps: captured at start for chosen batch sizes, replayed with their inputs copied in.

A step between two sizes runs in the larger one's graph, its last rows only filling up. What a graph cannot run
(chunks, log-probabilities of prompts, larger batches, longer page tables) runs as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from k3stack.kernels.upload import upload_ints
from k3stack.models.batch import ForwardBatch
from k3stack.models.decode_batch import DecodeBatch
from k3stack.models.network import Model

log = logging.getLogger(__name__)
MOST_ROWS = 256
TABLE_BYTES = 256 << 20
"""Most memory that a page table of the largest batch takes; a longer context decodes without graphs."""
WARM_UPS = 2
"""Runs before a capture: compilation, and libraries that set themselves up on first use."""


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture up to ``most`` rows: every waste stays under a fifth, above 8 rows."""
    sizes = [1, 2, 4, 6, 8, *range(10, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, MOST_ROWS + 1, 16)]
    most = min(most, MOST_ROWS)
    return [n for n in sizes if n < most] + [most]


class GraphedModel:
    """A model whose decode steps are replayed; stands where the model stood."""

    def __init__(self, model: Model, max_rows: int, context: int, page_tokens: int) -> None:
        pages = -(-context // page_tokens)
        rows = min(max_rows, MOST_ROWS)
        self.model = model
        self._pages = max(min(pages, TABLE_BYTES // 8 // rows), 1)
        self._sizes = graph_sizes(rows)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeBatch, torch.Tensor]] = {}

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    def capture(self, views: Any, progress: bool) -> int:
        """Capture all sizes, the largest first so that the others fit into its memory; returns the bytes they took."""
        device = self.model.device
        before = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        with _bar(len(self._sizes), progress) as advance, torch.inference_mode(), torch.cuda.device(device):
            for size in reversed(self._sizes):
                self._graphs[size] = self._capture_one(size, views, pool)
                advance()
            torch.cuda.empty_cache()
        return max(before - torch.cuda.mem_get_info(device)[0], 0)

    def _capture_one(self, size: int, views: Any, pool: Any) -> tuple[torch.cuda.CUDAGraph, DecodeBatch, torch.Tensor]:
        batch = DecodeBatch(size, self._pages, self.model.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run(batch, views)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._run(batch, views)
        return graph, batch, logits

    def _run(self, batch: DecodeBatch, views: Any) -> torch.Tensor:
        batch.step.forget()
        return self.model.forward(batch, views)  # type: ignore[arg-type]

    def forward(self, batch: ForwardBatch, views: Any) -> torch.Tensor:
        """As ``Model.forward``; the logits of a replayed step are overwritten by the next one of its size."""
        rows = len(batch.starts)
        fits = batch.cu[-1] == rows == batch.logit_index.shape[0] and batch.page_table.shape[1] <= self._pages
        size = next((n for n in self._sizes if n >= rows), None) if fits else None
        if size is None or size not in self._graphs:
            return self.model.forward(batch, views)
        graph, own, logits = self._graphs[size]
        own.fill(batch, upload_ints([start + 1 for start in batch.starts], self.model.device))
        graph.replay()
        return logits[:rows]


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("capturing CUDA graphs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
