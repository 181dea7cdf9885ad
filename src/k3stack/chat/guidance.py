"""Calls of llguidance, whose panics come as BaseException and would pass every handler and end a whole process."""

from __future__ import annotations

import llguidance

from k3stack.errors import BugError


def as_error(error: BaseException) -> BugError:
    """``error``, caught around a call of llguidance, as an error of ours if it is a panic; raises it if it is not."""
    if type(error).__name__ != "PanicException":  # its class is not to be imported from anywhere
        raise error
    return BugError(f"llguidance panicked: {str(error).partition(chr(10))[0] or 'no reason given'}")


def problem_of(lark: str) -> str | None:
    """What llguidance says against a grammar; None: nothing."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        return llguidance.LLMatcher.validate_grammar(grammar, None) or None
    except BaseException as error:  # noqa: BLE001  a panic, or raised again
        return str(as_error(error))
