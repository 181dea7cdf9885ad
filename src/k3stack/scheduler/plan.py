"""``StepPlan``: one step of the engine as a versioned delta of plain data, and ``StepResult``, what comes back.

A plan never carries whole tables. Executors keep, for each *row* (a running request), its state block, page
table, length, sampling parameters and last output; plans add rows, end them, append pages, order copies and say
which tokens each row computes. Everything happens in plan order, on every rank. Two plans may be in flight.

Order inside one section: ``ended``, then ``added``, then ``pages``, then ``before``, then the forward pass over
``decode`` and ``work``, then sampling, then ``after``.

A row that does the ordinary thing (compute its last output, sample the next token) is one number in ``decode``,
so that the bulk of a decode step costs nothing per row to build, send or read; everything else is a ``RowWork``.
"""

from __future__ import annotations

import msgspec

from k3stack.config.sampling import SamplingParams
from k3stack.memory.ops import Op

PLAN_VERSION = 1


class RowAdd(msgspec.Struct, frozen=True, kw_only=True):
    """A request begins (or resumes) as row ``row``. Row numbers are reused after the row has ended."""

    row: int
    state_block: int
    pages: tuple[int, ...]
    length: int
    """Tokens whose cache rows and state are already in place (the reused prefix)."""
    sampling: SamplingParams
    prompt_ids: tuple[int, ...] = ()
    """Sent only where a penalty counts prompt tokens."""
    output_ids: tuple[int, ...] = ()
    """Sent only where a penalty counts earlier output (a request that resumes after preemption)."""
    output_count: int = 0
    """Outputs the request already has: position of the seed's stream, and min_tokens."""
    eos_ids: tuple[int, ...] = ()
    """Ids that may not be sampled before ``min_tokens`` outputs."""


class PagesAppend(msgspec.Struct, frozen=True, array_like=True):
    """``pages`` join the end of row ``row``'s page table."""

    row: int
    pages: tuple[int, ...]


class RowWork(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that row ``row`` computes in this step: ``ids``, or, where ``ids`` is None, the row's last output.

    Chunks of prompts, and decode steps that need a mask or return log-probabilities (the row's ``sampling`` says so).
    """

    row: int
    start: int
    """Position of the first token = the row's length before this step (an upper bound under speculation)."""
    ids: tuple[int, ...] | None
    sample: bool
    """Sample one token after the last of these."""
    masked: bool = False
    """The sampler must wait for this row's grammar mask (``Executor.masks``)."""
    score_from: int | None = None
    """Return log-probabilities of this step's own tokens at positions >= score_from (teacher-forced). Set from the
    chunk on that computes position ``score_from - 1``: the logits of a chunk's last position score the first token
    of the next chunk, so the executor keeps them."""

    @property
    def count(self) -> int:
        return 1 if self.ids is None else len(self.ids)


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The section of one data-parallel group."""

    ended: tuple[int, ...] = ()
    added: tuple[RowAdd, ...] = ()
    pages: tuple[PagesAppend, ...] = ()
    before: tuple[Op, ...] = ()
    decode: tuple[int, ...] = ()
    """Rows that compute one token, their last output, at their present length, and sample one token after it without
    mask or log-probabilities. Not repeated in ``work``. The same tuple object while the set does not change."""
    work: tuple[RowWork, ...] = ()
    after: tuple[Op, ...] = ()


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``step`` numbers plans from 0 without gaps; executors refuse a gap or another version."""

    step: int
    groups: tuple[GroupPlan, ...]
    version: int = PLAN_VERSION
    reset: bool = False
    """Forget every row first, and take the numbering up at ``step``. Sent in the first plan after a step failed:
    an executor whose step failed answers every plan with an error until one with ``reset`` arrives."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and the best ones at its position (ids and log-probabilities, best first)."""

    token: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """What row ``row`` produced: ``tokens`` sampled (none for a chunk that is not the last; several when drafted)."""

    row: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    scored: tuple[TokenLogprobs | None, ...] = ()
    """Teacher-forced entries for positions >= score_from; None for position 0, which nothing precedes."""
    error: str | None = None
    """This row failed (not the step): the request ends with an error, the others go on."""


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one data-parallel group's section."""

    tokens: tuple[int, ...] = ()
    """One sampled token for each row of the section's ``decode``, in its order; -1 for a row that failed."""
    rows: tuple[RowResult, ...] = ()
    """One for each ``work`` of the section, in its order; then one with ``error`` for each failed row of ``decode``."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one step, group by group as in the plan, and how long it took on the executor."""

    step: int
    groups: tuple[GroupResult, ...] = ()
    seconds: float = 0.0
    error: str | None = None
    """The whole step failed (``groups`` is empty): every row in it is lost, and what lies in the arena is undefined.
    Steps already submitted behind it fail too; the executor goes on with the next plan that says ``reset``."""
