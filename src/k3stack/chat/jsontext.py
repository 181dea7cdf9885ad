"""JSON whose numbers keep their spelling, read and written without losing a digit.

A tool call's arguments travel model -> client -> prompt. If ``1.0`` came back as ``1``, or ``1e3`` as ``1000.0``, the
next prompt would differ from what was generated and miss the prefix cache, so numbers stay text in between.
"""

from __future__ import annotations

import json
import math
from json.encoder import encode_basestring
from typing import Any

Json = Any
"""dict, list, str, bool, None, int, float or ``RawNumber``."""

MAX_DEPTH = 200
"""Nesting that is read; deeper text is refused (a JSON parser's stack is finite)."""


class RawNumber(str):
    """A JSON number in its original spelling."""

    __slots__ = ()


def _finite(text: str) -> RawNumber:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is beyond the range of a double")
    return RawNumber(text)


def _integer(text: str) -> RawNumber:
    return RawNumber(text)


def _refuse_constant(text: str) -> Json:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_integer, parse_constant=_refuse_constant)


def loads(text: str) -> Json:
    """Parse strict JSON. ValueError for anything else: NaN, Infinity, 1e999, too deep, text after the value.

    The last of two equal keys in an object wins.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _deeper(value, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return value


def dumps(value: Json) -> str:
    """Write JSON with ``", "`` and ``": "``, non-ASCII kept: the form Kimi-K3 was trained on for argument values."""
    if isinstance(value, RawNumber):
        return str(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote(str(k))}: {dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(dumps, value)) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def compact(value: Json) -> str:
    """Write JSON without blanks, keys sorted at every depth, non-ASCII kept: the form of tools and schemas."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def quote(text: str) -> str:
    """``text`` as a JSON string; lone surrogates, which no UTF-8 can carry, become U+FFFD."""
    return '"' + escape(text) + '"'


def escape(text: str) -> str:
    """The inside of ``quote``; escaping is per character, so pieces escaped one by one join to the whole."""
    return clean_text(encode_basestring(text)[1:-1])


def clean_text(text: str) -> str:
    """``text`` with lone surrogates (which JSON can carry and UTF-8 cannot) replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _deeper(value: Json, room: int) -> bool:
    if isinstance(value, dict):
        return room == 0 or any(_deeper(v, room - 1) for v in value.values())
    if isinstance(value, list):
        return room == 0 or any(_deeper(v, room - 1) for v in value)
    return False
