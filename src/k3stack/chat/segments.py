"""A prompt as a list of segments: control tokens by name, and text that can never become one.

Every segment is encoded on its own and the ids are joined. So text cannot forge structure, and merges never cross
from a tag into a body or from a value into its quote, which is how the model was trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from k3stack.chat.control import CLOSE, END_OF_MSG, OPEN, SEP
from k3stack.chat.tokenizer import SHORT_CHARS, Tokenizer


class Segment(NamedTuple):
    """``control``: ``text`` is the name of a control token. Otherwise it is ordinary text."""

    text: str
    control: bool = False


Attributes = tuple[tuple[str, str], ...]

_OPEN, _CLOSE, _SEP, _END = (Segment(name, True) for name in (OPEN, CLOSE, SEP, END_OF_MSG))
_EQUALS, _QUOTE = Segment('="'), Segment('"')


def open_tag(name: str, attributes: Attributes = ()) -> list[Segment]:
    """``<|open|>name key="value"<|sep|>``; every attribute is four segments."""
    out = [_OPEN, Segment(name)]
    for key, value in attributes:
        out += (Segment(" " + key), _EQUALS, Segment(escape_attribute(value)), _QUOTE)
    out.append(_SEP)
    return out


def close_tag(name: str) -> list[Segment]:
    return [_CLOSE, Segment(name), _SEP]


def message(attributes: Attributes, body: Iterable[Segment]) -> list[Segment]:
    """A whole message with its end token."""
    return [*open_tag("message", attributes), *body, *close_tag("message"), _END]


def escape_attribute(value: str) -> str:
    """``&`` first, then ``"``; nothing else is escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape_attribute(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def encode(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a rendered prompt, segment by segment."""
    control = tokenizer.control
    by_name = {OPEN: control.open, CLOSE: control.close, SEP: control.sep, END_OF_MSG: control.end_of_msg}
    ids: list[int] = []
    for text, is_control in segments:
        if is_control:
            ids.append(by_name[text])
        elif text:
            ids += tokenizer.encode_short(text) if len(text) <= SHORT_CHARS else tokenizer.encode_text(text)
    return ids


def flat(segments: Iterable[Segment]) -> str:
    """The prompt as one string, to look at. Never encode it: text in it could pass for structure."""
    return "".join(segment.text for segment in segments)
