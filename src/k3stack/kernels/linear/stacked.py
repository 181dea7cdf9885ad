"""Equally shaped weights of many experts, packed so that one oneDNN call serves all of them.

A call of its own for each expert costs about as much as reading 3 MB: with a few rows an expert that is most of the
time. Here experts are the groups of a 1x1 convolution, and every expert gets the same number of rows. Measured on two
Zen 4 cores, 32 experts [512, 576] with 8 rows each take 0.74 ms in bfloat16 (in calls of their own: 1.5 to 2.9) and
1.2 ms in float32 (3.5).

The packed bytes of a group are those of the expert alone, so one buffer serves the product of all experts and that of
any single one. torch has no operation for a part of a packed weight; parts are made of address and layout by the C
interface that its compiled models use. Whatever the library or the processor does not offer, or lays out differently,
is found out in advance, and then experts are packed one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import overload

import torch
from torch import Tensor

from k3stack.kernels.linear.blocked import Blocked, at_count, block_rows, home, library, tensor_at, values
from k3stack.kernels.linear.cpu import (
    IMAGE,
    ONE_IMAGE,
    Packed,
    Weight,
    as_image,
    convolve_image,
    describe,
    pack,
    packs,
    reorder_convolution,
)

MANY_ROWS = (64, 1024)
"""Rows of one expert's product, by far more than ``ONE_IMAGE``, that are tried in advance."""
GROUP_ROWS = (2, 4, 8, 16, 32)
FEW_EXPERTS = 2
MOST_BYTES = 256 << 20
"""Larger stacks are packed one by one: their experts are so large that a call costs little."""


