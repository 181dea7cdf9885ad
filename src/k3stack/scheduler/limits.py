"""What can be accepted at all: how long a lone request may get."""

from __future__ import annotations

from dataclasses import dataclass

from k3stack.estimate.pools import PoolPlan
from k3stack.scheduler.options import SchedulerOptions
from k3stack.scheduler.request import Request
from k3stack.scheduler.rows import NEVER


def lone_tokens(plan: PoolPlan) -> int:
    """Tokens that one request can have computed when it has the arena for itself: one block holds its state, the
    others pages, within the cap."""
    layout = plan.layout
    if not layout.page_bytes:
        return NEVER
    blocks = plan.blocks - (1 if layout.state_bytes else 0)
    pages = blocks * layout.pages_per_block
    if plan.max_pages is not None:
        pages = min(pages, plan.max_pages)
    return pages * layout.page_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """Turns a request into the number of tokens it may produce, or a reason to refuse it."""

    options: SchedulerOptions
    room: int
    """``lone_tokens`` of the arena."""

    def outputs(self, request: Request) -> int | str:
        """Most output tokens, or why the request can never run."""
        prompt, asked = len(request.prompt_ids), request.sampling.max_tokens
        context = self.options.context
        if not prompt:
            return "the prompt is empty; at least one token is needed"
        if prompt >= context:
            return (
                f"the prompt has {prompt:,} tokens; with the context of {context:,} it must be shorter by "
                f"{prompt - context + 1:,} (shorten it, or raise --context-length)"
            )
        if asked is not None and prompt + asked > context:
            return (
                f"prompt and max_tokens are {prompt:,} + {asked:,} = {prompt + asked:,} tokens, "
                f"{prompt + asked - context:,} more than the context of {context:,} (lower max_tokens, shorten the "
                "prompt, or raise --context-length)"
            )
        if prompt > self.room:
            return (
                f"the prompt has {prompt:,} tokens, {prompt - self.room:,} more than the whole cache of "
                f"{self.room:,} (shorten it, or enlarge the arena: --mem-fraction-static)"
            )
        fits = self.room - prompt + 1  # the last token is sampled but never computed
        if asked is None:
            return min(context - prompt, fits)
        if asked > fits and not self.options.clip_max_tokens:
            return (
                f"prompt and max_tokens are {prompt:,} + {asked:,} tokens, {asked - fits:,} more than the whole cache "
                f"of {self.room:,} holds (lower max_tokens, or enlarge the arena: --mem-fraction-static)"
            )
        return min(asked, fits)
