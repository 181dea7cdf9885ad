"""Grammar masks of the running requests: compiled in a thread of their own, computed while the step runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from k3stack.chat import Tokenizer
from k3stack.chat.masks import Grammars, GrammarSession
from k3stack.chat.settings import OutputGrammar
from k3stack.errors import BugError
from k3stack.scheduler import MaskedRow

log = logging.getLogger("k3stack.engine")


@dataclass(slots=True)
class _Followed:
    session: GrammarSession
    seen: int = 0
    """Output tokens that the session has been told of."""


@dataclass(slots=True)
class Constraints:
    """Sessions by the scheduler's request id; the mask source of the step loop."""

    tokenizer: Tokenizer
    _followed: dict[str, _Followed] = field(default_factory=dict)
    _grammars: Grammars | None = None
    _pool: ThreadPoolExecutor | None = None

    def compile(self, grammar: OutputGrammar, count: int) -> Future[list[GrammarSession]]:
        """``count`` fresh sessions of ``grammar``, when they are ready; the future raises UserError for a bad one."""
        if self._pool is None:
            # One thread: the first call makes the vocabulary's tables, which the others then share.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="k3-grammar")
        return self._pool.submit(self._sessions, grammar, count)

    def _sessions(self, grammar: OutputGrammar, count: int) -> list[GrammarSession]:
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer)
        return [self._grammars.session(grammar) for _ in range(count)]

    def follow(self, rid: str, session: GrammarSession) -> None:
        """Request ``rid`` obeys ``session``."""
        self._followed[rid] = _Followed(session)

    def forget(self, rid: str) -> None:
        """The request has ended."""
        self._followed.pop(rid, None)

    def __call__(self, rows: Sequence[MaskedRow]) -> Mapping[int, bytes]:
        """Masks by row. A grammar that fails in use allows no token, which ends its request and no other."""
        return {row: self._mask(rid, output_ids) for row, rid, output_ids in rows}

    def _mask(self, rid: str, output_ids: Sequence[int]) -> bytes:
        followed = self._followed[rid]
        new = output_ids[followed.seen :]
        followed.seen = len(output_ids)
        try:
            if not followed.session.accept(new):
                raise BugError(f"tokens {list(new)} came in spite of the mask")
            return followed.session.mask()
        except BugError as error:
            log.error("request %s: %s", rid, error)
            return bytes(-(-self.tokenizer.vocab_size // 8))

    def close(self) -> None:
        """End the compiling thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
