"""Model geometry: everything the rest of k3stack needs to know of an official ``config.json``.

Two layouts are read: Kimi-K3's (nested, ``model_type: kimi_k3`` around a ``kimi_linear`` text config) and
Kimi-Linear's (flat ``kimi_linear``). The two share the inner model type, so K3 is told by its nesting or by
the fields that only it has (``attn_res_block_size``, ``routed_expert_hidden_size``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3stack.config.files import read_json
from k3stack.errors import CheckpointError

Family = Literal["kimi_k3", "kimi_linear"]


@dataclass(frozen=True, slots=True)
class KdaGeometry:
    """Kimi Delta Attention. ``heads`` x ``head_dim`` is the width of each of q, k, v and the output gate."""

    heads: int
    head_dim: int
    conv_kernel: int
    full_rank_gate: bool
    """True: one ``g_proj``; False: ``g_a_proj`` and ``g_b_proj`` through rank ``head_dim``."""
    gate_lower_bound: float | None
    """Bounded decay ``bound * sigmoid(exp(A) * z)`` where given, else ``-exp(A) * softplus(z)``."""
    a_log_size: int
    """Entries of ``A_log`` on disk; K3 pads its heads to a multiple of 128, the first ``heads`` count."""

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaGeometry:
    """Multi-head latent attention without positions (NoPE)."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    shared_dim: int
    """The 'rope' part of the key: one raw key shared by all heads. Nothing is rotated."""
    v_dim: int
    output_gate: bool

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.shared_dim

    @property
    def row_width(self) -> int:
        """Values of one cache row: normed latent, then the raw shared key."""
        return self.kv_lora_rank + self.shared_dim


