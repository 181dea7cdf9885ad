"""How much memory reading a checkpoint takes besides the weights, counted in bytes lent, not in time."""

import threading

import pytest
import torch
from torch import Tensor

from k3stack.config.geometry import load_geometry
from k3stack.errors import BugError
from k3stack.kernels.linear.cpu import packs, unpack
from k3stack.models import stream_in as reader
from k3stack.models.checkpoint import find_tensors
from k3stack.models.load import load_model
from k3stack.models.network import Model
from k3stack.models.room import ALIGN, LARGE, Room
from tests.cpu.harness import GOLDEN

CPU = torch.device("cpu")
K3 = "k3_tiny_open"


def plain_weights(model: Model) -> list[Tensor]:
    return [unpack(w) for w in model.all_weights()]


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 4)])
def test_room_is_one_weight(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest weight plus what may be read beside it, however many threads; read in many pieces all the same."""
    if not packs(dtype, CPU):
        pytest.skip(f"this torch packs no weights in {dtype}")
    monkeypatch.setattr(reader, "LARGE", 4096)
    monkeypatch.setattr(reader, "AT_ONCE", 1 << 16)
    monkeypatch.setattr(reader, "PIECE", 1 << 14)
    geometry = load_geometry(GOLDEN / K3)
    model = Model(geometry, dtype=dtype, device=CPU)
    places = list(model.places())
    assert places and all(p.get().is_meta for p in places), "a plain weight has memory beside its packed form"
    largest = max(p.get().nbytes for p in places)
    read: list[int] = []
    room = reader.stream_in(model, found := find_tensors(GOLDEN / K3, geometry), threads=threads, on_bytes=read.append)
    assert 0 < room.peak <= room.size <= largest + (1 << 14) + 4096 + 2 * ALIGN
    assert sum(read) == found.nbytes
    model.finish()
    expected = plain_weights(load_model(GOLDEN / K3, dtype=dtype, progress=False))
    for ours, other in zip(plain_weights(model), expected, strict=True):
        assert torch.equal(ours, other)


def test_as_stored_needs_no_room() -> None:
    """Without packing and conversion bytes go from the file into the weight."""
    geometry = load_geometry(GOLDEN / K3)
    model = Model(geometry, dtype=torch.float64, device=CPU)
    assert not any(w.is_meta for w in model.all_weights())
    room = reader.stream_in(model, find_tensors(GOLDEN / K3, geometry), threads=2)
    assert room.size <= 2 * (reader.PIECE + ALIGN)


def test_lent_room_never_overlaps_and_comes_back() -> None:
    room = Room(8 * ALIGN)
    wrong: list[int] = []

    def use(number: int) -> None:
        for turn in range(200):
            with room.take(1 + (number * 7 + turn) % (8 * ALIGN)) as space:
                space.fill_(number)
                if not bool((space == number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert room.peak <= room.size == 8 * ALIGN
    with room.take(8 * ALIGN) as whole:
        assert whole.numel() == 8 * ALIGN
        with room.take(0) as nothing:
            assert nothing.numel() == 0


def test_large_pieces_keep_no_memory() -> None:
    """Written, given back, taken again: the system hands out fresh (zeroed) pages."""
    room = Room(LARGE)
    with room.take(LARGE) as space:
        space.fill_(7)
    with room.take(LARGE) as space:
        assert int(space[4096:-4096].max()) == 0


def test_more_than_the_room_is_refused() -> None:
    with pytest.raises(BugError, match="room"), Room(ALIGN).take(ALIGN + 1):
        pass
