"""Synthetic prompt text of a wanted number of tokens, unrelated between sessions, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from k3stack.errors import UserError

_STEMS = (
    "ba be bi bo bu da de di do du fa fe fi fo ga ge go ka ke ki ko la le li lo ma me mi mo na ne no pa pe po ra re ri "
    "ro sa se si so ta te ti to va ve vi vo za ze zo"
).split()


class TextMaker:
    """Makes text by words; ``calibrate`` learns from a server how many tokens a word costs there."""

    def __init__(self, seed: int = 0, tokens_per_word: float | None = None, overhead: int = 0) -> None:
        self._seed = seed
        self._per_word = tokens_per_word
        self._overhead = overhead
        self._words = [a + b for a in _STEMS for b in _STEMS]

    async def calibrate(self, count: Callable[[str], Awaitable[int]]) -> None:
        """Two requests of known length give the tokens a word and the fixed part of the chat format."""
        if self._per_word is not None:
            return
        short, long = 64, 512
        a = await count(self._text(random.Random(f"{self._seed} calibration a"), short))
        b = await count(self._text(random.Random(f"{self._seed} calibration b"), long))
        if b <= a:
            raise UserError(
                f"the server counts {a} prompt tokens for {short} words and {b} for {long}; without `usage` "
                "in its stream the prompts cannot be sized (see --tokens-per-word)",
                param="tokens-per-word",
            )
        self._per_word = (b - a) / (long - short)
        self._overhead = max(0, round(a - short * self._per_word))

    def make(self, session: int, turn: int, tokens: int) -> str:
        """Text that costs about ``tokens`` prompt tokens as one message (the chat format's part included)."""
        words = round((tokens - self._overhead) / (self._per_word or 1.0))
        return self._text(random.Random(f"{self._seed} {session} {turn}"), max(words, 1))

    def from_blocks(self, blocks: Sequence[int], block_tokens: int, tokens: int) -> str:
        """Text for a trace that ships hashes of blocks: the same block has the same words, wherever it comes, so that
        prompts share what they shared when they were recorded. The last block may be cut."""
        per_word = self._per_word or 1.0
        words: list[str] = []
        for block in blocks:
            words += self._words_of(random.Random(f"{self._seed} block {block}"), round(block_tokens / per_word))
        wanted = max(round((tokens - self._overhead) / per_word), 1)
        if len(words) < wanted:
            words += self._words_of(random.Random(f"{self._seed} {tokens} {blocks[-1:]}"), wanted - len(words))
        return " ".join(words[:wanted])

    def _words_of(self, rng: random.Random, words: int) -> list[str]:
        return rng.choices(self._words, k=words)

    def _text(self, rng: random.Random, words: int) -> str:
        return " ".join(self._words_of(rng, words))
