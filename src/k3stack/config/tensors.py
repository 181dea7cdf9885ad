"""The tensors a checkpoint must hold, computed from the geometry: names, shapes and dtypes as stored.

This is the one list of tensors. The reader checks files against it, byte totals are sums over it, and the shard
table says for each *kind* which axis is cut. Names, shapes and dtypes are those of the published files; for the
true Kimi-K3 config the list has 497,220 entries and 1,560,860,324,864 bytes, equal to the published index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from k3stack.config.geometry import ModelGeometry
from k3stack.errors import CheckpointError

Dtype = Literal["BF16", "F32", "U8"]
ITEMSIZE: Mapping[Dtype, int] = {"BF16": 2, "F32": 4, "U8": 1}
MXFP4_GROUP = 32
"""Columns that share one scale byte."""
PACKED_PER_BYTE = 2
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
"""Tensors known and skipped by the text engine."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    kind: str
    """What it is, independent of layer and expert: 'kda.q_proj', 'moe.expert.w1.packed', 'residual.attn_norm'."""
    layer: int | None = None
    """0-based; None for tensors of the whole model and of the vision part."""
    expert: int | None = None
    also: Dtype | None = None
    """A second dtype that files may hold it in (values are read exactly either way)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


def expected_tensors(geometry: ModelGeometry, *, vision: bool = True, routed: bool = True) -> Iterator[TensorSpec]:
    """Every tensor in the order of the published files: embedding, layers, head, then the vision part if any.

    Lazy: Kimi-K3's half a million entries are never all in memory unless the caller keeps them. ``routed=False``
    leaves the routed experts out (which leaves 2,628); ``expert_tensors`` gives one expert's.
    """
    p = geometry.prefix
    d, v = geometry.hidden, geometry.vocab
    yield TensorSpec(f"{p}model.embed_tokens.weight", (v, d), "BF16", "embed")
    for layer in range(geometry.layers):
        yield from layer_tensors(geometry, layer, routed=routed)
    yield TensorSpec(f"{p}lm_head.weight", (v, d), "BF16", "lm_head")
    yield TensorSpec(f"{p}model.norm.weight", (d,), "BF16", "norm")
    if geometry.residual_block is not None:
        yield TensorSpec(f"{p}model.output_attn_res_norm.weight", (d,), "BF16", "residual.output_norm")
        yield TensorSpec(f"{p}model.output_attn_res_proj.weight", (1, d), "BF16", "residual.output_proj")
    if vision and geometry.vision is not None:
        yield from vision_tensors(geometry.vision)


def layer_tensors(geometry: ModelGeometry, layer: int, *, routed: bool = True) -> Iterator[TensorSpec]:
    """The tensors of one layer (0-based), dense ones first, then expert by expert."""
    base = f"{geometry.prefix}model.layers.{layer}."
    d = geometry.hidden

    def spec(name: str, kind: str, *shape: int) -> TensorSpec:
        return TensorSpec(base + name, shape, "BF16", kind, layer)

    yield spec("input_layernorm.weight", "layer.input_norm", d)
    yield spec("post_attention_layernorm.weight", "layer.post_attention_norm", d)
    if geometry.residual_block is not None:
        for side, kind in (("self_attention", "attn"), ("mlp", "mlp")):
            yield spec(f"{side}_res_norm.weight", f"residual.{kind}_norm", d)
            yield spec(f"{side}_res_proj.weight", f"residual.{kind}_proj", 1, d)
    if layer in geometry.kda_layers:
        yield from _kda(geometry, layer, base + "self_attn.")
    else:
        yield from _mla(geometry, layer, base + "self_attn.")
    if layer < geometry.dense_layers:
        yield from _mlp(base + "mlp.", "dense", d, geometry.dense_width, layer)
    else:
        yield from _moe(geometry, layer, base + "block_sparse_moe.")
        for expert in range(geometry.moe.experts if routed else 0):
            yield from expert_tensors(geometry, layer, expert)


def total_bytes(geometry: ModelGeometry, *, vision: bool = True) -> int:
    """Bytes of all tensors as stored (headers not counted), without walking every expert."""
    total = sum(t.nbytes for t in expected_tensors(geometry, vision=vision, routed=False))
    one = sum(t.nbytes for t in expert_tensors(geometry, geometry.dense_layers, 0))
    return total + one * geometry.moe.experts * len(geometry.moe_layers)


def expert_tensors(geometry: ModelGeometry, layer: int, expert: int) -> Iterator[TensorSpec]:
    """The tensors of one routed expert: w1 = gate, w2 = down, w3 = up; packed codes and scales where MXFP4."""
    moe = geometry.moe
    width, inner = moe.latent or geometry.hidden, moe.expert_width
    base = f"{geometry.prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}."
    for name, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
        kind = f"moe.expert.{name}"
        if not moe.mxfp4:
            yield TensorSpec(f"{base}{name}.weight", (rows, columns), "BF16", f"{kind}.weight", layer, expert)
            continue
        if columns % MXFP4_GROUP:
            raise CheckpointError(
                f"expert {name} has {columns} columns; MXFP4 needs a multiple of {MXFP4_GROUP} "
                "(routed_expert_hidden_size and moe_intermediate_size in config.json)"
            )
        packed, groups = columns // PACKED_PER_BYTE, columns // MXFP4_GROUP
        yield TensorSpec(f"{base}{name}.weight_packed", (rows, packed), "U8", f"{kind}.packed", layer, expert)
        yield TensorSpec(f"{base}{name}.weight_scale", (rows, groups), "U8", f"{kind}.scale", layer, expert)


def _kda(geometry: ModelGeometry, layer: int, base: str) -> Iterator[TensorSpec]:
    kda, d = geometry.kda, geometry.hidden
    width, rank = kda.width, kda.head_dim
    k3 = geometry.family == "kimi_k3"

    def bf16(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"{base}{name}.weight", shape, "BF16", f"kda.{name}", layer)

    def side(name: str, shape: tuple[int, ...], dtype: Dtype, suffix: str = "") -> TensorSpec:
        # Kimi-Linear's published dtypes of the small side tensors are not confirmed: both are read there.
        also: Dtype | None = None if k3 else ("BF16" if dtype == "F32" else "F32")
        return TensorSpec(f"{base}{name}{suffix}", shape, dtype, f"kda.{name}", layer, also=also)

    yield from (bf16(name, width, d) for name in ("q_proj", "k_proj", "v_proj"))
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield side(name, (width, 1, kda.conv_kernel), "F32" if k3 else "BF16", ".weight")
    yield bf16("f_a_proj", rank, d)
    yield bf16("f_b_proj", width, rank)
    yield bf16("b_proj", kda.heads, d)
    yield side("A_log", (kda.a_log_size,) if k3 else (1, 1, kda.heads, 1), "F32")
    yield side("dt_bias", (width,), "F32")
    if kda.full_rank_gate:
        yield bf16("g_proj", width, d)
    else:
        yield bf16("g_a_proj", rank, d)
        yield bf16("g_b_proj", width, rank)
    yield side("o_norm", (kda.head_dim,), "F32" if k3 else "BF16", ".weight")
    yield bf16("o_proj", d, width)


def _mla(geometry: ModelGeometry, layer: int, base: str) -> Iterator[TensorSpec]:
    mla, d = geometry.mla, geometry.hidden

    def bf16(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"{base}{name}.weight", shape, "BF16", f"mla.{name}", layer)

    if mla.q_lora_rank is None:
        yield bf16("q_proj", mla.heads * mla.qk_dim, d)
    else:
        yield bf16("q_a_proj", mla.q_lora_rank, d)
        yield bf16("q_a_layernorm", mla.q_lora_rank)
        yield bf16("q_b_proj", mla.heads * mla.qk_dim, mla.q_lora_rank)
    yield bf16("kv_a_proj_with_mqa", mla.row_width, d)
    yield bf16("kv_a_layernorm", mla.kv_lora_rank)
    yield bf16("kv_b_proj", mla.heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank)
    if mla.output_gate:
        yield bf16("g_proj", mla.heads * mla.v_dim, d)
    yield bf16("o_proj", d, mla.heads * mla.v_dim)


def _mlp(base: str, kind: str, hidden: int, width: int, layer: int) -> Iterator[TensorSpec]:
    for name, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        yield TensorSpec(f"{base}{name}.weight", shape, "BF16", f"{kind}.{name}", layer)


def _moe(geometry: ModelGeometry, layer: int, base: str) -> Iterator[TensorSpec]:
    moe, d = geometry.moe, geometry.hidden
    k3 = geometry.family == "kimi_k3"

    def bf16(name: str, kind: str, *shape: int) -> TensorSpec:
        return TensorSpec(base + name, shape, "BF16", f"moe.{kind}", layer)

    yield bf16("gate.weight", "router", moe.experts, d)
    bias = f"{base}gate.e_score_correction_bias"
    yield TensorSpec(bias, (moe.experts,), "F32", "moe.router_bias", layer, also=None if k3 else "BF16")
    if moe.latent is not None:
        yield bf16("routed_expert_down_proj.weight", "latent_down", moe.latent, d)
        if moe.latent_norm:
            yield bf16("routed_expert_norm.weight", "latent_norm", moe.latent)
        yield bf16("routed_expert_up_proj.weight", "latent_up", d, moe.latent)
    if moe.shared_experts:
        yield from _mlp(base + "shared_experts.", "moe.shared", d, moe.shared_width, layer)


def vision_tensors(vision: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """The vision tower and its projector (BF16), from the official ``vision_config``; counted, never computed."""
    try:
        width, qkv, inner = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_intermediate_size"]
        patch, blocks = vision["patch_size"], vision["vt_num_hidden_layers"]
        grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"])
        merged, hidden = width * math.prod(vision["merge_kernel_size"]), vision["text_hidden_size"]
    except KeyError as e:
        raise CheckpointError(f"config.json:vision_config: field {e} is missing", param="vision_config") from None

    def bf16(name: str, kind: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"{name}.weight", shape, "BF16", f"vision.{kind}")

    yield bf16("vision_tower.patch_embed.proj", "patch_embed", width, 3, patch, patch)
    yield bf16("vision_tower.patch_embed.pos_emb", "pos_emb", *grid, width)
    for i in range(blocks):
        base = f"vision_tower.encoder.blocks.{i}."
        yield bf16(base + "norm0", "norm", width)
        yield bf16(base + "norm1", "norm", width)
        yield bf16(base + "wqkv", "wqkv", 3 * qkv, width)
        yield bf16(base + "wo", "wo", width, qkv)
        yield bf16(base + "mlp.fc0", "fc0", inner, width)
        yield bf16(base + "mlp.fc1", "fc1", width, inner)
    yield bf16("vision_tower.encoder.final_layernorm", "norm", width)
    yield bf16("mm_projector.proj.0", "projector", merged, merged)
    yield bf16("mm_projector.proj.2", "projector", hidden, merged)
    yield bf16("mm_projector.post_norm", "norm", hidden)
