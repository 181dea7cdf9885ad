"""From a plan's section to the network's input: which tokens, which rows, which logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from k3stack.errors import BugError
from k3stack.executor.torch.rows import RowTables
from k3stack.kernels.upload import upload, upload_ints
from k3stack.models.batch import ForwardBatch, HostIndex
from k3stack.scheduler.plan import GroupPlan, RowWork

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Score:
    """Which of a chunk's tokens are scored: ``tokens`` by the logits at ``first`` onwards (an index into the logits),
    the very first of them by the row's kept logits where ``from_tail``."""

    row: int
    first: int
    count: int
    """Logits of this row, from ``first`` on."""
    tokens: tuple[int, ...]
    starts_sequence: bool
    """The scored tokens begin with position 0, which nothing precedes."""
    from_tail: bool
    keep_tail: bool
    top: int
    failure: str | None = None

    def known(self) -> tuple[int, ...]:
        """The scored tokens that something precedes."""
        return self.tokens[1:] if self.starts_sequence else self.tokens


@dataclass(slots=True)
class Batch:
    """One step's input, and how to find its results: ``index`` values point into the N logits."""

    forward: ForwardBatch
    rows: Ints
    """Row numbers [R], in the order of the batch."""
    ends: Ints
    """Their lengths [R] after the step."""
    sample_rows: Ints
    """Row numbers [S] that sample: those of ``decode`` first, then of ``work`` in the batch's order."""
    sample_device_rows: torch.Tensor
    sample_index: torch.Tensor | None
    """Their logits; None: all N, in order."""
    sample_of_work: dict[int, int] = field(default_factory=dict)
    """Index into ``sample_rows`` by index into the section's ``work``."""
    masked: dict[int, int] = field(default_factory=dict)
    """Index into ``sample_rows`` by row number, for rows whose mask must be waited for."""
    scores: dict[int, Score] = field(default_factory=dict)
    """By index into the section's ``work``."""
    logprobs: dict[int, int] = field(default_factory=dict)
    """Number of best tokens to report by index into ``sample_rows``, for rows that want log-probabilities."""


def build_batch(
    group: GroupPlan, tables: RowTables, page_tokens: int, device: torch.device, tails: Mapping[int, torch.Tensor]
) -> Batch:
    """Lay out decode rows, then work that continues a last output, then chunks. Raises BugError for a plan that
    contradicts what is known of its rows."""
    decode = np.array(group.decode, np.int64)
    if not group.work:
        return _decode_batch(decode, tables, page_tokens, device)
    order = sorted(range(len(group.work)), key=lambda i: group.work[i].ids is not None)
    works = [group.work[i] for i in order]
    rows = np.concatenate((decode, np.array([w.row for w in works], np.int64)))
    counts = np.ones(len(rows), np.int64)
    counts[len(decode) :] = [w.count for w in works]
    starts = tables.length[rows]
    for work, start in zip(works, starts[len(decode) :].tolist(), strict=True):
        if work.start != start:
            raise BugError(f"row {work.row} has {start} tokens; its work begins at {work.start}")
    ends = starts + counts
    width = tables.check_room(rows, ends, page_tokens)
    continued = len(decode) + sum(w.ids is None for w in works)
    device_rows = upload(rows, device)
    literal = [token for work in works if work.ids is not None for token in work.ids]
    ids = tables.last_outputs(device_rows[:continued])
    if literal:
        ids = torch.cat((ids, upload_ints(literal, device)))
    bounds = [0, *np.cumsum(counts).tolist()]
    layout = _Layout(len(decode), tables)
    for place, (index, work) in enumerate(zip(order, works, strict=True), start=len(decode)):
        layout.add(index, work, bounds[place], tails)
    blocks = tables.state_block[rows]
    forward = ForwardBatch(
        ids=ids,
        cu=bounds,
        starts=starts.tolist(),
        state_blocks=upload(blocks, device),
        page_table=tables.pages_of(rows, device_rows, width),
        logit_index=upload_ints(layout.logits, device),
        host=HostIndex(blocks.tolist(), layout.logits),
    )
    sample_rows = np.array([*group.decode, *layout.sampling], np.int64)
    whole = layout.sample_at == list(range(len(layout.logits)))
    return Batch(
        forward=forward,
        rows=rows,
        ends=ends,
        sample_rows=sample_rows,
        sample_device_rows=upload(sample_rows, device),
        sample_index=None if whole else upload_ints(layout.sample_at, device),
        sample_of_work=layout.sample_of_work,
        masked=layout.masked,
        scores=layout.scores,
        logprobs=layout.logprobs,
    )


def _decode_batch(rows: Ints, tables: RowTables, page_tokens: int, device: torch.device) -> Batch:
    """The common step: every row computes its last output and samples."""
    starts = tables.length[rows]
    ends = starts + 1
    width = tables.check_room(rows, ends, page_tokens)
    device_rows = upload(rows, device)
    blocks = tables.state_block[rows]
    forward = ForwardBatch(
        ids=tables.last_outputs(device_rows),
        cu=list(range(len(rows) + 1)),
        starts=starts.tolist(),
        state_blocks=upload(blocks, device),
        page_table=tables.pages_of(rows, device_rows, width),
        logit_index=torch.arange(len(rows), device=device),
        host=HostIndex(blocks.tolist(), list(range(len(rows)))),
    )
    return Batch(forward, rows, ends, rows, device_rows, None)


class _Layout:
    """Collects which positions need logits and who reads them."""

    def __init__(self, decode: int, tables: RowTables) -> None:
        self._sampling = tables.sampling
        self.logits = list(range(decode))
        """Index into the batch's tokens for each of the N logits."""
        self.sample_at = list(range(decode))
        self.sampling: list[int] = []
        self.sample_of_work: dict[int, int] = {}
        self.masked: dict[int, int] = {}
        self.scores: dict[int, Score] = {}
        self.logprobs: dict[int, int] = {}

    def add(self, index: int, work: RowWork, first_token: int, tails: Mapping[int, torch.Tensor]) -> None:
        last = first_token + work.count - 1
        if work.score_from is not None and work.ids is not None and work.score_from <= work.start + work.count:
            # Position p is scored by the logits at p - 1; those of the last position may score the next chunk.
            first = max(work.score_from - 1 - work.start, 0)
            self.scores[index] = self._score(work, work.ids, len(self.logits), first, tails)
            self.logits.extend(range(first_token + first, last + 1))
        elif work.sample:
            self.logits.append(last)
        if work.sample:
            if work.masked:
                self.masked[work.row] = len(self.sample_at)
            params = self._sampling[work.row]
            if params.logprobs:
                self.logprobs[len(self.sample_at)] = params.top_logprobs
            self.sample_of_work[index] = len(self.sample_at)
            self.sample_at.append(len(self.logits) - 1)
            self.sampling.append(work.row)

    def _score(
        self, work: RowWork, ids: tuple[int, ...], at: int, first: int, tails: Mapping[int, torch.Tensor]
    ) -> Score:
        assert work.score_from is not None
        begin = max(work.score_from - work.start, 0)
        from_tail = begin == 0 and work.start > 0
        missing = from_tail and work.row not in tails
        return Score(
            row=work.row,
            first=at,
            count=work.count - first,
            tokens=ids[begin:],
            starts_sequence=begin == 0 and work.start == 0,
            from_tail=from_tail,
            keep_tail=not work.sample,
            top=self._sampling[work.row].top_logprobs,
            failure=f"the token at {work.start} cannot be scored: the one before it was reused" if missing else None,
        )
