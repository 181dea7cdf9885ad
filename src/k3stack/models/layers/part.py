"""What all parts of a model share: their tensors, and where a checkpoint's tensors go in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3stack.kernels.linear.cpu import Packed, Weight
from k3stack.kernels.linear.stacked import Stack
from k3stack.kernels.mxfp4.weight import Mxfp4Weight


@dataclass(frozen=True, slots=True)
class Slot:
    """Destination of one checkpoint tensor.

    ``dest`` has the compute (or wide) dtype and may be a slice of a fused weight. ``fit`` brings the stored shape to
    dest's (None: they are equal); values are converted exactly or rounded once to dest's dtype.
    """

    dest: Tensor
    fit: Callable[[Tensor], Tensor] | None = None


class Part:
    """A layer or block: plain attributes that are tensors, and other parts."""

    def slots(self) -> dict[str, Slot]:
        """Destination of each tensor kind, experts left out."""
        raise NotImplementedError

    def finish(self) -> None:
        """Compute what is derived from weights and lay them out for the product, once they are all in place."""

    def all_weights(self) -> Iterator[Weight]:
        """All weights held, plain and packed, sub-parts included."""
        for value in vars(self).values():
            yield from _weights(value)


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
    return torch.empty(shape, dtype=dtype, device=device)
