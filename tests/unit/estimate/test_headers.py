"""Headers on disk: totals by kind, agreement with the config, and broken files named."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from k3stack.config.geometry import load_geometry
from k3stack.errors import CheckpointError
from k3stack.estimate.headers import has_files, header_totals

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("name", ["k3_tiny_open", "k3_tiny_8h_open", "kimi_linear_tiny_open"])
def test_golden_checkpoints_are_as_their_config_says(name: str) -> None:
    totals = header_totals(GOLDEN / name, load_geometry(GOLDEN / name))
    assert not totals.unknown and totals.tensors == totals.expected_tensors
    assert totals.by_group["routed_experts"] > 0
    if name.startswith("k3"):
        assert totals.as_expected and "as the config says" in totals.sentence()


def test_a_missing_shard_and_a_stranger_show(tmp_path: Path) -> None:
    for file in (GOLDEN / "k3_tiny_open").iterdir():
        shutil.copy(file, tmp_path)
    geometry = load_geometry(tmp_path)
    whole = header_totals(tmp_path, geometry)
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    header = json.dumps({"model.extra.bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "extra.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    less = header_totals(tmp_path, geometry)
    assert less.tensors < whole.tensors and less.unknown == ("model.extra.bias",)
    assert "the config says" in less.sentence() and "model.extra.bias" in less.sentence()


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{", b"\xff" * 16, struct.pack("<Q", 6) + b'{"a":1'])
def test_broken_headers_name_the_file(tmp_path: Path, content: bytes) -> None:
    shutil.copy(GOLDEN / "k3_tiny_open" / "config.json", tmp_path)
    assert not has_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert has_files(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        header_totals(tmp_path, load_geometry(tmp_path))
