"""Write a random checkpoint in the official layout, for benchmarks: ``write_checkpoint(folder, config)``.

Tensors are written one by one, so memory stays small whatever the size.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3stack.config.geometry import parse_geometry
from k3stack.config.tensors import TensorSpec, expected_tensors

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


def quarter_kimi_linear(experts: int = 32) -> dict[str, Any]:
    """Kimi-Linear's layer shapes at a quarter of the width: 8 layers, 32 experts of which 8, full vocabulary.

    Head sizes (128, 64 shared, latent 512) and the vocabulary stay as published.
    """
    raw: dict[str, Any] = json.loads((files("k3stack.config") / "data" / "kimi_linear_48b_config.json").read_text())
    raw.update(hidden_size=576, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8)
    raw.update(intermediate_size=2304, moe_intermediate_size=256, num_experts=experts, num_experts_per_token=8)
    raw["linear_attn_config"].update(num_heads=8, kda_layers=[1, 2, 3, 5, 6, 7], full_attn_layers=[4, 8])
    return raw


def small_k3() -> dict[str, Any]:
    """Kimi-K3's layout with MXFP4 experts, about 1.6 GB of which 1.2 are packed experts."""
    raw: dict[str, Any] = json.loads((files("k3stack.config") / "data" / "k3_config.json").read_text())
    raw.pop("_checkpoint")
    raw.pop("vision_config")
    text = raw["text_config"]
    text.update(hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, q_lora_rank=512)
    text.update(intermediate_size=4096, moe_intermediate_size=1024, routed_expert_hidden_size=1024, vocab_size=32768)
    text.update(num_experts=112, attn_res_block_size=4)
    text["linear_attn_config"].update(num_heads=8, kda_layers=[1, 2, 3, 5, 6, 7], full_attn_layers=[4, 8])
    return raw


def write_checkpoint(folder: Path, config: dict[str, Any], *, shards: int = 4, seed: int = 0) -> int:
    """config.json, ``shards`` safetensors files of about equal size and their index; returns the payload's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    specs = list(expected_tensors(parse_geometry(config), vision=False))
    total = sum(s.nbytes for s in specs)
    generator = torch.Generator().manual_seed(seed)
    placed: dict[str, str] = {}
    for number, group in enumerate(_split(specs, total / shards), 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        _write_shard(folder / name, group, generator)
        placed.update(dict.fromkeys((s.name for s in group), name))
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _split(specs: list[TensorSpec], size: float) -> Iterator[list[TensorSpec]]:
    """Groups of about ``size`` bytes; a packed weight and its scales stay together."""
    group: list[TensorSpec] = []
    done, passed = 0, 0
    for spec in specs:
        if done >= size * (passed + 1) and not spec.kind.endswith(".scale"):
            yield group
            group, passed = [], passed + 1
        group.append(spec)
        done += spec.nbytes
    yield group


def _write_shard(file: Path, specs: list[TensorSpec], generator: torch.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for s in specs:
        header[s.name] = {"dtype": s.dtype, "shape": list(s.shape), "data_offsets": [at, at + s.nbytes]}
        at += s.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for s in specs:
            f.write(memoryview(_values(s, generator).contiguous().view(torch.uint8).numpy().reshape(-1)))


def _values(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    shape, name = spec.shape, spec.kind.split(".")[-1]
    if name == "packed":
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if name == "scale":
        # Random codes have a root mean square of about 3.
        byte = 127 - round(math.log2(3 * math.sqrt(shape[1] * 32)))
        return torch.full(shape, byte, dtype=torch.uint8)
    if name == "A_log":
        values = torch.empty(shape).uniform_(1, 16, generator=generator).log_()
    elif name == "dt_bias":
        step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        values = torch.log(torch.expm1(step))
    elif name == "router_bias":
        values = torch.empty(shape).normal_(0, 0.01, generator=generator)
    elif name.endswith("conv1d"):
        values = torch.empty(shape).uniform_(-0.5, 0.5, generator=generator)
    elif len(shape) == 1:
        values = torch.ones(shape)
    else:
        std = 1.0 if name == "embed" else 1 / math.sqrt(shape[-1])
        values = torch.empty(shape).normal_(0, std, generator=generator)
    return values.to(DTYPES[spec.dtype])
