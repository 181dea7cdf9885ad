"""Policy ``prefill-first``: while prompts wait, compute them; else decode. The baseline and the yardstick."""

from __future__ import annotations

from heapq import merge

from k3stack.scheduler.policy import Decision, View

DECODE = Decision()


class PrefillFirst:
    """A step is a chunk of prompts, by rank, or one decode of all streams; with ``mixed``, both at once.

    Streams stand still while prompts are computed, bounded only by rows and memory (``mixed`` False).
    """

    decodes_alone = True

    def __init__(self, *, mixed: bool = False) -> None:
        self.mixed = mixed

    def decide(self, view: View) -> Decision:
        prefilling = view.prefilling
        if not prefilling and not view.could_start:
            return DECODE
        chunks = merge(tuple(prefilling), view.waiting[: view.free_rows + 1])
        return Decision(chunks=chunks, tokens=view.chunk_tokens, mixed=self.mixed)
