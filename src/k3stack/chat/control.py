"""Kimi-K3's control tokens: their names, and which ids they have in a vocabulary of any size.

The published vocabulary has 163,584 byte-pair ranks and then a block of 256 control slots. The same block follows
the ranks in smaller vocabularies, so a slot is known by its offset from the first control id. A checkpoint's
``tokenizer_config.json`` (``added_tokens_decoder``) has the last word on names; without it these offsets hold.
A block of fewer than 256 slots keeps the offsets that it has room for, and its last two are always [UNK] and [PAD].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from k3stack.errors import CheckpointError

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
BOS, EOS, EOT, UNK, PAD = "[BOS]", "[EOS]", "[EOT]", "[UNK]", "[PAD]"
SLOTS = 256

OFFSETS: Mapping[str, int] = {
    BOS: 0,
    EOS: 1,
    END_OF_MSG: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    EOT: 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
}
"""Offsets of the named slots from the first control id; every other slot is ``<|reserved_token_ID|>``."""

MIN_SLOTS = 16
"""The smallest block: it holds everything that chat needs (offsets 0 to 9) and [UNK], [PAD] at its end."""


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Ids of the tokens that carry structure. Text never encodes to one of them."""

    open: int
    close: int
    sep: int
    end_of_msg: int
    eos: int
    eot: int
    bos: int
    pad: int

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return frozenset((self.end_of_msg, self.eos, self.eot))


_FIELD_NAMES = {
    "open": OPEN,
    "close": CLOSE,
    "sep": SEP,
    "end_of_msg": END_OF_MSG,
    "eos": EOS,
    "eot": EOT,
    "bos": BOS,
    "pad": PAD,
}


def slot_names(first: int, vocab: int, declared: Mapping[int, str] | None = None) -> dict[int, str]:
    """Name of every control id in ``first`` .. ``vocab - 1``; ``declared`` names (from the checkpoint) win.

    When ``declared`` is not empty, the default names are used only for ids and names that it leaves free, so that
    one name never stands for two ids.
    """
    given = {i: name for i, name in (declared or {}).items() if first <= i < vocab}
    taken = set(given.values())
    defaults = {first + offset: name for name, offset in OFFSETS.items()}
    defaults |= {vocab - 2: UNK, vocab - 1: PAD}
    names: dict[int, str] = {}
    for i in range(first, vocab):
        name = given.get(i) or defaults.get(i)
        if name is None or (i not in given and name in taken):
            name = f"<|reserved_token_{i}|>"
        names[i] = name
    return names


def control_ids(names: Mapping[int, str], where: str) -> ControlIds:
    """The ids that chat needs. CheckpointError names those that are missing."""
    by_name = {name: i for i, name in names.items()}
    missing = [name for name in _FIELD_NAMES.values() if name not in by_name]
    if missing:
        raise CheckpointError(
            f"{where}: no control token {', '.join(missing)}; the chat format of Kimi-K3 needs them. "
            "A tokenizer of another family serves ids and plain text only"
        )
    return ControlIds(**{field.name: by_name[_FIELD_NAMES[field.name]] for field in fields(ControlIds)})
