"""The order that the GPU's kernels take MXFP4 weights in: every bit has its place, and comes back from it."""

from __future__ import annotations

import pytest
import torch

from k3stack.kernels.mxfp4 import tiles
from k3stack.kernels.mxfp4.reference import decode
from k3stack.kernels.mxfp4.weight import Mxfp4Weight, in_tiles


def drawn(experts: int, rows: int, columns: int, largest: int = tiles.LARGEST) -> Mxfp4Weight:
    generator = torch.Generator().manual_seed(rows + columns)
    packed = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, largest + 1, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return Mxfp4Weight(packed, scale)


def copy(w: Mxfp4Weight) -> Mxfp4Weight:
    return Mxfp4Weight(w.packed.clone(), w.scale.clone())


def test_stored_order_comes_back() -> None:
    """Every pair of codes and every scale byte, NaN's too."""
    packed = torch.arange(3 * 48 * 512).view(3, 48, 512).mul(7).add(1).to(torch.uint8)
    scale = torch.arange(3 * 48 * 32).view(3, 48, 32).to(torch.uint8)
    own = packed.clone(), scale.clone()
    tiles.lay_out(*own)
    assert not torch.equal(own[0], packed)
    assert not torch.equal(own[1], scale)
    for e in range(3):
        for mine, theirs in zip(tiles.stored(own[0][e], own[1][e]), (packed[e], scale[e]), strict=True):
            assert torch.equal(mine, theirs)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = drawn(5, 32, 128), drawn(5, 32, 128)
    tiles.lay_out(one.packed, one.scale)
    monkeypatch.setattr(tiles, "PIECE", one.packed[:2].numel())
    tiles.lay_out(other.packed, other.scale)
    assert torch.equal(one.packed, other.packed)


def test_a_thread_finds_its_codes_and_scales() -> None:
    """By the definition: where row 21, columns 264 to 271 are, how two shifts make bfloat16 of them, their scale."""
    stored = drawn(2, 64, 384)
    plain = decode(stored.packed[1], torch.full_like(stored.scale[1], 127))[21, 264:272]
    own = copy(stored)
    tiles.lay_out(own.packed, own.scale)
    strip, r, tile, word = 21 // 16, 21 % 16, 264 // 128, 264 % 128 // 8
    byte = strip * 16 * 192 + tile * 1024 + r * 64 + word * 4
    w = int.from_bytes(own.packed[1].flatten()[byte : byte + 4].numpy().tobytes(), "little")
    registers = [
        w & 0x81C081C0,
        (w << 3) & 0x81C081C0,
        (w << 6) & 0x01C001C0 | (w << 1) & 0x80008000,
        (w >> 3) & 0x01C001C0 | (w << 2) & 0x80008000,
    ]
    found = torch.tensor([h for p in registers for h in (p & 0xFFFF, p >> 16 & 0xFFFF)], dtype=torch.int32)
    value = (found << 16).view(torch.float32).double() * 2.0**126
    assert torch.equal(value, plain)
    q = 264 % 128 // 32
    at = strip * 16 * 12 + tile * 64 + (r % 8 * 4 + q) * 2 + r // 8
    assert own.scale[1].flatten()[at] == stored.scale[1, 21, 264 // 32]


def test_weights_are_the_same_in_tiles() -> None:
    stored = drawn(2, 32, 128), drawn(2, 128, 128)
    own = copy(stored[0]), copy(stored[1])
    for mine, given, theirs in zip(in_tiles(*own), own, stored, strict=True):
        assert mine.tiled
        assert mine.packed.data_ptr() == given.packed.data_ptr()
        assert mine.nbytes == theirs.nbytes
        for e in range(2):
            assert torch.equal(mine.plain(e, torch.float64), theirs.plain(e, torch.float64))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (drawn(2, 48, 128), drawn(2, 128, 128)),
        (drawn(2, 32, 96), drawn(2, 96, 128)),
        (drawn(2, 32, 128, 255), drawn(2, 128, 128)),
    ],
    ids=["rows", "columns", "scales"],
)
def test_what_does_not_fit_stays_as_it_is(first: Mxfp4Weight, second: Mxfp4Weight) -> None:
    kept = first.packed.clone(), first.scale.clone()
    w13, w2 = in_tiles(first, second)
    assert not w13.tiled
    assert not w2.tiled
    assert torch.equal(w13.packed, kept[0])
    assert torch.equal(w13.scale, kept[1])
