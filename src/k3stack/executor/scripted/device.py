"""The toy device: a flat arena of pages and blocks, row tables, and the operations of a plan, strictly checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3stack.errors import BugError
from k3stack.executor.scripted.toy import FRESH, MASK, Sampling, ToyModel, counts_outputs
from k3stack.memory.ops import ClearState, CopyPage, CopyState, Op, SetPage, SetState
from k3stack.scheduler.plan import GroupPlan, GroupResult, RowAdd, RowResult, RowWork, TokenLogprobs

POISON = 0xDEADBEEFDEADBEEF


class DeviceFault(BugError):
    """A plan asks for what a device cannot do, or would read memory that does not hold what it should."""


@dataclass(slots=True)
class _Row:
    block: int
    pages: list[int]
    length: int
    sampling: Sampling
    last: int | None = None
    """Its last output, the input of the next decode step."""
    kept: int | None = None
    """State behind the last logits kept for scoring."""


class ToyDevice:
    """Every cache row holds the digest of the prefix it stands for, every state block the digest of its prefix.

    States and pages lie in the same bytes, as in the real arena: writing a state spoils the block's pages, writing a
    page spoils the block's state. ``blocks`` of ``pages_per_block`` pages of ``page_tokens`` rows.
    """

    def __init__(self, model: ToyModel, blocks: int, pages_per_block: int, page_tokens: int) -> None:
        self.model = model
        self.pages_per_block = pages_per_block
        self.page_tokens = page_tokens
        self.cache: npt.NDArray[np.uint64] = np.full((blocks * pages_per_block, page_tokens), POISON, np.uint64)
        self.states = [POISON] * blocks
        self.rows: dict[int, _Row] = {}

    def reset(self) -> None:
        """Forget every row; what lies in memory is as good as poisoned."""
        self.rows.clear()
        self.cache[:] = POISON
        self.states = [POISON] * len(self.states)

    def poison(self, pages: Iterable[int], blocks: Iterable[int]) -> None:
        """Overwrite memory that nobody owns."""
        for page in pages:
            self.cache[page] = POISON
        for block in blocks:
            self.states[block] = POISON
            self.cache[self._pages_of(block)] = POISON

    def run(
        self, group: GroupPlan, masks: Mapping[int, bytes], failing: Mapping[int, str] | None = None
    ) -> GroupResult:
        """One section of a plan. ``failing``: rows that answer with an error instead of a token."""
        failing = failing or {}
        self._tables(group)
        for op in group.before:
            self._op(op)
        seen: set[int] = set()
        plain = RowWork(row=0, start=0, ids=None, sample=True)
        tokens, rows, failed = [], [], []
        for number in group.decode:
            result = self._forward(number, plain, None, seen, None)
            if number in failing:
                failed.append(RowResult(row=number, error=failing[number]))
            tokens.append(-1 if number in failing else result.tokens[0])
        for work in group.work:
            mask = masks.get(work.row)
            if work.masked and mask is None:
                raise DeviceFault(f"row {work.row} waits for a mask that never came")
            result = self._forward(work.row, work, work.start, seen, mask or None)
            if work.row in failing:
                result = RowResult(row=work.row, error=failing[work.row])
            rows.append(result)
        for op in group.after:
            self._op(op)
        return GroupResult(tokens=tuple(tokens), rows=(*rows, *failed))

    # -- tables ---------------------------------------------------------------------------------------------------

    def _tables(self, group: GroupPlan) -> None:
        for number in group.ended:
            if self.rows.pop(number, None) is None:
                raise DeviceFault(f"row {number} ends but does not exist")
        for add in group.added:
            if add.row in self.rows:
                raise DeviceFault(f"row {add.row} is added but has not ended")
            self.rows[add.row] = self._new_row(add)
        for append in group.pages:
            self._row(append.row).pages.extend(append.pages)

    def _new_row(self, add: RowAdd) -> _Row:
        if add.length > len(add.pages) * self.page_tokens:
            raise DeviceFault(f"row {add.row} begins at {add.length} with {len(add.pages)} pages")
        if counts_outputs(add.sampling) and len(add.output_ids) != add.output_count:
            raise DeviceFault(f"row {add.row}: {len(add.output_ids)} output ids for a count of {add.output_count}")
        sampling = Sampling(add.sampling, add.prompt_ids, list(add.output_ids), add.output_count, add.eos_ids)
        return _Row(add.state_block, list(add.pages), add.length, sampling)

    def _row(self, number: int) -> _Row:
        row = self.rows.get(number)
        if row is None:
            raise DeviceFault(f"row {number} does not exist")
        return row

    # -- operations -----------------------------------------------------------------------------------------------

    def _op(self, op: Op) -> None:
        match op:
            case ClearState(block):
                self._write_state(block, FRESH)
            case CopyState(src, dst):
                self._write_state(dst, self.states[src])
            case CopyPage(src, dst, rows):
                kept = self.cache[src, :rows].copy()
                self.cache[dst, :rows] = kept
                self.states[dst // self.pages_per_block] = POISON
            case SetPage(number, index, page):
                self._row(number).pages[index] = page
            case SetState(number, block):
                self._row(number).block = block

    def _write_state(self, block: int, state: int) -> None:
        self.states[block] = state
        self.cache[self._pages_of(block)] = POISON

    def _pages_of(self, block: int) -> slice:
        return slice(block * self.pages_per_block, (block + 1) * self.pages_per_block)

    # -- the forward pass -----------------------------------------------------------------------------------------

    def _forward(self, number: int, work: RowWork, start: int | None, seen: set[int], mask: bytes | None) -> RowResult:
        row = self._row(number)
        if number in seen:
            raise DeviceFault(f"row {number} has work twice in a step")
        seen.add(number)
        if start is not None and start != row.length:
            raise DeviceFault(f"row {number}: work starts at {start}, the device is at {row.length}")
        ids = work.ids
        if ids is None:
            if row.last is None:
                raise DeviceFault(f"row {number} has no last output to go on from")
            ids = (row.last,)
        if not ids or row.length + len(ids) > len(row.pages) * self.page_tokens:
            raise DeviceFault(f"row {number}: {row.length} + {len(ids)} tokens on {len(row.pages)} pages")
        scored = self._compute(row, ids, work.score_from)
        if not work.sample:
            return RowResult(row=number, scored=scored)
        token = self._sample(row, mask)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row.sampling.params.logprobs:
            logprobs = (TokenLogprobs(token, self.model.score(self.states[row.block], token)),)
        return RowResult(row=number, tokens=(token,), logprobs=logprobs, scored=scored)

    def _compute(self, row: _Row, ids: tuple[int, ...], score_from: int | None) -> tuple[TokenLogprobs | None, ...]:
        """Compute ``ids``: new state, new cache rows, scores; checks that state and cache agree on the prefix."""
        model, size = self.model, self.page_tokens
        state = self.states[row.block]
        before = (
            FRESH if row.length == 0 else int(self.cache[row.pages[(row.length - 1) // size], (row.length - 1) % size])
        )
        if state != before:
            raise DeviceFault(f"state in block {row.block} is not that of the {row.length} tokens in the row's pages")
        scored: list[TokenLogprobs | None] = []
        for position, token in enumerate(ids, row.length):
            if score_from is not None and position >= score_from:
                if position == row.length and position > 0 and row.kept != state:
                    raise DeviceFault(f"the score of position {position} needs logits that nobody kept")
                scored.append(TokenLogprobs(token, model.score(state, token)) if position else None)
            state = model.next_state(state, token)
            page = row.pages[position // size]
            self.cache[page, position % size] = state
            self.states[page // self.pages_per_block] = POISON
        if self.states[row.block] == POISON:
            raise DeviceFault(f"block {row.block} is a row's state and holds its cache pages too")
        self._write_state(row.block, state)
        row.length += len(ids)
        row.kept = state if score_from is not None else None
        return tuple(scored)

    def _sample(self, row: _Row, mask: bytes | None) -> int:
        rows = self.cache[row.pages].reshape(-1)[: row.length]
        row_sum = int(rows.sum(dtype=np.uint64)) & MASK
        token = self.model.sample(self.states[row.block], row_sum, row.sampling, mask)
        row.last = token
        row.sampling.count += 1
        if counts_outputs(row.sampling.params):
            row.sampling.outputs.append(token)
        return token
