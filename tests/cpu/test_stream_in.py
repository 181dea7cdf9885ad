"""Reading into the weights' own memory and making the weights there, whatever the sizes of pieces."""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.errors import BugError, CheckpointError
from k3stack.kernels.linear import blocked, stacked
from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear.cpu import Packed, packs, unpack
from k3stack.models import checkpoint, files, landing, prepare, staging, stream_in
from k3stack.models.checkpoint import find_tensors
from k3stack.models.landing import Stored, land
from k3stack.models.layers.ffn import MoeFfn
from k3stack.models.load import load_model
from k3stack.models.network import Model
from tests.cpu.harness import GOLDEN

CPU = torch.device("cpu")
Content = dict[tuple[Path, int], bytes]
K3 = "k3_tiny_open"
PACKED = [d for d in (torch.float32, torch.bfloat16) if packs(d, CPU)]


def plain_weights(model: Model) -> list[Tensor]:
    return [unpack(w) for w in model.all_weights()]


def load(folder: Path, dtype: torch.dtype, threads: int = 2) -> Model:
    geometry = load_geometry(folder)
    model = Model(geometry, dtype=dtype, device=CPU)
    landed = land(model, find_tensors(folder, geometry))
    stream_in.stream_in(landed, threads=threads)
    prepare.prepare(landed.unfinished, threads=threads)
    model.finish()
    return model


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 4), (torch.float64, 2)])
def test_pieces_do_not_matter(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plain_weights(load(GOLDEN / K3, dtype))
    monkeypatch.setattr(files, "PIECE", 4096)
    monkeypatch.setattr(stream_in, "RUN_BYTES", 5000)
    monkeypatch.setattr(prepare, "PIECE", 4096)
    for ours, other in zip(plain_weights(load(GOLDEN / K3, dtype, threads)), whole, strict=True):
        assert torch.equal(ours, other)


@pytest.fixture(params=["cached", "direct", "refused at once", "refused later", "no direct reading"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reading: through the page cache, past it, and past it where the file system says that this is not possible."""
    if request.param == "no direct reading":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    elif request.param != "cached":
        monkeypatch.setattr(files.Files, "directly", lambda self, file, at: True)
    if not request.param.startswith("refused"):
        return
    preadv, count = os.preadv, 0

    def refuse(fd: int, buffers: list[memoryview], at: int, *flags: int) -> int:
        nonlocal count
        count += 1
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and (count > 5 or request.param == "refused at once"):
            raise OSError(errno.EINVAL, "not aligned")
        return preadv(fd, buffers, at, *flags)

    monkeypatch.setattr(os, "preadv", refuse)


def read_little(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Have the system return ``most`` bytes of a call, and whole blocks of them past the page cache."""
    preadv = os.preadv

    def short(fd: int, buffers: list[memoryview], at: int, *flags: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0)
        return preadv(fd, [buffers[0][: -(-most // 4096) * 4096 if direct else most]], at, *flags)

    monkeypatch.setattr(os, "preadv", short)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("most", [None, 3001])
def test_ways_of_reading_do_not_matter(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 64 << 10)
    monkeypatch.setattr(files, "MOST_READS", 5)
    monkeypatch.setattr(staging, "COPIED", 10_000)
    if most is not None:
        read_little(monkeypatch, most)
    landed = landed_bytes(2)
    assert sum(map(len, landed.values())) > 3_000_000
    for (file, begin), content in landed.items():
        with file.open("rb") as f:
            f.seek(begin)
            assert f.read(len(content)) == content


def landed_bytes(threads: int, folder: Path = GOLDEN / K3, after_headers: Callable[[], object] = int) -> Content:
    """What is in memory when all has been read, by file and place in it."""
    geometry = load_geometry(folder)
    landed = land(Model(geometry, dtype=torch.bfloat16, device=CPU), find_tensors(folder, geometry))
    after_headers()
    stream_in.stream_in(landed, threads=threads)
    return {(r.file, r.begin): r.dest.numpy().tobytes() for x in landed.landings for r in x.reads()}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("left", [0, 5000, "whole blocks"])
def test_file_that_ends_while_being_read(left: int | str, tmp_path: Path) -> None:
    folder = tmp_path / K3
    shutil.copytree(GOLDEN / K3, folder)
    file = sorted(folder.glob("*.safetensors"))[-1]
    cut = max(checkpoint.read_header(file), key=lambda e: e.nbytes)
    size = cut.offset + left if isinstance(left, int) else (cut.offset // 4096 + 2) * 4096
    missing = cut.offset + cut.nbytes - size
    assert missing > 0
    expected = f"{file.name}: tensor {cut.name}: the file ended {missing:,} B early"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        landed_bytes(1, folder, lambda: os.truncate(file, size))


@pytest.mark.parametrize("threads", [1, 3])
def test_errors_of_any_thread_end_reading(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.Files, "directly", lambda self, file, at: True)
    monkeypatch.setattr(files, "PIECE", 4096)

    def fail(*_: object) -> None:
        raise MemoryError("no more pages")

    for owner, name in ((staging, "_copy"), (files.Files, "read_directly")):
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no more pages"):
            patch.setattr(owner, name, fail)
            landed_bytes(threads)


@pytest.mark.parametrize(
    ("answer", "directly"), [(None, False), (errno.EAGAIN, True), (errno.EOPNOTSUPP, False), (errno.EIO, None)]
)
def test_page_cache_is_passed_by_for_what_is_not_in_it(
    answer: int | None, directly: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where the system says so."""
    (file := tmp_path / "file").write_bytes(bytes(10_000))

    def preadv(fd: int, buffers: list[bytearray], at: int, flags: int) -> int:
        if answer is not None:
            raise OSError(answer, "")
        return 1

    with files.Files({file}, None) as opened:
        if opened._past_cache(file) is None:
            pytest.skip("no direct reading here")
        monkeypatch.setattr(os, "preadv", preadv)
        if directly is None:
            with pytest.raises(OSError, match="5"):
                opened.directly(file, 5000)
        else:
            assert opened.directly(file, 5000) == directly


@pytest.mark.parametrize("dtype", PACKED)
def test_without_known_layouts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights cannot be laid out in place they are packed as a whole, to the same values."""
    expected = plain_weights(load(GOLDEN / K3, dtype))
    caches = (blocked.blocked_linear, stacked._layout)
    for module in (blocked, stacked):
        monkeypatch.setattr(module, "library", lambda: None)
    for cache in caches:
        cache.cache_clear()
    try:
        model = load(GOLDEN / K3, dtype)
    finally:
        for cache in caches:
            cache.cache_clear()
    assert all(w.owner is None for w in model.all_weights() if isinstance(w, Packed))
    for ours, other in zip(plain_weights(model), expected, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_have_memory_once(dtype: torch.dtype) -> None:
    """What is read lies in the weight's own memory, behind whatever has been made when it is taken."""
    geometry = load_geometry(GOLDEN / K3)
    model = Model(geometry, dtype=dtype, device=CPU)
    found = find_tensors(GOLDEN / K3, geometry)
    landed = land(model, found)
    assert landed.stored == found.nbytes
    for x in landed.landings:
        itemsize, width = x.dtype.itemsize, x.shape[1]
        begin = x.memory.data_ptr()
        for part in x.parts:
            start = part.raw.data_ptr() - begin
            assert 0 <= start <= x.memory.numel() - part.raw.numel()
            for row in range(part.rows):
                taken = part.raw.numel() * (row + 1) // part.rows
                assert (part.first + row + 1) * width * itemsize <= start + taken + x.memory.numel() - _plain_bytes(x)
    read: list[int] = []
    stream_in.stream_in(landed, threads=2, on_bytes=read.append)
    assert sum(read) == found.nbytes


def _plain_bytes(x: landing.Landing) -> int:
    return x.shape[0] * x.shape[1] * x.dtype.itemsize


def test_as_stored_is_ready_when_read() -> None:
    """bfloat16 that no product takes, and float32 that stays float32."""
    geometry = load_geometry(GOLDEN / K3)
    model = Model(geometry, dtype=torch.bfloat16, device=CPU)
    landed = land(model, find_tensors(GOLDEN / K3, geometry))
    embed = [x for x in landed.landings if x.memory.data_ptr() == model.embed.data_ptr()]
    assert len(embed) == 1
    assert id(embed[0]) not in {id(x) for x in landed.unfinished}


def test_rows_that_do_not_fill_the_weight_are_refused() -> None:
    geometry = load_geometry(GOLDEN / K3)
    found = find_tensors(GOLDEN / K3, geometry)
    item = next((pair,) for pair in found.tensors if pair[0].kind == "embed")
    rows, width = item[0][1].shape
    with pytest.raises(BugError, match="rows read"):
        landing.Landing((rows + 1, width), torch.float32, [Stored(0, rows, item)]).settle(None)


def test_reading_through_a_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a GPU: every tensor is converted on its way. The GPU's memory is this machine's here."""
    geometry = load_geometry(GOLDEN / K3)
    expected = load(GOLDEN / K3, torch.float64)
    model = Model(geometry, dtype=torch.float64, device=CPU)
    found = find_tensors(GOLDEN / K3, geometry)
    monkeypatch.setattr(stream_in, "STAGE", 1000)
    others = [landing.Convert(slot, item) for slot, item in landing._slots(model, found)]
    read: list[int] = []
    stream_in.stream_in(landing.Landed([], others), threads=3, on_bytes=read.append)
    model.finish()
    assert sum(read) == found.nbytes
    for ours, other in zip(plain_weights(model), plain_weights(expected), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("shape", [(130, 320), (96, 448), (1030, 64), (64, 768), (linear.TALL + 70, 32)])
def test_blocks_are_onednns(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    layout = blocked.blocked_linear(*shape, dtype)
    if layout is None:
        pytest.skip("this processor's layout is another one")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    filled = layout.nbytes // (shape[1] * dtype.itemsize)
    source = blocked.scratch(filled, shape[1], dtype)
    source[: shape[0]], source[shape[0] :] = weight, 0
    for a in range(0, filled, layout.rows):
        layout.write(source[a : a + layout.rows], memory, a)
    ours, theirs = layout.weight(memory), linear.pack(weight)
    assert isinstance(theirs, Packed)
    assert torch.equal(linear.describe(ours.data), linear.describe(theirs.data))
    assert torch.equal(unpack(ours), weight)
    assert ours.nbytes + ours.filling == layout.nbytes
    for rows in (1, 4, 40):
        x = torch.randn(rows, shape[1]).to(dtype)
        found = linear.linear(x, ours)
        assert torch.equal(found, linear.linear(x, theirs))
        torch.testing.assert_close(found.float(), x.float() @ weight.float().T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", PACKED)
def test_description_of_many_experts(dtype: torch.dtype) -> None:
    """Told from those of two and three."""
    layout = stacked._layout(11, 96, 64, dtype, torch.get_num_threads())
    if layout is None:
        pytest.skip("this processor has no stacks")
    whole = linear.reorder_convolution(torch.zeros(11 * 96, 64, dtype=dtype), 11, 2)
    assert torch.equal(layout.group, linear.describe(whole))


@pytest.mark.parametrize("dtype", PACKED)
def test_experts_rows_over_several_blocks(dtype: torch.dtype, tmp_path: Path) -> None:
    """Wide enough for blocks that end in the middle of gate and up, from MXFP4 and from bfloat16."""
    from benchmarks.make_checkpoint import quarter_kimi_linear, small_k3, write_checkpoint

    configs: list[dict[str, Any]] = [quarter_kimi_linear(experts=4), small_k3()]
    for config in configs:
        text = config.get("text_config", config)
        text.update(num_hidden_layers=4, vocab_size=700, hidden_size=128, moe_intermediate_size=96, num_experts=4)
        text.update(intermediate_size=160, num_experts_per_token=2)
        text["linear_attn_config"].update(kda_layers=[1, 2, 3], full_attn_layers=[4])
        if "routed_expert_hidden_size" in text:
            text["routed_expert_hidden_size"] = 64
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_checkpoint(folder, config)
        model = load_model(folder, dtype=dtype, progress=False)
        wide = load_model(folder, dtype=torch.float64, progress=False)
        for ours, other in zip(plain_weights(model), plain_weights(wide), strict=True):
            if ours.ndim == 2:
                assert torch.equal(ours.double(), other)
        _experts_are_the_files(folder, model, wide.geometry)


def _experts_are_the_files(folder: Path, model: Model, geometry: ModelGeometry) -> None:
    if geometry.moe.mxfp4:
        return
    placed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    layer = geometry.dense_layers
    ffn = model.layers[layer].ffn
    assert isinstance(ffn, MoeFfn)
    for name, shard in placed.items():
        if f"layers.{layer}." in name and ".experts.1.w" in name:
            with safe_open(folder / shard, "pt") as file:
                stored = file.get_tensor(name).to(model.dtype)
            own = unpack((ffn.w2 if ".w2." in name else ffn.w13)[1])
            inner = geometry.moe.expert_width
            part = own if ".w2." in name else own[:inner] if ".w1." in name else own[inner:]
            assert torch.equal(part, stored)


def test_loading_within_inference_mode() -> None:
    folder = GOLDEN / K3
    expected = plain_weights(load_model(folder, dtype="float32", progress=False))
    with torch.inference_mode():
        model = load_model(folder, dtype="float32", progress=False)
    assert not any(w.is_inference() for w in model.all_weights() if isinstance(w, Tensor))
    for ours, other in zip(plain_weights(model), expected, strict=True):
        assert torch.equal(ours, other)
