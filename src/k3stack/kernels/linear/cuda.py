"""Products on a GPU: plain weights; cuBLAS, or for few tokens kernels that stream them in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.linear import ring
from k3stack.kernels.linear import triton as skinny
from k3stack.kernels.linear import triton_one as one


def pack(weight: Tensor) -> Tensor:
    """The weight as it is."""
    return weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``reference.linear``."""
    y = _streamed(x, weight)
    return F.linear(x, weight) if y is None else y


def linear_plus(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """``linear`` plus ``y`` [T, out]; rounded once."""
    z = _streamed(x, weight, plus=y)
    return torch.addmm(y, x, weight.T) if z is None else z


def linear_both(x: Tensor, weight: Tensor, x2: Tensor, weight2: Tensor) -> Tensor:
    """``linear`` of the first two plus ``linear`` of the others."""
    if _streams(x) and _streams(x2):
        tile = skinny.tile_of(x.shape[0], *weight.shape)
        if tile is not None and skinny.fits_both(x, x2, tile):
            return skinny.linear_both(x, weight, x2, weight2, tile)
        form = ring.ring_of(x.shape[0], *weight.shape, x2.shape[1])
        if form is not None and ring.fits(x, weight, x2, weight2):
            return ring.product(x, weight, form, second=(x2, weight2))
    return linear_plus(x, weight, linear(x2, weight2))


def linear_apart(x: Tensor, weight: Tensor) -> Tensor | None:
    """fp32 [S, T, out] whose sum over S is ``linear`` before it is rounded, where it is quicker to leave the adding up
    to those that read it; else None."""
    form = ring.apart_of(x.shape[0], *weight.shape) if _streams(x) else None
    return ring.product(x, weight, form, apart=True) if form is not None and ring.fits(x, weight) else None


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, hidden], weight [E, hidden] in x's dtype -> fp32 [T, E]; bfloat16 products are summed and kept in fp32."""
    if x.dtype == torch.bfloat16 and x.device.type == "cuda":
        y = _streamed(x, weight, torch.float32)
        return torch.mm(x, weight.T, out_dtype=torch.float32) if y is None else y
    return F.linear(x.float(), weight.float())


def _streams(x: Tensor) -> bool:
    few = 0 < x.shape[0] <= skinny.MOST_TOKENS
    return few and x.dtype == torch.bfloat16 and x.is_cuda and x.stride(1) == 1


def _streamed(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None, plus: Tensor | None = None
) -> Tensor | None:
    """The product by the kernel that is quickest for so few tokens; None: that is cuBLAS."""
    if not _streams(x):
        return None
    if x.shape[0] == 1 and (form := one.form_of(*weight.shape)) is not None:
        return one.linear(x, weight, form, out_dtype, plus)
    if plus is None and (form := ring.ring_of(x.shape[0], *weight.shape)) is not None and ring.fits(x, weight):
        return ring.product(x, weight, form, out_dtype)
    tile = skinny.tile_of(x.shape[0], *weight.shape)
    return None if tile is None else skinny.linear(x, weight, tile, out_dtype, plus)
