"""Products on a CPU, in float32 and bfloat16 from weights packed into oneDNN's blocked layout.

Measured on a Zen 4 core, a packed weight [3336, 576] takes 0.44 ms for 4 rows and 0.80 ms for 16 in float32 (plain:
0.87 and 1.35), 0.31 and 0.49 ms in bfloat16 (plain: 0.51 and 0.73). One or two rows take longer than four, so fewer
rows are filled up to four.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 4
"""Rows below which a packed product is not faster; callers that group rows may fill their groups up to it."""

SMALL = 1 << 15
"""Values of a float32 weight whose plain product takes less time: 8 us for 16 rows of [32, 576], packed 20."""

TALL = 1 << 15
"""Rows from which on a bfloat16 weight is laid out as of a 1x1 convolution: blocks of 48 rows instead of 64, which are
read half as often for up to ``ONE_IMAGE`` tokens. Measured on two Zen 4 cores, [163840, 576] takes 8.4 ms instead of
9.2 for 16 tokens, 4.9 instead of 6.1 for 8. A call costs 10 us more."""
RESIDUES = 192
"""A multiple of all heights of blocks: weights whose rows leave the same rest fill their last block alike."""
SAMPLE = 21 * RESIDUES
TRIED_ROWS = (16, 1, 4, 6, 8, 10, 24, 32)

ONE_IMAGE = 32
IMAGE = 16
IMAGE_DIMS = 4


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out, in] in oneDNN's layout; the plain one is gone."""

    data: Tensor
    """As of a product, or [out, in, 1, 1] as of a 1x1 convolution (``stacked``)."""
    shape: tuple[int, int]
    dtype: torch.dtype
    owner: Tensor | None = None
    """The buffer that ``data`` is part of."""
    filling: int = 0
    """Bytes of the layout's own, where they are known: rows are filled up to whole blocks."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without ``filling``."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


Weight = Tensor | Packed


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``pack`` packs: on a CPU, where torch brings oneDNN, in the dtypes in which it is faster."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@cache
def tall(out: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a weight [out, width] is laid out as of a convolution (``TALL``): where oneDNN has one layout for any
    number of tokens, as a lower weight shows; for another one it would lay the weight out anew in every call."""
    needed = ("_reorder_convolution_weight", "_convolution_pointwise", "_get_mkldnn_serialized_md")
    if dtype != torch.bfloat16 or out < TALL or not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return False
    sample = torch.zeros(SAMPLE + out % RESIDUES, width, dtype=dtype)
    first, *others = (describe(reorder_convolution(sample, 1, rows)) for rows in TRIED_ROWS)
    return all(torch.equal(other, first) for other in others)


def describe(packed: Tensor) -> Tensor:
    """oneDNN's description of a packed weight's layout."""
    description: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    return description


def reorder_convolution(weight: Tensor, groups: int, rows: int) -> Tensor:
    """The weight [groups * out, in] as oneDNN wants it for a 1x1 convolution of ``rows`` tokens (above ``ONE_IMAGE``, a
    multiple of ``IMAGE``)."""
    out, width = weight.shape
    shape = [1, groups * width, 1, rows] if rows <= ONE_IMAGE else [rows // IMAGE, groups * width, 1, IMAGE]
    image = weight.contiguous().view(out, width, 1, 1)
    packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(image, [0, 0], [1, 1], [1, 1], groups, shape)
    return packed


def stays_plain(out: int, width: int, dtype: torch.dtype) -> bool:
    """Whether the product with a packed weight [out, width] would not take less time."""
    return dtype == torch.float32 and out * width <= SMALL


def pack(weight: Tensor) -> Weight:
    """The weight [out, in] as ``linear`` is fastest with it; the argument may be dropped afterwards, but for one that
    stays as it is."""
    if not packs(weight.dtype, weight.device):
        return weight
    if stays_plain(weight.shape[0], weight.shape[1], weight.dtype):
        return weight
    out, width = weight.shape
    if not tall(out, width, weight.dtype):
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), (out, width), weight.dtype)
    data = reorder_convolution(weight, 1, TRIED_ROWS[0])
    return Packed(data, (out, width), weight.dtype, filling=torch.ops.mkldnn._nbytes(data) - weight.nbytes)


def unpack(weight: Weight) -> Tensor:
    """The plain weight [out, in] (a copy, where it was packed)."""
    return weight if isinstance(weight, Tensor) else weight.data.to_dense().view(weight.shape)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype; see ``reference.linear``."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    rows = x.shape[0]
    if weight.data.dim() == IMAGE_DIMS:
        if not tall(*weight.shape, weight.dtype):
            return convolve(x, weight.data, 1)
        if rows > ONE_IMAGE:
            return torch.cat([linear(part, weight) for part in x.split(ONE_IMAGE)])
        return convolve(filled(x, ROWS) if rows < ROWS else x, weight.data, 1)[:rows]
    if rows < ROWS:
        return torch.ops.mkldnn._linear_pointwise(filled(x, ROWS), weight.data, None, "none", [], "")[:rows]
    return torch.ops.mkldnn._linear_pointwise(x, weight.data, None, "none", [], "")


def filled(x: Tensor, rows: int) -> Tensor:
    """x [T, in] with more rows, of any values, so that they are ``rows``."""
    return x.expand(rows, -1) if x.shape[0] == 1 else F.pad(x, (0, 0, 0, rows - x.shape[0]))


def convolve(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """x [T, groups * in] times a weight packed for a 1x1 convolution -> [T, groups * out]. Above ``ONE_IMAGE`` tokens
    fewer than a multiple of ``IMAGE`` are filled up: oneDNN takes more in the same layout only as several images."""
    rows = x.shape[0]
    images = 1 if rows <= ONE_IMAGE else -(-rows // IMAGE)
    each = rows if images == 1 else IMAGE
    if images * each != rows:
        x = filled(x, images * each)
    y = convolve_image(as_image(x.contiguous(), images, each, x.shape[1]), weight, groups)
    flat = y.permute(0, 2, 3, 1).view(images * each, -1)
    return flat if flat.shape[0] == rows else flat[:rows]


def as_image(x: Tensor, images: int, rows: int, width: int) -> Tensor:
    """x, contiguous -> [images, width, 1, rows], channels last, of the same memory."""
    return x.as_strided((images, width, 1, rows), (rows * width, 1, rows * width, width))


def convolve_image(image: Tensor, weight: Tensor, groups: int) -> Tensor:
    """image [images, groups * in, 1, rows], channels last -> [images, groups * out, 1, rows], channels last."""
    y: Tensor = torch.ops.mkldnn._convolution_pointwise(
        image, weight, None, [0, 0], [1, 1], [1, 1], groups, "none", [], ""
    )
    return y


def router_logits(x: Tensor, weight: Weight) -> Tensor:
    """x [T, hidden], the router's weight [E, hidden] in the wide dtype -> [T, E] in the wide dtype."""
    return linear(x.to(weight.dtype), weight)
