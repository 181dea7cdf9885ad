"""Where the bytes of a checkpoint land: at the end of the memory that the weight they belong to will have.

A weight never has memory twice. Bytes as stored are no more than the weight made of them, and are taken from front to
back, so that what is written never reaches what is still to be read: ``models.prepare`` converts in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from k3stack.config.tensors import TensorSpec
from k3stack.errors import BugError
from k3stack.kernels.linear.blocked import Blocked
from k3stack.models.checkpoint import Entry, Found
from k3stack.models.layers.part import Place, Slot
from k3stack.models.network import Model

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}

Item = tuple[tuple[TensorSpec, Entry], ...]
"""One tensor, or an expert matrix's packed codes with their scales."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a tensor from ``start`` on that go into uint8 ``dest`` as they are."""

    entry: Entry
    start: int
    dest: Tensor

    @property
    def file(self) -> Path:
        return self.entry.file

    @property
    def begin(self) -> int:
        """In the file."""
        return self.entry.offset + self.start

    @property
    def stored(self) -> int:
        return self.dest.numel()


@dataclass(frozen=True, slots=True)
class Convert:
    """A tensor that is converted as it is read: to a GPU, or into another shape."""

    slot: Slot
    item: Item

    @property
    def entry(self) -> Entry:
        return self.item[0][1]

    @property
    def file(self) -> Path:
        return self.entry.file

    @property
    def begin(self) -> int:
        """In the file."""
        return self.entry.offset

    @property
    def stored(self) -> int:
        return sum(e.nbytes for _, e in self.item)


@dataclass(slots=True)
class Stored:
    """Rows of a weight as they lie in the files: their values, or MXFP4 codes with scales."""

    first: int
    rows: int
    item: Item
    raw: Tensor = field(init=False)
    """uint8, flat: the values or codes."""
    scale: Tensor | None = field(init=False, default=None)
    """uint8, flat."""

    @property
    def stored(self) -> int:
        """Bytes in the files."""
        return sum(e.nbytes for _, e in self.item)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.item[0][1].dtype]


@dataclass(slots=True)
class Landing:
    """The memory of one weight [out, width], and the rows that come into it."""

    shape: tuple[int, int]
    dtype: torch.dtype
    parts: list[Stored]
    memory: Tensor = field(init=False)
    """uint8, flat."""
    place: Place | None = None
    """Of a weight for products, which has to be laid out for them."""
    blocked: Blocked | None = None
    """How, where that can be done in place."""

    @property
    def as_stored(self) -> bool:
        """Whether nothing has to be done once the bytes are here."""
        return self.place is None and all(p.scale is None and p.dtype == self.dtype for p in self.parts)

    def settle(self, memory: Tensor | None) -> None:
        """Take memory (own, or what a plain weight has) and find each tensor's bytes a place in it."""
        if memory is not None:
            self.memory = memory
        elif (home := self.place.home() if self.place is not None else None) is not None:
            self.blocked, self.memory = home
        else:
            self.memory = torch.empty(self.shape[0] * self.shape[1] * self.dtype.itemsize, dtype=torch.uint8)
        self.parts.sort(key=lambda p: p.first)
        end = self.memory.numel()
        for part in reversed(self.parts):
            end -= part.item[0][1].nbytes
            part.raw = self.memory[end : end + part.item[0][1].nbytes]
        for part in self.parts:
            if len(part.item) == 2:
                end -= part.item[1][1].nbytes
                part.scale = self.memory[end : end + part.item[1][1].nbytes]
        rows = sum(p.rows for p in self.parts)
        if end < 0 or rows != self.shape[0]:
            raise BugError(f"{self.parts[0].item[0][0].name}: {rows} rows read, the weight has {list(self.shape)}")

    def reads(self) -> Iterator[Read]:
        for part in self.parts:
            yield Read(part.item[0][1], 0, part.raw)
            if part.scale is not None:
                yield Read(part.item[1][1], 0, part.scale)


@dataclass(frozen=True, slots=True)
class Landed:
    """All tensors of a checkpoint: those of weights in this machine's memory, and the others."""

    landings: list[Landing]
    others: list[Convert]

    @property
    def stored(self) -> int:
        """Bytes in the files."""
        return sum(p.stored for x in self.landings for p in x.parts) + sum(c.stored for c in self.others)

    @property
    def unfinished(self) -> list[Landing]:
        """Weights that have to be made of what has been read."""
        return [landing for landing in self.landings if not landing.as_stored]


def land(model: Model, found: Found) -> Landed:
    """Find every tensor its place; takes the weights' memory, but touches none of it."""
    places = {_memory(w): p for p in model.places() if isinstance(w := p.get(), Tensor) and w.is_meta}
    landings: dict[int, Landing] = {}
    others: list[Convert] = []
    for number, (slot, item) in enumerate(_slots(model, found)):
        dest, key = slot.dest, _memory(slot.dest)
        if slot.fit is not None or dest.device.type not in ("cpu", "meta"):
            others.append(Convert(slot, item))
            continue
        if not dest.is_contiguous():
            raise BugError(f"{item[0][0].name}: destination {list(dest.shape)} is not in one piece")
        if key in places:
            weight = places[key].get()
            out, width = weight.shape
            landing = landings.setdefault(key, Landing((out, width), weight.dtype, [], place=places[key]))
            landing.parts.append(Stored(dest.storage_offset() // width, dest.shape[0], item))
            continue
        rows = dest.shape[0] if dest.ndim > 1 else 1
        landing = landings[-number - 1] = Landing((rows, dest.numel() // rows), dest.dtype, [Stored(0, rows, item)])
        landing.settle(dest.view(-1).view(torch.uint8))
    for landing in landings.values():
        if landing.place is not None:
            landing.settle(None)
    return Landed(list(landings.values()), others)


def _slots(model: Model, found: Found) -> Iterator[tuple[Slot, Item]]:
    layer, slots, top = -1, {}, model.slots()
    for item in _items(found):
        spec = item[0][0]
        if spec.layer is not None and spec.layer != layer:
            layer, slots = spec.layer, model.layer_slots(spec.layer)
        if spec.expert is None:
            yield (top if spec.layer is None else slots)[spec.kind], item
            continue
        slot = model.expert_slot(spec)
        if len(item) == 2 and slot.dest.dtype == torch.uint8:
            # The experts stay packed: codes and scales have destinations of their own.
            yield from ((model.expert_slot(one), ((one, own),)) for one, own in item)
        else:
            yield slot, item


def _items(found: Found) -> Iterator[Item]:
    scales = {s.name: (s, e) for s, e in found.tensors if s.kind.endswith(".scale")}
    for spec, entry in found.tensors:
        if spec.kind.endswith(".packed"):
            yield (spec, entry), scales[spec.name.removesuffix("_packed") + "_scale"]
        elif not spec.kind.endswith(".scale"):
            yield ((spec, entry),)


def _memory(tensor: Tensor) -> int:
    """A number that views of one tensor share."""
    return int(tensor.untyped_storage()._cdata)
