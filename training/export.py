"""Writes trained weights as an official Kimi-K3 checkpoint: nested config, language_model. names, MXFP4 experts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3stack.config.geometry import parse_geometry
from k3stack.config.tensors import expected_tensors
from training import mxfp4
from training.format import OFFSETS, load_ranks
from training.model import Kda, Layer, Mla, Mlp, Moe, Nano, NanoConfig
from training.train import load

SHARD_BYTES = 13_900_000
A_LOG_ENTRIES = 128
IGNORED = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)


def config(c: NanoConfig, base: int, context: int) -> dict[str, Any]:
    """The official nested config.json; ``base`` is the first special id."""
    special = {
        "bos_token_id": base + OFFSETS["[BOS]"],
        "eos_token_id": base + OFFSETS["<|end_of_msg|>"],
        "pad_token_id": base + OFFSETS["[PAD]"],
    }
    mla = [i + 1 for i in c.mla_layers]
    text = {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "intermediate_size": c.dense_width,
        "rms_norm_eps": c.eps,
        "q_lora_rank": c.q_rank,
        "kv_lora_rank": c.kv_rank,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.shared_key,
        "v_head_dim": c.v_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": c.experts,
        "num_experts_per_token": c.top_k,
        "num_shared_experts": c.shared_experts,
        "moe_intermediate_size": c.expert_width,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "routed_expert_hidden_size": c.latent,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "hidden_act": "situ",
        "activation_situ_beta": c.situ_beta,
        "activation_situ_linear_beta": c.situ_linear,
        "attn_res_block_size": c.block,
        "max_position_embeddings": context,
        **special,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "kda_layers": [i + 1 for i in range(c.layers) if i + 1 not in mla],
            "num_heads": c.heads,
            "head_dim": c.kda_dim,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": c.gate_bound,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "strategy": "group",
                        "group_size": mxfp4.GROUP,
                        "symmetric": True,
                        "dynamic": False,
                        "scale_dtype": "torch.uint8",
                        "observer": "minmax",
                    },
                }
            },
            "ignore": list(IGNORED),
        },
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **special,
        "media_placeholder_token_id": base + OFFSETS["<|media_pad|>"],
        "text_config": text,
    }


def _attention(attn: Kda | Mla) -> dict[str, Tensor]:
    c = attn.c
    if isinstance(attn, Mla):
        names = {"q_a_proj": "q_a", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b"}
        names |= {"g_proj": "g", "o_proj": "o", "q_a_layernorm": "q_norm", "kv_a_layernorm": "kv_norm"}
        return {f"{official}.weight": getattr(attn, own) for official, own in names.items()}
    width = c.heads * c.kda_dim
    out = {f"{n}_proj.weight": getattr(attn, n) for n in ("q", "k", "v", "g", "o", "f_a", "f_b", "b")}
    for i, n in enumerate("qkv"):
        out[f"{n}_conv1d.weight"] = attn.conv[i * width : (i + 1) * width, None]
    out["A_log"] = torch.nn.functional.pad(attn.a_log, (0, A_LOG_ENTRIES - c.heads))
    return out | {"dt_bias": attn.dt_bias, "o_norm.weight": attn.norm}


def _mlp(mlp: Mlp, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{n}_proj.weight": getattr(mlp, n) for n in ("gate", "up", "down")}


def _moe(moe: Moe) -> dict[str, Tensor]:
    p = "block_sparse_moe."
    out = {f"{p}gate.weight": moe.router, f"{p}gate.e_score_correction_bias": moe.bias}
    out |= {f"{p}routed_expert_down_proj.weight": moe.down, f"{p}routed_expert_up_proj.weight": moe.up}
    out[f"{p}routed_expert_norm.weight"] = moe.norm
    out |= _mlp(moe.shared, f"{p}shared_experts")
    for name in ("w1", "w2", "w3"):
        packed, scale = mxfp4.pack(getattr(moe, name).detach().float())
        for e in range(moe.c.experts):
            out[f"{p}experts.{e}.{name}.weight_packed"] = packed[e]
            out[f"{p}experts.{e}.{name}.weight_scale"] = scale[e]
    return out


def _layer(layer: Layer) -> dict[str, Tensor]:
    out = {"input_layernorm.weight": layer.attn_norm, "post_attention_layernorm.weight": layer.ff_norm}
    out |= {"self_attention_res_norm.weight": layer.attn_res_norm, "mlp_res_norm.weight": layer.ff_res_norm}
    out |= {"self_attention_res_proj.weight": layer.attn_res[None], "mlp_res_proj.weight": layer.ff_res[None]}
    attn, ff = layer.attn, layer.ff
    assert isinstance(attn, (Kda, Mla))
    out |= {f"self_attn.{k}": v for k, v in _attention(attn).items()}
    return out | (_mlp(ff, "mlp") if isinstance(ff, Mlp) else _moe(ff))  # type: ignore[arg-type]


def tensors(model: Nano) -> dict[str, Tensor]:
    """Every tensor under its official name, not yet in its stored dtype (packed experts are)."""
    out = {"model.embed_tokens.weight": model.embed, "lm_head.weight": model.head, "model.norm.weight": model.norm}
    out |= {"model.output_attn_res_norm.weight": model.res_norm, "model.output_attn_res_proj.weight": model.res[None]}
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        out |= {f"model.layers.{i}.{k}": v for k, v in _layer(layer).items()}
    return {f"language_model.{k}": v for k, v in out.items()}


def export(model: Nano, folder: Path, tokenizer: Path, context: int = 16384) -> int:
    """Writes config, shards and index; returns the bytes of the shards. Raises ValueError on a wrong inventory."""
    raw = config(model.c, len(load_ranks(tokenizer)), context)
    found = tensors(model)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for spec in expected_tensors(parse_geometry(raw)):
        tensor = found.pop(spec.name).detach().to(dtypes[spec.dtype]).contiguous().clone()
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{spec.name}: shape {tuple(tensor.shape)}, expected {spec.shape}")
        if size + tensor.nbytes > SHARD_BYTES - 200_000:  # the header of a shard needs room too
            shards.append({})
            size = 0
        shards[-1][spec.name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    if found:
        raise ValueError(f"not part of the official layout: {sorted(found)[:4]}")
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=0) + "\n"
    )
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


@torch.no_grad()
def read(folder: Path) -> Nano:
    """The training network from an exported checkpoint; experts hold exactly the values of their MXFP4 codes.

    Training can go on from here without the folder that ``train`` left.
    """
    text = json.loads((folder / "config.json").read_text())["text_config"]
    c = NanoConfig()
    if (text["hidden_size"], text["num_hidden_layers"], text["num_experts"]) != (c.hidden, c.layers, c.experts):
        raise ValueError(f"{folder}: not of the shape of NanoConfig")
    stored: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored |= load_file(shard)
    model = Nano(c)
    for name, view in tensors(model).items():
        if not name.endswith(("A_log", "weight_packed", "weight_scale")):
            view.detach().copy_(stored[name])
    for i, layer in enumerate(model.layers):
        prefix = f"language_model.model.layers.{i}."
        if isinstance(layer.attn, Kda):
            layer.attn.a_log.copy_(stored[f"{prefix}self_attn.A_log"][: c.heads])
        if isinstance(layer.ff, Moe):
            for name in ("w1", "w2", "w3"):
                for e in range(c.experts):
                    at = f"{prefix}block_sparse_moe.experts.{e}.{name}.weight"
                    getattr(layer.ff, name)[e].copy_(mxfp4.unpack(stored[f"{at}_packed"], stored[f"{at}_scale"]))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="folder written by training.train")
    parser.add_argument("--out", type=Path, default=Path("src/k3stack/models/data/nano"))
    parser.add_argument("--tokenizer", type=Path, default=Path("src/k3stack/models/data/nano/tiktoken.model"))
    args = parser.parse_args()
    meta = json.loads((args.weights / "meta.json").read_text())
    model = Nano(NanoConfig(**meta["config"]))
    load(args.weights, model)
    print(f"{export(model, args.out, args.tokenizer):,} bytes in {args.out}")


if __name__ == "__main__":
    main()
