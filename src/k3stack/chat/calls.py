"""Ids of tool calls, and the token counts of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from k3stack.errors import BugError

_NUMBERED = re.compile(r":(\d{1,9})$")


class ToolCallIds:
    """Makes the ids of one output's calls: ``name:N``.

    N starts at the larger of the number of calls in the conversation and one more than the largest N among its ids,
    so that an id stays unique even where the client has trimmed older turns. Ids never reach the prompt.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        count = 0
        largest = -1
        for message in messages:
            calls = message.get("tool_calls")
            if not isinstance(calls, list):  # only an assistant's are looked at when they are rendered
                calls = []
            count += len(calls)
            ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
            for given in (*ids, message.get("tool_call_id")):
                found = _NUMBERED.search(given) if isinstance(given, str) else None
                if found:
                    largest = max(largest, int(found.group(1)))
        self.first = max(count, largest + 1)

    def id(self, index: int, name: str) -> str:
        """Id of call ``index`` (from 0) of the output, which calls ``name``."""
        return f"{name}:{self.first + index}"


def usage(prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's usage object.

    ``prompt`` is the true number of prompt tokens, the opening of the assistant's message included (Moonshot's own
    service reports three fewer); so it equals what /tokenize counts and is never below ``cached``. ``completion``
    counts every generated id, ``reasoning`` those of the thinking with its closing tag (``OutputParser``).
    """
    if cached > prompt or reasoning > completion:
        raise BugError(f"usage: cached {cached} of {prompt} prompt tokens, reasoning {reasoning} of {completion}")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
