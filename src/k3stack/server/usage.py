"""``usage`` and ``logprobs`` in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from k3stack.chat.calls import usage as counts
from k3stack.chat.tokenizer import Tokenizer
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.server.records import Record

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def usage(record: Record) -> dict[str, Any]:
    """Counts of one request; a prompt is counted once, however many choices it has."""
    return counts(
        record.prompt_tokens,
        record.output_tokens,
        cached=min(record.cached_tokens, record.prompt_tokens),
        reasoning=min(record.reasoning_tokens, record.output_tokens),
    )


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LOWEST)


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.decode_bytes((token,))
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def chat_logprobs(items: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry a token generated, thinking and markers included."""
    content = []
    for item in items:
        entry = _entry(item.token, item.logprob, tokenizer)
        tops = zip(item.top_ids, item.top_logprobs, strict=True)
        entry["top_logprobs"] = [_entry(token, logprob, tokenizer) for token, logprob in tops]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    items: Iterable[TokenLogprobs | None], tokenizer: Tokenizer, offset: int, tokens: Iterable[int] | None = None
) -> dict[str, Any]:
    """The older form. ``offset``: characters before the first token. An item of None is a token that nothing
    precedes; ``tokens`` then names it."""
    names = list(tokens) if tokens is not None else []
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for i, item in enumerate(items):
        text = tokenizer.decode((item.token if item is not None else names[i],))
        found["tokens"].append(text)
        found["text_offset"].append(offset)
        offset += len(text)
        found["token_logprobs"].append(None if item is None else finite(item.logprob))
        if item is None:
            found["top_logprobs"].append(None)
            continue
        tops = zip(item.top_ids, item.top_logprobs, strict=True)
        found["top_logprobs"].append({tokenizer.decode((token,)): finite(value) for token, value in tops})
    return found
