"""Typed views of the arena's flat buffer: cache rows and states by the arena's address formula."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.config.geometry import ModelGeometry
from k3stack.errors import BugError
from k3stack.estimate.pools import BlockLayout

STORED = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""Dtypes of states and cache rows by the names that options have for them."""


def cache_dtypes(
    dtype: torch.dtype, state: str | None = None, row: str | None = None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """(state, window, row) dtypes for a compute dtype; by name where they are not the usual ones (bfloat16 keeps its
    recurrent state in float32)."""
    usual = torch.float32 if dtype == torch.bfloat16 else dtype
    return (usual if state is None else STORED[state]), dtype, (dtype if row is None else STORED[row])


class ArenaViews:
    """Strided views, one of each kind a layer; layers are counted within their kind from 0.

    ``buffer``: uint8 [bytes], the arena; whole blocks of it are used. Nothing is copied: writing to a view writes
    to the arena.
    """

    def __init__(
        self,
        buffer: Tensor,
        layout: BlockLayout,
        geometry: ModelGeometry,
        *,
        state_dtype: torch.dtype,
        window_dtype: torch.dtype,
        row_dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.geometry = geometry
        blocks = buffer.numel() // layout.block_bytes
        used = buffer[: blocks * layout.block_bytes]
        kda, mla = geometry.kda, geometry.mla
        width, taps = kda.width, kda.conv_kernel
        state_width = layout.recurrent_bytes // state_dtype.itemsize
        heads = state_width // (kda.head_dim * kda.head_dim)
        window_width = layout.conv_bytes // window_dtype.itemsize // (taps - 1)
        if heads * kda.head_dim * 3 != window_width or layout.row_bytes != mla.row_width * row_dtype.itemsize:
            raise BugError(
                f"the arena's layout {layout} does not hold states of {state_dtype}, windows of {window_dtype} and "
                f"rows of {row_dtype} of {width} channels and {mla.row_width} values"
            )
        self._recurrent = [
            _view(
                used,
                state_dtype,
                layout.state_offset(0, l),
                (blocks, heads, kda.head_dim, kda.head_dim),
                layout.block_bytes,
            )
            for l in range(layout.state_layers)
        ]
        self._window = [
            _view(
                used,
                window_dtype,
                layout.state_offset(0, l) + layout.recurrent_bytes,
                (blocks, taps - 1, window_width),
                layout.block_bytes,
            )
            for l in range(layout.state_layers)
        ]
        pages = used.numel() // layout.page_bytes if layout.page_bytes else 0
        self._rows = [
            _view(
                used,
                row_dtype,
                layout.row_offset(0, l, 0),
                (pages, layout.page_rows, mla.row_width),
                layout.page_bytes,
            )
            for l in range(layout.cache_layers)
        ]

    def rows(self, layer: int) -> Tensor:
        """Cache rows of the ``layer``-th MLA layer: [pages, page rows, latent + shared key]."""
        return self._rows[layer]

    def recurrent(self, layer: int) -> Tensor:
        """Recurrent states of the ``layer``-th KDA layer: [blocks, heads, K, V]."""
        return self._recurrent[layer]

    def window(self, layer: int) -> Tensor:
        """Convolution windows of the ``layer``-th KDA layer: [blocks, taps - 1, q | k | v channels], oldest first."""
        return self._window[layer]


def _view(buffer: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: int) -> Tensor:
    """``shape[0]`` items, ``stride`` bytes apart from byte ``offset`` on; the rest of the shape is contiguous."""
    size = dtype.itemsize
    if offset % size or stride % size or buffer.numel() % size:
        raise BugError(f"offset {offset} and stride {stride} are not multiples of the {size} bytes of {dtype}")
    inner = [1]
    for n in reversed(shape[2:]):
        inner.insert(0, inner[0] * n)
    return buffer.view(dtype).as_strided(shape, (stride // size, *inner), offset // size)