class Stack(Sequence[Weight]):
    """Weights [out, in] of E experts; as a sequence it gives each expert's own."""

    def __init__(self, parts: list[Packed], whole: Tensor, fast_rows: frozenset[int]) -> None:
        self._parts = parts
        self._whole = whole
        self.fast_rows = fast_rows
        """Up to ``ONE_IMAGE``: rows of a single expert's product for which oneDNN takes the weight as it lies. For any
        other number it lays the weight out anew in every call, a hundred times the time of the product."""

    @overload
    def __getitem__(self, index: int) -> Weight: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Weight]: ...

    def __getitem__(self, index: int | slice) -> Weight | Sequence[Weight]:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def expert_bytes(self) -> int:
        return self._parts[0].nbytes

    def product(self, x: Tensor) -> Tensor:
        """x [rows * E, in], expert after expert within a row -> [rows * E, out]. From 2 to 32 rows."""
        total, width = x.shape
        count = len(self._parts)
        y = convolve_image(as_image(x, 1, total // count, count * width), self._whole, count)
        return y.permute(0, 2, 3, 1).view(total, -1)

    def single_products(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        """One row for each of the n experts ``chosen``: x [n, in], or [1, in] for all of them -> [n, out]."""
        rows = filled_rows(self.fast_rows)[1]
        images = as_image(x.repeat_interleave(rows, 0), len(x), rows, x.shape[1]).split(1)
        each = images if len(x) > 1 else images * len(chosen)
        found = [convolve_image(i, self._parts[e].data, 1) for i, e in zip(each, chosen, strict=True)]
        return torch.cat(found)[:, :, 0, 0]


class Stacker:
    """Packs the weights [out, in] of a layer's experts one at a time, in any order, from any thread.

    ``like``: tensors of their shape, dtype and device; values do not matter (device 'meta' stands for the CPU).
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        first, self._count = like[0], len(like)
        self._shape, self._dtype = (first.shape[0], first.shape[1]), first.dtype
        device = torch.device("cpu") if first.is_meta else first.device
        stacks = self._count > 1 and packs(first.dtype, device)
        threads = torch.get_num_threads()
        self._layout = _layout(self._count, *self._shape, self._dtype, threads) if stacks else None
        size = self._layout.single_bytes if self._layout is not None else 0
        self._owner = torch.empty(self._count * size, dtype=torch.uint8)

    def home(self, expert: int) -> tuple[Blocked, Tensor] | None:
        """Layout and memory (uint8) of one expert's weight, for who packs it block by block; None: only ``pack``
        can."""
        if self._layout is None:
            return home(*self._shape, self._dtype)
        if self._layout.rows is None:
            return None
        size = self._layout.single_bytes
        blocked = Blocked(self._shape, self._dtype, (*self._shape, 1, 1), self._layout.rows, self._layout.single)
        return blocked, self._owner[expert * size : (expert + 1) * size]

    def pack(self, expert: int, weight: Tensor) -> Weight:
        """See ``cpu.pack``."""
        if self._layout is None:
            return pack(weight)
        size = self._layout.single_bytes
        place = self._owner.data_ptr() + expert * size
        packed = reorder_convolution(weight, 1, MANY_ROWS[-1])
        ctypes.memmove(place, torch.ops.mkldnn.data_ptr(packed), size)
        data = tensor_at(place, (*self._shape, 1, 1), self._dtype, self._layout.single)
        filling = size - weight.shape[0] * weight.shape[1] * weight.dtype.itemsize
        return Packed(data, self._shape, self._dtype, self._owner, filling)

    def finish(self, parts: Sequence[Weight]) -> Sequence[Weight]:
        """All of them, as ``pack`` returned them."""
        packed = [p for p in parts if isinstance(p, Packed)]
        if self._layout is None or len(packed) < self._count:
            return list(parts)
        shape = (self._count * self._shape[0], self._shape[1], 1, 1)
        whole = tensor_at(self._owner.data_ptr(), shape, self._dtype, self._layout.group)
        return Stack(packed, whole, self._layout.fast_rows)


def pack_all(weights: Sequence[Tensor]) -> Sequence[Weight]:
    """The weights [out, in] of a layer's experts as the products are fastest with them."""
    stacker = Stacker(weights)
    return stacker.finish([stacker.pack(e, w) for e, w in enumerate(weights)])


@dataclass(frozen=True, slots=True)
class _Layout:
    single: Tensor
    group: Tensor
    single_bytes: int
    fast_rows: frozenset[int]
    rows: int | None
    """Of a block, where experts can be packed block by block."""


@cache
def _layout(count: int, out: int, width: int, dtype: torch.dtype, threads: int) -> _Layout | None:
    """How oneDNN lays such weights out for products by ``threads`` threads, those of the caller; None where groups and
    single experts are not the same bytes, where the layout depends on the number of rows beyond ``fast_rows``, or where
    parts cannot be made."""
    if library() is None or count * out * width * dtype.itemsize > MOST_BYTES:
        return None
    # Tried with few experts: all of them are many megabytes.
    few = min(count, FEW_EXPERTS)
    sample = values((few + 1) * out, width, dtype)
    groups = [reorder_convolution(sample[: few * out], few, rows) for rows in GROUP_ROWS]
    size = torch.ops.mkldnn._nbytes
    single, other = (describe(reorder_convolution(sample[:out], 1, rows)) for rows in reversed(MANY_ROWS))
    if not torch.equal(single, other) or not all(torch.equal(describe(g), describe(groups[0])) for g in groups):
        return None
    last = sample[(few - 1) * out : few * out]
    tail = reorder_convolution(last, 1, MANY_ROWS[-1])
    start = torch.ops.mkldnn.data_ptr(groups[0]) + (few - 1) * size(tail)
    if ctypes.string_at(start, size(tail)) != ctypes.string_at(torch.ops.mkldnn.data_ptr(tail), size(tail)):
        return None
    more = reorder_convolution(sample, few + 1, GROUP_ROWS[0])
    group = at_count(describe(groups[0]), describe(more), few, count)
    if group is None or size(groups[0]) != few * size(tail) or size(more) != (few + 1) * size(tail):
        return None
    tried = range(1, ONE_IMAGE + 1)
    fast = frozenset(n for n in tried if torch.equal(describe(reorder_convolution(sample[:out], 1, n)), single))
    return _Layout(single, group, size(tail), fast, block_rows(last, tail))


@lru_cache(maxsize=64)
def filled_rows(*fast: frozenset[int]) -> tuple[int, ...]:
    """[ONE_IMAGE + 1]: for 0 to ``ONE_IMAGE`` rows of an expert, the fewest, no fewer than those, that are fast with
    all of its weights (``Stack.fast_rows``)."""
    both = frozenset.intersection(*fast)
    most = (ONE_IMAGE // IMAGE + 1) * IMAGE
    return (0, *(min((m for m in both if m >= n), default=most) for n in range(1, ONE_IMAGE + 1)))
