"""Grammars at work: which tokens may come next, for every output that has a grammar.

``Grammars`` belongs to one tokenizer and keeps compiled grammars; a ``GrammarSession`` follows one output. While the
model thinks, the mask lets through every text token and ``<|close|>``; the closing tag is then spelt out token by
token and the grammar proper takes over, so thinking is free and yet always ends in the trained way. Those masks are
ready-made and cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

import llguidance

from k3stack.chat.guidance import as_error
from k3stack.chat.segments import close_tag, encode
from k3stack.chat.settings import OutputGrammar
from k3stack.chat.tokenizer import Tokenizer
from k3stack.errors import BugError, UserError

KEPT = 256
"""Compiled grammars that are kept."""
FORCED = 256
"""Tokens that a grammar may begin every output with, as far as a new one is followed to see that it can go on."""


class _Wrapper:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.control.end_of_msg
        self.bos_token_id = None
        self.tokens = tokenizer.pieces
        self.special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_text(text.decode("utf-8", "replace"))


class Grammars:
    """Compiles grammars for one vocabulary. Making one takes about half a second at 163,840 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.mask_bytes = -(-tokenizer.vocab_size // 8)
        wrapper = llguidance.TokenizerWrapper(_Wrapper(tokenizer))
        self.tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size)
        control = tokenizer.control
        text = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)]
        self.thinking = self._mask([*text, control.close])
        close = encode(close_tag("think"), tokenizer)
        self.closing = [(i, self._mask([i])) for i in close]
        self.ended = self._mask([control.end_of_msg])
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()

    def session(self, grammar: OutputGrammar) -> GrammarSession:
        """Follow a new output. UserError if the grammar cannot be compiled, or refuses the given prefix."""
        matcher = self._compiled(grammar.lark).deep_copy()
        try:
            fits = not grammar.prefix or matcher.consume_tokens(list(grammar.prefix))
        except BaseException as error:  # noqa: BLE001  a panic, or raised again
            raise as_error(error) from None
        if not fits:
            raise UserError("the text to be continued does not begin what the response must match", param="messages")
        return GrammarSession(self, matcher, grammar.thinking)

    def _compiled(self, lark: str) -> llguidance.LLMatcher:
        with self._lock:
            found = self._kept.get(lark)
            if found is not None:
                self._kept.move_to_end(lark)
                return found
        try:
            source = llguidance.LLMatcher.grammar_from_lark(lark)
            found = llguidance.LLMatcher(self.tokenizer, source, log_level=0)
            problem = (found.get_error() or "").partition("\n")[0] if found.is_error() else ""
            if not problem and _matches_nothing(found):
                problem = "no text matches it"
        except BaseException as error:  # noqa: BLE001  a panic, or raised again
            raise UserError(f"the requested structure cannot be compiled: {as_error(error)}") from None
        if problem:
            raise UserError(f"the requested structure cannot be compiled: {problem}")
        with self._lock:
            self._kept[lark] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _mask(self, ids: Iterable[int]) -> bytes:
        bits = bytearray(self.mask_bytes)
        for i in ids:
            bits[i >> 3] |= 1 << (i & 7)
        return bytes(bits)


def _matches_nothing(compiled: llguidance.LLMatcher) -> bool:
    """Whether an output could not go on after the tokens that the grammar begins every output with."""
    matcher = compiled.deep_copy()
    matcher.try_consume_tokens(matcher.compute_ff_tokens()[:FORCED])
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    return bool(matcher.is_error())


class GrammarSession:
    """One output under a grammar."""

    def __init__(self, grammars: Grammars, matcher: llguidance.LLMatcher, thinking: bool) -> None:
        self._grammars = grammars
        self._matcher = matcher
        self._thinking = thinking
        self._closing = 0
        """Tokens of the think close that have come."""

    @property
    def done(self) -> bool:
        """The message is closed: only ``<|end_of_msg|>`` can follow."""
        return not self._thinking and self._matcher.is_stopped()

    def mask(self) -> bytes:
        """Allowed-token bits of the next token: bit i % 8 of byte i // 8 is token i, ceil(vocab / 8) bytes.

        BugError if the grammar has failed in use (a limit of the library's, not the request's fault).
        """
        if self._thinking:
            return self._grammars.closing[self._closing][1] if self._closing else self._grammars.thinking
        try:
            if self._matcher.is_stopped():
                self._check()
                return self._grammars.ended
            mask = self._matcher.compute_bitmask()
            self._check()
        except BaseException as error:  # noqa: BLE001  a panic, or raised again
            raise as_error(error) from None
        return mask[: self._grammars.mask_bytes]

    def accept(self, ids: Sequence[int]) -> bool:
        """Follow tokens that were sampled. False, and nothing has changed after the last good one, if one is not
        allowed here: the sampler did not apply the mask."""
        for n, token in enumerate(ids):
            if not self._thinking:
                return self._follow(ids[n:])
            closing = self._grammars.closing
            if token == closing[self._closing][0]:
                self._closing += 1
                self._thinking = self._closing < len(closing)
            elif self._closing or not self._grammars.thinking[token >> 3] >> (token & 7) & 1:
                return False
        return True

    def _follow(self, ids: Sequence[int]) -> bool:
        try:
            if self._matcher.is_stopped():
                return all(self._grammars.ended[i >> 3] >> (i & 7) & 1 for i in ids)
            good = self._matcher.try_consume_tokens(list(ids)) == len(ids)
            if not good:
                self._check()
        except BaseException as error:  # noqa: BLE001  a panic, or raised again
            raise as_error(error) from None
        return good

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BugError(f"grammar failed in use: {self._matcher.get_error().splitlines()[0]}")
