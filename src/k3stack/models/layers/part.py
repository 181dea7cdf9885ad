"""What all parts of a model share: their tensors, and where a checkpoint's tensors go in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3stack.kernels.linear.blocked import Blocked, home
from k3stack.kernels.linear.cpu import Packed, Weight, packs
from k3stack.kernels.linear.stacked import Stack, Stacker
from k3stack.kernels.mxfp4.weight import Mxfp4Weight
from k3stack.kernels.select import Kernels


@dataclass(frozen=True, slots=True)
class Slot:
    """Destination of one checkpoint tensor.

    ``dest`` has the compute (or wide) dtype and may be a slice of a fused weight. ``fit`` brings the stored shape to
    dest's (None: they are equal); values are converted exactly or rounded once to dest's dtype.
    """

    dest: Tensor
    fit: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part keeps a weight: an attribute, or an item of a list."""

    holder: Part | list[Weight]
    key: str | int
    packer: Callable[[Tensor], Weight]
    home: Callable[[], tuple[Blocked, Tensor] | None]
    """Layout and memory (uint8) for who packs the weight block by block; None: only ``pack`` can."""

    def get(self) -> Weight:
        if isinstance(self.holder, Part):
            weight: Weight = getattr(self.holder, str(self.key))
            return weight
        return self.holder[int(self.key)]

    def put(self, weight: Weight) -> None:
        if isinstance(self.holder, Part):
            setattr(self.holder, str(self.key), weight)
        else:
            self.holder[int(self.key)] = weight

    def pack(self, weight: Tensor) -> None:
        """Put a plain weight here, laid out for the product; its memory may be used again afterwards."""
        self.put(self.packer(weight))


class Part:
    """A layer or block: plain attributes that are tensors, and other parts."""

    PRODUCTS: tuple[str, ...] = ()
    """Attributes made by ``matrix`` (or lists of such weights, or None)."""
    kernels: Kernels
    stackers: dict[str, Stacker]
    """Of the attributes that are lists."""

    def slots(self) -> dict[str, Slot]:
        """Destination of each tensor kind, experts left out."""
        raise NotImplementedError

    def finish(self) -> None:
        """Compute what is derived from weights, once they are all in place."""

    def places(self) -> Iterator[Place]:
        """Of all weights that ``matrix`` made, sub-parts included."""
        for name in self.PRODUCTS:
            value = getattr(self, name, None)
            if isinstance(value, list):
                stacker = self.stackers[name]
                yield from (
                    Place(value, e, partial(stacker.pack, e), partial(stacker.home, e)) for e in range(len(value))
                )
            elif value is not None:
                yield Place(self, name, self.kernels.pack, partial(_home, value))
        for value in vars(self).values():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Part):
                    yield from part.places()

    def all_weights(self) -> Iterator[Weight]:
        """All weights held, plain and packed, sub-parts included."""
        for value in vars(self).values():
            yield from _weights(value)


def _home(weight: Tensor) -> tuple[Blocked, Tensor] | None:
    return home(weight.shape[0], weight.shape[1], weight.dtype)


def _weights(value: Any) -> Iterator[Weight]:
    if isinstance(value, (Tensor, Packed)):
        yield value
    elif isinstance(value, Mxfp4Weight):
        yield value.packed
        yield value.scale
    elif isinstance(value, Part):
        yield from value.all_weights()
    elif isinstance(value, (list, tuple, Stack)):
        for item in value:
            yield from _weights(item)


def first(n: int) -> Callable[[Tensor], Tensor]:
    """The first ``n`` values of a tensor, flattened (K3 pads A_log; Kimi-Linear shapes it [1, 1, n, 1])."""
    return lambda t: t.reshape(-1)[:n]


def taps_first(t: Tensor) -> Tensor:
    """A depthwise convolution's weight [channels, 1, taps] as [taps, channels]."""
    return t.squeeze(1).T


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a weight, uninitialised."""
    return torch.empty(shape, dtype=dtype, device=device)


def matrix(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight [out, in] for ``kernels.linear``, uninitialised.

    Where such weights are packed it takes no memory (device 'meta'): memory is taken for the packed form, and values
    are read and laid out there (``models.landing``, ``Model.materialise``).
    """
    return torch.empty(shape, dtype=dtype, device="meta" if packs(dtype, device) else device)
