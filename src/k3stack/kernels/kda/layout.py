"""How the chunks of several sequences are cut into equal tiles for the chunked form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from k3stack.kernels.upload import upload

SUB = 16
"""Tokens of a sub-chunk: within it decays are factored, between them only differences are exponentiated."""
TILE = 64


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Tiles of ``tile`` tokens, ordered by step and then by sequence, so that each step is one batched product.

    The last tile of a sequence is filled with tokens whose key, value, beta and log decay are zero: they change
    nothing.
    """

    tile: int
    blocks: tuple[int, ...]
    """State blocks in the order of ``active`` (longest sequence first)."""
    active: tuple[int, ...]
    """Sequences that take part in step s: the first ``active[s]`` of the order."""
    tokens: Tensor | None
    """int64 [n]: index of each token among the step's tokens; None: they are all of them, in order."""
    places: Tensor | None
    """int64 [n]: its place among ``tiles * tile`` slots; None: place = index, with no filling."""

    @property
    def tiles(self) -> int:
        return sum(self.active)

    def to(self, device: torch.device) -> TileLayout:
        """With its indices on ``device``."""
        if self.tokens is None or self.places is None:
            return self
        return replace(self, tokens=upload(self.tokens, device), places=upload(self.places, device))


def tile_layout(starts: list[int], counts: list[int], blocks: list[int], total: int) -> TileLayout:
    """Lay out sequences of ``counts`` tokens that begin at ``starts`` among ``total`` tokens of the step."""
    longest = max(counts)
    tile = min(TILE, -(-longest // SUB) * SUB)
    order = sorted(range(len(counts)), key=lambda i: -counts[i])
    steps = -(-longest // tile)
    active = tuple(sum(1 for i in order if counts[i] > s * tile) for s in range(steps))
    in_order = tuple(blocks[i] for i in order)
    if len(counts) == 1 and counts[0] == total and total % tile == 0:
        return TileLayout(tile, in_order, active, None, None)
    first = [0]
    for n in active:
        first.append(first[-1] + n)
    tokens, places = [], []
    for rank, i in enumerate(order):
        index = torch.arange(counts[i])
        tokens.append(index + starts[i])
        tile_of = torch.tensor(first)[index // tile] + rank
        places.append(tile_of * tile + index % tile)
    return TileLayout(tile, in_order, active, torch.cat(tokens), torch.cat(places))


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """Tiles of ``tile`` tokens, sequence after sequence; a sequence's last tile may hold fewer."""

    tile: int
    tiles: int
    per_tile: Tensor
    """int64 [4, tiles]: first token among the step's, tokens, the sequence's first token, its state block."""
    per_sequence: Tensor
    """int64 [5, sequences]: first tile, tiles, first token, last token, state block."""
    kept: dict[Any, Any] = field(default_factory=dict, compare=False)
    """What kernels keep from one layer of the step to the next."""


def chunk_tiles(starts: list[int], counts: list[int], blocks: list[int], device: torch.device) -> ChunkTiles:
    """Tiles of sequences of ``counts`` tokens that begin at ``starts``, with their indices on ``device``."""
    tiles = [-(-n // TILE) for n in counts]
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(tiles))
    first_tile = torch.tensor([0, *tiles[:-1]]).cumsum(0)
    begin, count, block = (torch.tensor(values)[sequence] for values in (starts, counts, blocks))
    offset = (torch.arange(len(sequence)) - first_tile[sequence]) * TILE
    per_tile = torch.stack([begin + offset, (count - offset).clamp(max=TILE), begin, block])
    last = [a + n - 1 for a, n in zip(starts, counts, strict=True)]
    per_sequence = torch.stack([first_tile, *map(torch.tensor, (tiles, starts, last, blocks))])
    return ChunkTiles(TILE, len(sequence), upload(per_tile, device), upload(per_sequence, device))
