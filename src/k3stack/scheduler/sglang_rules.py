"""Behaviour ``sglang``: that server's rules of admission, chunks and retraction, on our scheduler.

A running request's future output is estimated as a share of its ``max_tokens``; a request is admitted when the free
and evictable tokens exceed what is held back by that estimate. The share decays while decoding goes well and is set
anew after a retraction. Slots of states are the memory's business (``PoolPlan.slots_per_request``).
"""

from __future__ import annotations

from k3stack.errors import UserError
from k3stack.scheduler.core import Core
from k3stack.scheduler.options import SglangEstimate
from k3stack.scheduler.request import Entry, Phase
from k3stack.scheduler.rules import Rules

FIRST_SHARE = 0.7
RETRACT_STEPS = 20
"""Decode steps granted to each request by the new estimate after a retraction."""


class SglangRules(Rules):
    """One chunked request at a time, admission by estimate, the request with the least output retracted first."""

    def __init__(self, core: Core, estimate: SglangEstimate) -> None:
        super().__init__(core)
        if core.options.chunk_tokens < core.page_tokens:
            raise UserError(
                f"chunks of {core.options.chunk_tokens} tokens are smaller than a page of {core.page_tokens}; "
                "behaviour sglang cuts prompts at whole pages (raise --chunked-prefill-size)",
                param="chunk_tokens",
            )
        self.estimate = estimate
        self.first = min(1.0, FIRST_SHARE * estimate.conservativeness)
        self.least = self.first * estimate.least_share
        self.decay = (self.first - self.least) / estimate.decay_steps
        self.share = self.first
        self._held = 0.0
        """Tokens held back in this pass: for running requests, and for those admitted in it."""

    def begin_pass(self) -> None:
        self._held = sum(self._future(e) for e in self.core.rows.running.values() if e.phase is not Phase.PREFILL)

    def may_start(self, entry: Entry) -> bool:
        return True

    def accept(self, entry: Entry, cached: int, left: int) -> int | None:
        total = len(entry.ids)
        end = self.chunk_end(entry, cached, left)
        alone = not self.core.rows.running
        if end > cached and not alone and not self._affords(entry, total - cached):
            return None
        if end == total:
            self._held += self.core.page_tokens + self._most(entry)
        return end

    def chunk_end(self, entry: Entry, start: int, left: int) -> int:
        """All of it if its pages fit into the step, else whole pages of the step's tokens. Pages are those of the
        allocator (64 tokens times dcp), a multiple of the state kernel's grid."""
        page, total = self.core.page_tokens, len(entry.ids)
        if -(-(total - start) // page) * page <= left or total - start <= left < page:
            end = total
        else:
            end = (start + left) // page * page
        return self.cut(entry, start, end) if end > start else start

    def victim(self, entry: Entry) -> Entry | None:
        """Most output stays, then the shortest prompt; at least one decoding request remains."""
        rows = [e for e in self.core.rows.running.values() if e.phase is Phase.DECODE]
        if len(rows) <= (1 if entry.phase is Phase.DECODE else 0):
            return None
        return min(rows, key=lambda e: (e.outputs, -e.prompt_len))

    def preempted(self, entry: Entry) -> None:
        rows = [e for e in self.core.rows.running.values() if e.phase in (Phase.DECODE, Phase.LAST)]
        done = sum(e.outputs for e in rows)
        asked = sum(e.limit for e in rows)
        self.share = min(1.0, (done + RETRACT_STEPS * len(rows)) / (asked + 1))

    def decoded(self, rows: int) -> None:
        self.share = max(self.least, self.share - self.decay)

    def idle(self) -> None:
        self.share = self.first

    # -- the estimate ---------------------------------------------------------------------------------------------

    def _most(self, entry: Entry) -> int:
        return min(entry.limit - entry.outputs, self.estimate.clip_tokens)

    def _future(self, entry: Entry) -> float:
        """Tokens held back for a running request."""
        return self._most(entry) * (1.0 if entry.request.sampling.ignore_eos else self.share)

    def _affords(self, entry: Entry, uncached: int) -> bool:
        if self.estimate.finish_order and entry.request.sampling.ignore_eos:
            return self._finishes(entry, uncached)
        need = uncached + self._most(entry) + self.core.memory.plan.layout.page_rows
        return need < self.core.memory.available_tokens - self._held

    def _finishes(self, entry: Entry, uncached: int) -> bool:
        """True when, request after request finishing in the order of tokens left, memory never runs out."""
        rows = [(self._future(e), len(e.ids)) for e in self.core.rows.running.values()]
        rows.append((float(self._most(entry)), len(entry.ids)))
        rows.sort()
        free = float(self.core.memory.available_tokens - uncached)
        for i, (left, held) in enumerate(rows):
            still = len(rows) - i
            if free - left * still <= still:
                return False
            free += held
        return True