@dataclass(frozen=True, slots=True)
class MoeGeometry:
    """Routed and shared experts. ``latent`` is the width the routed experts live in (= hidden if none)."""

    experts: int
    top_k: int
    expert_width: int
    shared_experts: int
    latent: int | None
    latent_norm: bool
    scaling_factor: float
    renormalize: bool
    mxfp4: bool

    @property
    def shared_width(self) -> int:
        return self.shared_experts * self.expert_width


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """One model of the family. Layer numbers are 0-based here; the official config counts from 1."""

    family: Family
    hidden: int
    layers: int
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    kda: KdaGeometry
    mla: MlaGeometry
    moe: MoeGeometry
    dense_layers: int
    """The first ``dense_layers`` layers have one dense MLP instead of experts."""
    dense_width: int
    activation: Literal["situ", "silu"]
    situ_beta: float
    situ_linear_beta: float
    residual_block: int | None
    """Attention Residuals open a block at every multiple of this; None: the ordinary residual stream."""
    rms_eps: float
    vocab: int
    context: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    vision: Mapping[str, Any] | None = None
    """The official ``vision_config``, kept for byte totals; the text engine skips the tower."""
    name: str = ""

    def is_kda(self, layer: int) -> bool:
        return layer in self._kda_set()

    def _kda_set(self) -> frozenset[int]:
        return frozenset(self.kda_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.dense_layers, self.layers))

    @property
    def prefix(self) -> str:
        """Prefix of every textual tensor name in the checkpoint."""
        return "language_model." if self.family == "kimi_k3" else ""

    @property
    def residual_rows(self) -> int:
        """Bank rows at the end of the network (Attention Residuals)."""
        return 0 if self.residual_block is None else -(-self.layers // self.residual_block)


def load_geometry(path: str | Path) -> ModelGeometry:
    """Read ``config.json`` (or the folder that holds it). Raises CheckpointError with file and field."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        raise CheckpointError(f"{file}: not found; a checkpoint folder needs a config.json")
    raw = read_json(file, error=CheckpointError)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    return parse_geometry(raw, where=str(file))


def parse_geometry(raw: Mapping[str, Any], where: str = "config.json") -> ModelGeometry:
    """Build the geometry from an official config, nested (K3) or flat (Kimi-Linear)."""
    kind = raw.get("model_type")
    if kind not in ("kimi_k3", "kimi_linear"):
        raise CheckpointError(
            f"{where}: model_type is {kind!r}; k3stack reads 'kimi_k3' and 'kimi_linear'", param="model_type"
        )
    nested = isinstance(raw.get("text_config"), Mapping)
    text = dict(raw["text_config"]) if nested else dict(raw)
    read = _Reader(text, where + (":text_config" if nested else ""))
    is_k3 = nested or text.get("attn_res_block_size") is not None
    layers = read.whole("num_hidden_layers")
    kda_layers, mla_layers = _layer_lists(read, layers)
    moe = _moe(read)
    act = read.text("hidden_act")
    if act not in ("situ", "silu"):
        raise CheckpointError(f"{read.where}: hidden_act is {act!r}; known: 'situ', 'silu'", param="hidden_act")
    _refuse_unknown(read)
    return ModelGeometry(
        family="kimi_k3" if is_k3 else "kimi_linear",
        hidden=read.whole("hidden_size"),
        layers=layers,
        kda_layers=kda_layers,
        mla_layers=mla_layers,
        kda=_kda(read, padded=is_k3),
        mla=_mla(read),
        moe=moe,
        dense_layers=read.whole("first_k_dense_replace", 0),
        dense_width=read.whole("intermediate_size"),
        activation="situ" if act == "situ" else "silu",
        situ_beta=read.positive("activation_situ_beta", 1.0),
        situ_linear_beta=read.positive("activation_situ_linear_beta", 1.0),
        residual_block=read.opt_whole("attn_res_block_size", low=1),
        rms_eps=read.positive("rms_norm_eps"),
        vocab=read.whole("vocab_size"),
        context=read.opt_whole("max_position_embeddings") or read.opt_whole("model_max_length") or 1_048_576,
        bos_id=_first_id(raw, text, "bos_token_id", where),
        eos_ids=_ids(raw, text, "eos_token_id", where),
        pad_id=_first_id(raw, text, "pad_token_id", where),
        vision=raw.get("vision_config") if nested else None,
        name=str(raw.get("_name_or_path") or kind),
    )


MOST = 100_000_000
"""Of any number in a config: beyond it a table made for the model would not fit into memory."""


class _Reader:
    """Typed access to config fields, with messages that name the file and the field."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def _get(self, key: str, default: Any = ...) -> Any:
        value = self.data.get(key)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.where}: field '{key}' is missing", param=key)
            return default
        return value

    def whole(self, key: str, default: Any = ..., low: int = 0) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; expected a whole number >= {low}", param=key)
        if value > MOST:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; expected at most {MOST:,}", param=key)
        return value

    def opt_whole(self, key: str, low: int = 0) -> int | None:
        return None if self.data.get(key) is None else self.whole(key, low=low)

    def number(self, key: str, default: Any = ...) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; expected a number", param=key)
        return float(value)

    def positive(self, key: str, default: Any = ...) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; expected a number above 0", param=key)
        return value

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; expected a string", param=key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; expected true or false", param=key)
        return value


