"""Conversations as token ids with a loss mask: the prompt format of ``k3stack.chat``, written for speed.

``tests/cpu/test_nano_data.py`` holds it equal to ``k3stack.chat`` on generated conversations. A batch of 65,536
tokens must cost a worker well under a second, so recurring pieces (tags, attributes) are encoded once.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tiktoken

from k3stack.verify.language.talk import Conversation

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
SPECIAL_SLOTS = 256
"""Special ids follow the ranks; their offsets are those of Kimi-K3."""
OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"


def load_ranks(path: Path) -> dict[bytes, int]:
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


class Formatter:
    """``ids`` and ``mask`` of a conversation; the mask marks what the assistant must produce."""

    def __init__(self, model_file: Path) -> None:
        ranks = load_ranks(model_file)
        self.base = len(ranks)
        self.vocab = self.base + SPECIAL_SLOTS
        encoding = tiktoken.Encoding("k3-nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._encode: Callable[[str], list[int]] = encoding.encode_ordinary
        self.decode = encoding.decode
        self._cache: dict[str, list[int]] = {}
        self.open, self.close, self.sep, self.end = (
            self.base + OFFSETS[n] for n in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        )
        self.pad = self.base + OFFSETS["[PAD]"]

    def text(self, text: str) -> list[int]:
        if len(text) > 24:
            return self._encode(text)
        ids = self._cache.get(text)
        if ids is None:
            if len(self._cache) > 200_000:
                self._cache.clear()
            ids = self._cache[text] = self._encode(text)
        return ids

    def head(self, tag: str, attributes: Iterable[tuple[str, str]] = ()) -> list[int]:
        ids = [self.open, *self.text(tag)]
        for key, value in attributes:
            escaped = value.replace("&", "&amp;").replace('"', "&quot;")
            ids += (*self.text(" " + key), *self.text('="'), *self.text(escaped), *self.text('"'))
        ids.append(self.sep)
        return ids

    def tail(self, tag: str) -> list[int]:
        return [self.close, *self.text(tag), self.sep]

    def _message(self, attributes: Iterable[tuple[str, str]], body: str) -> list[int]:
        return [*self.head("message", attributes), *self.text(body), *self.tail("message"), self.end]

    def encode(self, talk: Conversation) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        mask: list[bool] = []

        def add(part: list[int], learn: bool = False) -> None:
            ids.extend(part)
            mask.extend([learn] * len(part))

        system = ("role", "system")
        if talk.tools:
            dumped = json.dumps(talk.tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            add(self._message((system, ("type", "tool-declare")), TOOLS_TEXT.format(dumped)))
        if talk.thinking:
            add(self._message((system, ("type", "thinking-effort")), EFFORT_TEXT.format(talk.effort)))
        index = 0
        for message in talk.messages:
            role = message["role"]
            if role == "assistant":
                index = 0
                self._assistant(message, talk.thinking, add)
                continue
            attributes = [("role", role)]
            if role == "tool":
                index += 1
                attributes += [("tool", message["name"]), ("index", str(index))]
            add(self._message(attributes, message["content"]))
        return ids, mask

    def _assistant(self, message: dict[str, Any], thinking: bool, add: Callable[..., None]) -> None:
        add(self.head("message", (("role", "assistant"),)))
        if thinking:
            add(self.head("think"))
            add([*self.text(message["reasoning_content"]), *self.tail("think"), *self.head("response")], True)
        else:
            add(self.head("response"))
        add([*self.text(message["content"]), *self.tail("response")], True)
        calls = message.get("tool_calls", ())
        if calls:
            add(self.head("tools"), True)
            for i, call in enumerate(calls, 1):
                function = call["function"]
                add(self.head("call", (("tool", function["name"]), ("index", str(i)))), True)
                for key, value in json.loads(function["arguments"]).items():
                    add(self._argument(key, value), True)
                add(self.tail("call"), True)
            add(self.tail("tools"), True)
        add([*self.tail("message"), self.end], True)

    def _argument(self, key: str, value: Any) -> list[int]:
        kind = {str: "string", bool: "boolean", int: "number", float: "number"}[type(value)]
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return [*self.head("argument", (("key", key), ("type", kind))), *self.text(shown), *self.tail("argument")]
