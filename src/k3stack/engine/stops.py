"""Stop strings, found while tokens arrive; what might be the beginning of one is held back.

A stop string may begin and end inside tokens. Neither it nor anything behind it leaves the engine: tokens are
released once the text up to their end can no longer be part of a match, and the visible beginning of a token in which
a match begins is handed out as text (``tail``).
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from k3stack.chat import Content, OutputParser, Tokenizer
from k3stack.scheduler.plan import TokenLogprobs


class TextSource(Protocol):
    """The text that is searched, as it follows from tokens."""

    def feed(self, token: int) -> str:
        """Text that ``token`` adds (of a code point in halves: when its last half comes)."""
        ...

    @property
    def whole(self) -> bool:
        """No code point is pending: the text may be cut here."""
        ...


class RawText:
    """Everything decoded, control tokens by name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes((token,)))

    @property
    def whole(self) -> bool:
        return not self._decoder.getstate()[0]


class ContentText:
    """The visible content alone: no reasoning, no tool calls, no structure."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self._parser = OutputParser(tokenizer, thinking)
        self._raw = RawText(tokenizer)

    def feed(self, token: int) -> str:
        self._raw.feed(token)
        return "".join(delta.text for delta in self._parser.feed((token,)) if isinstance(delta, Content))

    @property
    def whole(self) -> bool:
        return self._raw.whole


class Released(NamedTuple):
    """Tokens that may leave, with their log-probabilities where they came with some."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


class _Held(NamedTuple):
    token: int
    end: int
    """Length of the text up to and with this token."""
    whole: bool


class StopMatcher:
    """Looks for ``stops`` in one choice's text. Matches that end within the first ``min_tokens`` tokens don't count."""

    def __init__(self, stops: tuple[str, ...], source: TextSource, min_tokens: int = 0) -> None:
        self._stops = stops
        self._source = source
        self._min_tokens = min_tokens
        self._held: deque[_Held] = deque()
        self._logprobs: deque[TokenLogprobs] = deque()
        self._text = ""
        """Text from ``_base`` on: all that may still become part of a match."""
        self._base = 0
        self._free = 0
        """Length of the text that can no longer be part of a match."""
        self.fed = 0
        """Tokens seen."""
        self.matched: str | None = None
        self.tail = ""
        """After a match: visible text behind the last released token."""

    def feed(self, token: int) -> bool:
        """Take one token in; True when it completes a stop string."""
        self.fed += 1
        piece = self._source.feed(token)
        self._text += piece
        end = self._base + len(self._text)
        self._held.append(_Held(token, end, self._source.whole))
        if piece and self.fed >= self._min_tokens and self._find():
            return True
        self._free = end - (self._overlap() if piece else end - self._free)
        return False

    def add_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Those of the tokens fed, in order."""
        self._logprobs.extend(logprobs)

    def release(self) -> Released:
        """What may leave now."""
        count = 0
        for i, held in enumerate(self._held, start=1):
            if held.end > self._free:
                break
            if held.whole:
                count = i
        return self._take(count)

    def release_all(self) -> Released:
        """What is left when the choice has ended for another reason."""
        return self._take(len(self._held))

    def _take(self, count: int) -> Released:
        taken = [self._held.popleft() for _ in range(count)]
        if taken:
            # Text that cannot match any more is dropped with its tokens.
            cut = min(taken[-1].end, self._free) - self._base
            self._text, self._base = self._text[cut:], self._base + cut
        logprobs = tuple(self._logprobs.popleft() for _ in range(min(count, len(self._logprobs))))
        return Released(tuple(held.token for held in taken), logprobs)

    def _find(self) -> bool:
        """Look for a stop string; the one that begins first counts, of those the one given first."""
        found = [(at, i) for i, stop in enumerate(self._stops) if (at := self._text.find(stop)) >= 0]
        if not found:
            return False
        at, which = min(found)
        self.matched = self._stops[which]
        self._free = self._base + at
        kept = [held.end for held in self._held if held.whole and held.end <= self._free]
        begin = max(kept, default=self._base) - self._base
        self.tail = self._text[begin:at]
        return True

    def _overlap(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max((self._overlap_with(stop) for stop in self._stops), default=0)

    def _overlap_with(self, stop: str) -> int:
        for at in _positions(self._text, stop[0], max(0, len(self._text) - len(stop) + 1)):
            if stop.startswith(self._text[at:]):
                return len(self._text) - at
        return 0


def _positions(text: str, char: str, start: int) -> Iterator[int]:
    at = text.find(char, start)
    while at >= 0:
        yield at
        at = text.find(char, at + 1)
