"""Token ids of simulated conversations: only which prefixes are equal matters.

Position p of a conversation is the id ``base + p``, and the modelled executor answers with the id after the last, so
that a returning turn's prompt (history, answer and all) continues exactly what was computed. Recorded messages and
hash blocks get bases of their own by content, so that shared system prompts are shared here too.
"""

from __future__ import annotations

import hashlib
import json

from k3stack.workload.sessions import Session

SPAN = 1 << 20
"""Ids set aside for one message or block; longer content takes several spans."""


class Content:
    """Hands out ids; the same content gets the same ids."""

    def __init__(self) -> None:
        self._next = 1
        self._bases: dict[tuple[str, int], int] = {}
        self._conversations: dict[int, int] = {}

    def prompt(self, session: Session, turn: int) -> tuple[int, ...]:
        """Ids of the prompt of ``turn``."""
        this = session.turns[turn]
        if this.blocks is not None:
            return self._blocks(this.blocks, this.block_tokens, this.new_tokens)
        if this.messages is not None:
            return self._messages(session, turn)
        base = self._conversations.get(session.sid)
        if base is None:
            last = len(session.turns) - 1
            base = self._take(session.prompt_tokens(last) + session.turns[last].output_tokens + 1)
            self._conversations[session.sid] = base
        return tuple(range(base, base + session.prompt_tokens(turn)))

    def done(self, session: Session) -> None:
        """The conversation is over; its ids are not used again."""
        self._conversations.pop(session.sid, None)

    def _blocks(self, blocks: tuple[int, ...], size: int, tokens: int) -> tuple[int, ...]:
        ids: list[int] = []
        for block in blocks:
            base = self._base(f"block {block}", size)
            ids.extend(range(base, base + size))
        if len(ids) < tokens:
            base = self._take(tokens - len(ids))
            ids.extend(range(base, base + tokens - len(ids)))
        return tuple(ids[:tokens])

    def _messages(self, session: Session, turn: int) -> tuple[int, ...]:
        """Message by message, each as long as its share of the prompt's estimated tokens."""
        this = session.turns[turn]
        assert this.messages is not None
        texts = ([json.dumps(this.tools)] if this.tools else []) + [json.dumps(m) for m in this.messages]
        total = sum(len(t) for t in texts) or 1
        ids: list[int] = []
        for i, text in enumerate(texts):
            left = this.new_tokens - len(ids)
            count = left if i == len(texts) - 1 else min(left, max(1, round(this.new_tokens * len(text) / total)))
            base = self._base(hashlib.sha256(text.encode()).hexdigest(), count)
            ids.extend(range(base, base + count))
        return tuple(ids)

    def _base(self, key: str, tokens: int) -> int:
        found = self._bases.get((key, tokens))
        if found is None:
            found = self._bases[(key, tokens)] = self._take(tokens)
        return found

    def _take(self, tokens: int) -> int:
        base = self._next
        self._next += tokens + 1
        return base
