"""Text to ids and back: Kimi-K3's tiktoken vocabulary, or single bytes where a model has no vocabulary file.

A ``Tokenizer`` encodes text with control tokens out of reach: whatever a user types stays ordinary pieces. Control
ids are put in by ``prompt.encode`` alone. Every id below ``vocab_size`` decodes to something, since a random or
quantised model may emit any of them; control ids decode to their names (``decode``) or to nothing (``texts``, what
the output parser shows).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import tiktoken

from k3stack.chat.control import MIN_SLOTS, SLOTS, ControlIds, control_ids, slot_names
from k3stack.chat.jsontext import clean_text
from k3stack.config.files import read_json, why
from k3stack.config.geometry import ModelGeometry
from k3stack.errors import CheckpointError, UserError

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Kimi-K3's pre-token pattern; the first alternative that matches wins. ``&&`` is set intersection."""

SLICE_CHARS = 400_000
"""Text is cut into slices of this many characters before anything else."""
RUN_CHARS = 25_000
"""A stretch of only blanks, or only non-blanks, is cut after this many characters."""

_RUNS = re.compile(r"\s+|\S+")
SHORT_CHARS = 16
"""Texts of up to this many characters are kept by ``encode_short``."""
_SHORT_KEPT = 8192
_CACHE_MIN_CHARS = 128
_CACHE_CHARS = 16 << 20


def cut_long(text: str) -> list[str]:
    """The pieces of ``text`` that are encoded on their own, cut where the published tokenizer cuts."""
    if len(text) <= RUN_CHARS:
        return [text]
    pieces = []
    for start in range(0, len(text), SLICE_CHARS):
        part = text[start : start + SLICE_CHARS]
        begin = 0
        for run in _RUNS.finditer(part):
            for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                pieces.append(part[begin:cut])
                begin = cut
        pieces.append(part[begin:])
    return pieces


class Tokenizer:
    """Common half of both kinds. ``pieces[i]`` is the bytes of id i, ``texts[i]`` its text if whole by itself.

    ``texts[i]`` is "" for control ids and None where the bytes are part of a code point.
    """

    kind: Literal["tiktoken", "bytes"]

    def __init__(self, pieces: list[bytes], names: Mapping[int, str], where: str) -> None:
        self.vocab_size = len(pieces)
        self.where = where
        self._names = dict(names)
        self._by_name = {name: i for i, name in self._names.items()}
        self.pieces = pieces
        self.texts: list[str | None] = [_whole(piece) for piece in pieces]
        for i, name in self._names.items():
            self.pieces[i] = name.encode()
            self.texts[i] = ""
        self._control: ControlIds | None = None
        self._cache = _EncodeCache(_CACHE_CHARS)
        self._short: dict[str, tuple[int, ...]] = {}

    @property
    def control(self) -> ControlIds:
        """Ids of the structural tokens. CheckpointError if this vocabulary is not of Kimi-K3's family."""
        if self._control is None:
            self._control = control_ids(self._names, self.where)
        return self._control

    @property
    def end_ids(self) -> frozenset[int]:
        return self.control.end_ids

    def is_control(self, token: int) -> bool:
        return token in self._names

    def control_id(self, name: str) -> int | None:
        """The id called ``name``, e.g. ``<|open|>``; None if there is none."""
        return self._by_name.get(name)

    def encode_text(self, text: str) -> list[int]:
        """Ids of ``text``; never a control id, whatever the text says."""
        if len(text) <= SHORT_CHARS:
            return list(self.encode_short(text))
        if len(text) < _CACHE_MIN_CHARS:
            return self._encode(clean_text(text))
        found = self._cache.get(text)
        if found is None:
            found = self._encode(clean_text(text))
            self._cache.put(text, found)
        return found

    def encode_short(self, text: str) -> tuple[int, ...]:
        """As ``encode_text``, for the tag names, attributes and quotes that a prompt repeats thousands of times."""
        found = self._short.get(text)
        if found is None:
            found = tuple(self._encode(clean_text(text)))
            if len(self._short) < _SHORT_KEPT:
                self._short[text] = found
        return found

    def encode_marked(self, text: str) -> list[int]:
        """Ids of ``text`` in which control tokens are written by name. Only for text of our own making, and tests."""
        ids: list[int] = []
        end = 0
        for found in self._marks().finditer(text):
            ids += self.encode_text(text[end : found.start()])
            ids.append(self._by_name[found.group()])
            end = found.end()
        return ids + self.encode_text(text[end:])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ``ids``, control tokens by name. UserError for an id outside of the vocabulary."""
        pieces, size = self.pieces, self.vocab_size
        parts = []
        for i in ids:
            if not 0 <= i < size:
                raise UserError(f"token id {i} is outside of the vocabulary of {size}", param="tokens")
            parts.append(pieces[i])
        return b"".join(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def _marks(self) -> re.Pattern[str]:
        names = sorted(self._by_name, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)))


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE in tiktoken form: ids 0 .. n-1 are the file's ranks, control slots follow."""

    kind = "tiktoken"

    def __init__(self, ranks: dict[bytes, int], vocab: int, declared: Mapping[int, str], where: str) -> None:
        n = len(ranks)
        pieces = [b""] * vocab
        for piece, rank in ranks.items():
            pieces[rank] = piece
        super().__init__(pieces, slot_names(n, vocab, declared), where)
        self._bpe = tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in cut_long(text):
            ids += self._bpe.encode_ordinary(part)
        return ids


