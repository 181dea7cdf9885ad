"""Random weights for any geometry (``--load-format dummy``): seeded, the same values in every dtype, finite outputs.

A GPU draws them itself, and routed experts that stay packed get random codes: other values than a CPU has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3stack.config.tensors import MXFP4_GROUP, TensorSpec, expected_tensors, expert_tensors
from k3stack.models.network import Model

CODE_VARIANCE = 8.5625
"""Of MXFP4 codes that are all equally likely."""
PIECE = 1 << 20
"""Values drawn at a time, in float32, whatever the destination's dtype."""


def fill(model: Model, seed: int = 0) -> None:
    """Fill every weight: matrices of standard deviation 1 / sqrt(inputs), norms of one, plausible decay gates."""
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(model.device).manual_seed(seed) if model.device.type == "cuda" else generator
    geometry = model.geometry
    model.materialise()
    top = model.slots()
    layer, slots = -1, top
    for spec in expected_tensors(geometry, vision=False, routed=False):
        if spec.layer is not None and spec.layer != layer:
            layer, slots = spec.layer, model.layer_slots(spec.layer)
        dest = (top if spec.layer is None else slots)[spec.kind].dest
        _fill(dest, spec.kind, generator, on_device)
    for layer in geometry.moe_layers:
        for expert in model.local_experts(layer):
            for spec in expert_tensors(geometry, layer, expert):
                dest = model.expert_slot(spec).dest
                if dest.dtype == torch.uint8:
                    _packed(dest, spec, on_device)
                elif not spec.kind.endswith(".scale"):
                    _normal(dest, on_device)


def _fill(dest: Tensor, kind: str, generator: torch.Generator, on_device: torch.Generator) -> None:
    name = kind.split(".")[-1]
    if kind == "kda.A_log":
        dest.copy_(torch.empty(dest.shape).uniform_(1.0, 16.0, generator=generator).log_())
    elif kind == "kda.dt_bias":
        # Steps of 0.001 to 0.1 before the softplus, as such models are usually initialised.
        step = torch.empty(dest.shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        dest.copy_(torch.log(torch.expm1(step)))
    elif kind == "moe.router_bias":
        dest.copy_(torch.empty(dest.shape).normal_(0.0, 0.01, generator=generator))
    elif name.endswith("conv1d"):
        dest.copy_(torch.empty(dest.shape).uniform_(-0.5, 0.5, generator=generator))
    elif dest.ndim == 1:
        dest.fill_(1.0)
    elif kind == "embed":
        _normal(dest, on_device, std=1.0)
    else:
        _normal(dest, on_device)


def _packed(dest: Tensor, spec: TensorSpec, generator: torch.Generator) -> None:
    """Codes at random, all of one scale, so that their standard deviation is near 1 / sqrt(inputs)."""
    if spec.kind.endswith(".scale"):
        inputs = spec.shape[-1] * MXFP4_GROUP
        dest.fill_(127 + round(math.log2(1 / math.sqrt(inputs * CODE_VARIANCE))))
    else:
        dest.random_(0, 256, generator=generator)


def _normal(dest: Tensor, generator: torch.Generator, std: float | None = None) -> None:
    std = 1 / math.sqrt(dest.shape[-1]) if std is None else std
    if dest.device.type == "cuda":
        dest.normal_(0.0, std, generator=generator)
        return
    flat = dest.view(-1)
    for a in range(0, flat.numel(), PIECE):
        part = flat[a : a + PIECE]
        part.copy_(torch.empty(part.shape).normal_(0.0, std, generator=generator))
