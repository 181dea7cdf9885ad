"""Reading checkpoints: exact values in every dtype, every fault named, memory and progress."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3stack.errors import CheckpointError, UserError
from k3stack.kernels.linear.cpu import unpack
from k3stack.models.layers.ffn import MoeFfn
from k3stack.models.layers.kda import KdaAttention
from k3stack.models.load import load_model
from tests.cpu.harness import GOLDEN, NAMES, TestArena

K3, LINEAR = "k3_tiny_open", "kimi_linear_tiny_open"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(K3, tmp_path)


def copied(name: str, to: Path) -> Path:
    target = to / name
    shutil.copytree(GOLDEN / name, target, ignore=shutil.ignore_patterns("golden*"))
    return target


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw.get("text_config", raw))
    (folder / "config.json").write_text(json.dumps(raw))


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = folder / "model.safetensors.index.json"
    raw = json.loads(file.read_text())
    change(raw["weight_map"])
    file.write_text(json.dumps(raw))


def edit_shard(folder: Path, number: int, change: Callable[[Tensors], object], *, index: bool = True) -> Path:
    """Rewrite one shard; the index follows unless told otherwise."""
    file = sorted(folder.glob("*.safetensors"))[number]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    if index:

        def follow(placed: dict[str, str]) -> None:
            for name in [n for n, f in placed.items() if f == file.name and n not in tensors]:
                del placed[name]
            placed.update(dict.fromkeys(tensors, file.name))

        edit_index(folder, follow)
    return file


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, dtype="float32", progress=False)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_values_arrive_exactly(name: str, dtype: str) -> None:
    files: Tensors = {}
    for file in (GOLDEN / name).glob("*.safetensors"):
        files |= load_file(file)
    net = load_model(GOLDEN / name, dtype=dtype, progress=False)
    prefix = net.geometry.prefix + "model.layers.1."
    kda = net.layers[1].attention
    assert isinstance(kda, KdaAttention)
    width = kda.width
    key = files[f"{prefix}self_attn.k_proj.weight"]
    assert torch.equal(unpack(kda.w_in)[width : 2 * width], key.to(net.dtype))
    conv = files[f"{prefix}self_attn.v_conv1d.weight"]
    assert torch.equal(kda.conv[:, 2 * width :], conv[:, 0].T.to(kda.conv.dtype))
    a_log = files[f"{prefix}self_attn.A_log"].flatten()[: kda.heads]
    assert torch.equal(kda.exp_a, a_log.to(kda.exp_a.dtype).exp())
    assert torch.equal(unpack(net.lm_head), files[f"{net.geometry.prefix}lm_head.weight"].to(net.dtype))
    ffn = net.layers[1].ffn
    assert isinstance(ffn, MoeFfn)
    if not net.geometry.moe.mxfp4:
        w3 = files[f"{prefix}block_sparse_moe.experts.5.w3.weight"]
        assert torch.equal(unpack(ffn.w13[5])[net.geometry.moe.expert_width :], w3.to(net.dtype))


def test_one_file_without_index(tmp_path: Path) -> None:
    split, whole = load_model(GOLDEN / LINEAR, dtype="float32", progress=False), copied(LINEAR, tmp_path)
    tensors: Tensors = {}
    for file in whole.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (whole / "model.safetensors.index.json").unlink()
    save_file(tensors, whole / "model.safetensors")
    net = load_model(whole, dtype="float32", progress=False)
    for mine, theirs in zip(net.all_weights(), split.all_weights(), strict=True):
        assert torch.equal(unpack(mine), unpack(theirs))


def test_side_tensors_of_kimi_linear_in_either_dtype(tmp_path: Path) -> None:
    folder = copied(LINEAR, tmp_path)

    def flip(tensors: Tensors) -> None:
        for name, t in tensors.items():
            if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
                tensors[name] = t.bfloat16()
            if name.endswith(("o_norm.weight", "conv1d.weight")):
                tensors[name] = t.float()

    edit_shard(folder, 0, flip)
    assert load_model(folder, dtype="float32", progress=False).weight_bytes > 0


def test_missing(folder: Path) -> None:
    name = "language_model.model.layers.2.self_attn.dt_bias"
    edit_shard(folder, 0, lambda t: t.pop(name))
    refused(folder, name, "missing", "[128] F32")


def test_missing_scale(folder: Path) -> None:
    name = "language_model.model.layers.6.block_sparse_moe.experts.3.w2.weight_scale"
    edit_shard(folder, 1, lambda t: t.pop(name))
    refused(folder, name, "missing", "[64, 2] U8")


def test_unknown(folder: Path) -> None:
    file = edit_shard(folder, 1, lambda t: t.update({"language_model.model.layers.7.extra": torch.ones(3)}))
    refused(folder, file.name, "language_model.model.layers.7.extra", "unknown", "F32 [3]")


def test_misshapen(folder: Path) -> None:
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    file = edit_shard(folder, 0, lambda t: t.update({name: t[name][:-1].contiguous()}))
    refused(folder, file.name, name, "[128, 96]", "[127, 96]")


def test_wrong_dtype(folder: Path) -> None:
    name = "language_model.model.layers.0.self_attn.A_log"
    file = edit_shard(folder, 0, lambda t: t.update({name: t[name].bfloat16()}))
    refused(folder, file.name, name, "F32", "BF16")


@pytest.mark.parametrize("cut", [1, 100_000])
def test_truncated_file(folder: Path, cut: int) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    refused(folder, file.name, "truncated", "tensor language_model.model.layers.", "expected bytes up to")


def test_truncated_in_the_header(folder: Path) -> None:
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    refused(folder, file.name, "truncated", "200 B")


def test_header_that_is_not_json(folder: Path) -> None:
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(struct.pack("<Q", 4) + b"{{{{")
    refused(folder, file.name, "not valid JSON")


def test_index_names_an_absent_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "index.json", "model-00002-of-00003.safetensors", "no such file")


def test_index_names_a_tensor_that_the_shard_lacks(folder: Path) -> None:
    name = "language_model.lm_head.weight"
    file = edit_shard(folder, 2, lambda t: t.pop(name), index=False)
    refused(folder, file.name, name, "not found in the file")


def test_duplicate_tensor(folder: Path) -> None:
    name = "language_model.model.norm.weight"
    moved = load_file(folder / "model-00003-of-00003.safetensors")[name]
    edit_shard(folder, 0, lambda t: t.update({name: moved}))
    edit_index(folder, lambda placed: placed.update({name: "model-00001-of-00003.safetensors"}))
    refused(folder, name, "duplicate", "model-00001-of-00003.safetensors")


def test_duplicate_name_in_one_header(folder: Path) -> None:
    file = folder / "model-00003-of-00003.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].rstrip()
    twice = header[:-1] + b',"language_model.model.norm.weight":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}'
    file.write_bytes(struct.pack("<Q", len(twice)) + twice + raw[8 + length :])
    refused(folder, file.name, "language_model.model.norm.weight", "duplicate")


@pytest.mark.parametrize("suffix", ["weight_zero_point", "weight_scale_inv", "input_global_scale"])
def test_unknown_quantisation_in_the_files(folder: Path, suffix: str) -> None:
    name = f"language_model.model.layers.5.self_attn.q_proj.{suffix}"
    file = edit_shard(folder, 1, lambda t: t.update({name: torch.ones(1)}))
    refused(folder, file.name, name, "unknown quantisation")


def test_unknown_quantisation_in_the_config(folder: Path) -> None:
    edit_config(folder, lambda c: c["quantization_config"].update(format="nvfp4-pack-quantized"))
    refused(folder, "config.json", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


def test_config_without_quantisation_over_packed_files(folder: Path) -> None:
    edit_config(folder, lambda c: c.pop("quantization_config"))
    refused(folder, "safetensors", "weight_packed", "no quantization_config")


def test_config_with_quantisation_over_plain_files(tmp_path: Path) -> None:
    folder = copied(LINEAR, tmp_path)
    quant = json.loads((GOLDEN / K3 / "config.json").read_text())["text_config"]["quantization_config"]
    edit_config(folder, lambda c: c.update(quantization_config=quant))
    refused(folder, "experts.0.w1.weight", "mxfp4-pack-quantized", "plain BF16")


def test_config_with_other_sizes(folder: Path) -> None:
    edit_config(folder, lambda c: c.update(moe_intermediate_size=128))
    refused(folder, "shared_experts.gate_proj.weight", "[256, 96]", "[128, 96]")


def test_config_with_fewer_experts(tmp_path: Path) -> None:
    folder = copied(LINEAR, tmp_path)

    def fewer(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".gate." in n]:
            tensors[name] = tensors[name][:8].contiguous()

    edit_config(folder, lambda c: c.update(num_experts=8))
    edit_shard(folder, 0, fewer)
    edit_shard(folder, 1, fewer)
    refused(folder, "experts.", "num_experts 8", "expert 15")


def test_config_with_fewer_layers(folder: Path) -> None:
    def fewer(c: dict[str, Any]) -> None:
        c["num_hidden_layers"] = 9
        c["linear_attn_config"]["full_attn_layers"] = [4, 8]

    edit_config(folder, fewer)
    refused(folder, "num_hidden_layers 9", "layer 9")


def test_vision_tensors_are_skipped_and_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    vision = {"vision_tower.patch_embed.proj.weight": torch.ones(4, 2), "mm_projector.proj.0.weight": torch.ones(2)}
    edit_shard(folder, 2, lambda t: t.update(vision))
    with caplog.at_level(logging.INFO, logger="k3stack"):
        net = load_model(folder, dtype="bfloat16", progress=False)
    assert [r.message for r in caplog.records if "vision" in r.message] == [
        "skipped 2 tensors (0.00 GB) of the vision part"
    ]
    assert net.weight_bytes == load_model(GOLDEN / K3, dtype="bfloat16", progress=False).weight_bytes


def test_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "not found")
    shutil.copy(GOLDEN / K3 / "config.json", tmp_path)
    refused(tmp_path, "no index")


def test_index_out_of_the_folder(folder: Path) -> None:
    edit_index(folder, lambda placed: placed.update({"language_model.lm_head.weight": "../x.safetensors"}))
    refused(folder, "../x.safetensors", "own folder")


def test_unknown_dtype_and_format() -> None:
    with pytest.raises(UserError, match="float16"):
        load_model(GOLDEN / K3, dtype="float16", progress=False)
    with pytest.raises(UserError, match="gguf"):
        load_model(GOLDEN / K3, dtype="float32", load_format="gguf", progress=False)  # type: ignore[arg-type]


def test_progress_bar_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    load_model(GOLDEN / LINEAR, dtype="bfloat16")
    shown = capsys.readouterr()
    assert "reading weights" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("name", NAMES)
def test_dummy_weights_need_a_config_alone(name: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    ids = list(range(40))
    logits = {}
    for dtype in ("float64", "float32", "bfloat16"):
        net = load_model(tmp_path, dtype=dtype, load_format="dummy")
        arena = TestArena(net)
        logits[dtype] = arena.run([(arena.open(), ids)], every=True)
        assert torch.isfinite(logits[dtype]).all()
    assert (logits["float64"] - logits["float32"]).abs().max() < 1e-3
    assert logits["float64"].std() > 0.1
    other = load_model(tmp_path, dtype="float32", load_format="dummy", seed=1)
    assert not torch.equal(other.embed, net.embed)
    assert other.weight_bytes == load_model(GOLDEN / name, dtype="float32", progress=False).weight_bytes