class ByteTokenizer(Tokenizer):
    """Stand-in for models without a vocabulary file: id b is the byte b, control slots are the highest ids.

    Ids between the bytes and the control slots never come from text; they decode to the character of that number,
    so that whatever a random model emits can be shown and told apart.
    """

    kind = "bytes"

    def __init__(self, vocab: int, first_control: int, where: str) -> None:
        pieces = [bytes((i,)) for i in range(256)]
        pieces += [(chr(i) if i < 0xD800 else "\ufffd").encode() for i in range(256, vocab)]
        super().__init__(pieces, slot_names(first_control, vocab), where)

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())


def load_tokenizer(model_path: str | Path, geometry: ModelGeometry) -> Tokenizer:
    """The tokenizer of the checkpoint folder ``model_path``: its ``tiktoken.model``, else single bytes.

    Bytes: control slots begin two below the config's first eos id (K3's eos is ``<|end_of_msg|>``, the third slot)
    where that leaves room for the 256 bytes and 16 slots, else 16 below the vocabulary's end.
    Raises CheckpointError naming file and line, or the sizes that do not fit.
    """
    folder = Path(model_path)
    file = folder / "tiktoken.model"
    if file.exists():
        return _load_tiktoken(file, folder, geometry)
    vocab = geometry.vocab
    first = geometry.eos_ids[0] - 2 if geometry.eos_ids else vocab - MIN_SLOTS
    if not 256 <= first <= vocab - MIN_SLOTS:
        first = vocab - MIN_SLOTS
    if first < 256:
        raise CheckpointError(
            f"{folder}: no tiktoken.model, and a vocabulary of {vocab} is too small for the byte stand-in: "
            f"it needs {256 + MIN_SLOTS} ids"
        )
    return ByteTokenizer(vocab, first, f"{folder} (bytes)")


def _load_tiktoken(file: Path, folder: Path, geometry: ModelGeometry) -> TiktokenTokenizer:
    ranks = read_ranks(file)
    declared = _declared_names(folder / "tokenizer_config.json")
    slots = geometry.vocab - len(ranks)
    if slots < MIN_SLOTS:
        raise CheckpointError(
            f"{file}: {len(ranks)} ranks leave {slots} ids of the vocabulary of {geometry.vocab} for control tokens; "
            f"at least {MIN_SLOTS} are needed (Kimi-K3 has {SLOTS})"
        )
    tokenizer = TiktokenTokenizer(ranks, geometry.vocab, declared, str(file))
    if geometry.family == "kimi_k3" and geometry.eos_ids and tokenizer.control.end_of_msg not in geometry.eos_ids:
        raise CheckpointError(
            f"{file}: <|end_of_msg|> has id {tokenizer.control.end_of_msg}, but config.json ends a generation at "
            f"eos_token_id {', '.join(map(str, geometry.eos_ids))}",
            param="eos_token_id",
        )
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """Ranks of a tiktoken file: lines of base64, a blank, the rank; 0 .. n-1, all single bytes among them."""
    ranks: dict[bytes, int] = {}
    try:
        lines = file.read_bytes().splitlines()
    except OSError as e:
        raise CheckpointError(f"{file}: {why(e)}") from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            word, rank = line.split()
            ranks[base64.b64decode(word, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{file}, line {number}: expected base64, a blank and a rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: the {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
    missing = [i for i in range(256) if bytes((i,)) not in ranks]
    if missing:
        raise CheckpointError(f"{file}: {len(missing)} single bytes have no rank, the first is 0x{missing[0]:02x}")
    return ranks


def _declared_names(file: Path) -> dict[int, str]:
    """``added_tokens_decoder`` of a tokenizer_config.json; empty if there is no such file or field."""
    if not file.exists():
        return {}
    try:
        declared = read_json(file, error=CheckpointError).get("added_tokens_decoder", {})
        return {int(i): str(entry["content"]) for i, entry in declared.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file}: added_tokens_decoder is not a map of id to token: {e!r}") from None


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class _EncodeCache:
    """Ids of long texts seen lately: a conversation is sent again, whole, with every turn. Bounded in characters."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._used = 0
        self._found: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> list[int] | None:
        with self._lock:
            ids = self._found.get(text)
            if ids is None:
                return None
            self._found.move_to_end(text)
        return ids.tolist()

    def put(self, text: str, ids: Sequence[int]) -> None:
        if len(text) > self._room // 4:
            return
        with self._lock:
            if text in self._found:
                return
            self._found[text] = array("I", ids)
            self._used += len(text)
            while self._used > self._room:
                self._used -= len(self._found.popitem(last=False)[0])


class Detokenizer:
    """Ids to text as they come, whole code points only; control tokens by name unless ``show_control`` is false."""

    def __init__(self, tokenizer: Tokenizer, *, show_control: bool = True) -> None:
        self._tokenizer = tokenizer
        self._show = show_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Text that is complete after ``ids``; a code point in halves waits for the next call."""
        shown = ids if self._show else [i for i in ids if not self._tokenizer.is_control(i)]
        return self._decoder.decode(self._tokenizer.decode_bytes(shown))

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished code point."""
        return self._decoder.decode(b"", True)