def _layer_lists(read: _Reader, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    linear = read.data.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise CheckpointError(f"{read.where}: linear_attn_config is missing", param="linear_attn_config")
    lists = []
    for key in ("kda_layers", "full_attn_layers"):
        value = linear.get(key)
        if not isinstance(value, list) or any(not isinstance(i, int) for i in value):
            raise CheckpointError(f"{read.where}: linear_attn_config.{key} must list layer numbers", param=key)
        lists.append(tuple(sorted(i - 1 for i in value)))
    kda, mla = lists
    both = sorted((*kda, *mla))
    if both != list(range(layers)):
        extra = sorted(set(range(layers)) ^ set(both)) or sorted(i for i in both if both.count(i) > 1)
        raise CheckpointError(
            f"{read.where}: kda_layers and full_attn_layers (counted from 1) must together name each of the "
            f"{layers} layers once; at fault: {[i + 1 for i in extra][:8]}",
            param="linear_attn_config",
        )
    return kda, mla


def _kda(read: _Reader, *, padded: bool) -> KdaGeometry:
    sub = _Reader(dict(read.data["linear_attn_config"]), read.where + ":linear_attn_config")
    heads = sub.whole("num_heads")
    bound = sub.data.get("gate_lower_bound")
    return KdaGeometry(
        heads=heads,
        head_dim=sub.whole("head_dim"),
        conv_kernel=sub.whole("short_conv_kernel_size"),
        full_rank_gate=sub.flag("use_full_rank_gate", False),
        gate_lower_bound=None if bound is None else sub.number("gate_lower_bound"),
        a_log_size=-(-heads // 128) * 128 if padded else heads,
    )


def _mla(read: _Reader) -> MlaGeometry:
    if not read.flag("mla_use_nope", False):
        raise CheckpointError(
            f"{read.where}: mla_use_nope is false; only models without rotary positions are implemented",
            param="mla_use_nope",
        )
    return MlaGeometry(
        heads=read.whole("num_attention_heads"),
        q_lora_rank=read.opt_whole("q_lora_rank"),
        kv_lora_rank=read.whole("kv_lora_rank"),
        nope_dim=read.whole("qk_nope_head_dim"),
        shared_dim=read.whole("qk_rope_head_dim"),
        v_dim=read.whole("v_head_dim"),
        output_gate=read.flag("mla_use_output_gate", False),
    )


def _moe(read: _Reader) -> MoeGeometry:
    if (groups := read.whole("num_expert_group", 1)) != 1:
        raise CheckpointError(f"{read.where}: num_expert_group is {groups}; only 1 is implemented")
    func = read.data.get("moe_router_activation_func", "sigmoid")
    if func != "sigmoid":
        raise CheckpointError(f"{read.where}: moe_router_activation_func is {func!r}; only 'sigmoid' is implemented")
    experts, top_k = read.whole("num_experts"), read.whole("num_experts_per_token")
    if not 0 < top_k <= experts:
        raise CheckpointError(f"{read.where}: num_experts_per_token {top_k} does not fit num_experts {experts}")
    return MoeGeometry(
        experts=experts,
        top_k=top_k,
        expert_width=read.whole("moe_intermediate_size"),
        shared_experts=read.whole("num_shared_experts", 0),
        latent=read.opt_whole("routed_expert_hidden_size"),
        latent_norm=read.flag("latent_moe_use_norm", False),
        scaling_factor=read.number("routed_scaling_factor", 1.0),
        renormalize=read.flag("moe_renormalize", True),
        mxfp4=_is_mxfp4(read),
    )


def _is_mxfp4(read: _Reader) -> bool:
    quant = read.data.get("quantization_config")
    if quant is None:
        return False
    method = quant.get("quant_method") if isinstance(quant, Mapping) else None
    fmt = quant.get("format") if isinstance(quant, Mapping) else None
    if method == "compressed-tensors" and fmt == "mxfp4-pack-quantized":
        return True
    raise CheckpointError(
        f"{read.where}: quantization_config is {method!r} / {fmt!r}; implemented: none, and "
        "'compressed-tensors' with format 'mxfp4-pack-quantized'",
        param="quantization_config",
    )


def _refuse_unknown(read: _Reader) -> None:
    """Refuse settings that would change the network and that nothing here computes."""
    for key, fine in (("num_nextn_predict_layers", 0), ("moe_layer_freq", 1), ("tie_word_embeddings", False)):
        value = read.data.get(key, fine)
        if value != fine:
            raise CheckpointError(f"{read.where}: {key} is {value!r}; only {fine!r} is implemented", param=key)


def _ids(raw: Mapping[str, Any], text: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    value = raw.get(key, text.get(key))
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MOST:
            raise CheckpointError(f"{where}: {key} is {value!r}; expected token ids", param=key)
    return ids


def _first_id(raw: Mapping[str, Any], text: Mapping[str, Any], key: str, where: str) -> int | None:
    ids = _ids(raw, text, key, where)
    return ids[0] if ids else None
