"""Which implementation of each operation runs: decided once, when a model is built, and explained.

There is one set today, torch operations that run on any device; the slow twins in each folder's ``reference`` are
for tests. A faster implementation joins by replacing fields of the set for the devices it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3stack.errors import UserError
from k3stack.kernels.activation import cpu as activation
from k3stack.kernels.kda import cpu as kda
from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear.cpu import Weight
from k3stack.kernels.mla import cpu as mla
from k3stack.kernels.moe import cpu as moe
from k3stack.kernels.norm import cpu as norm
from k3stack.kernels.residual import cpu as residual


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable an operation; shapes are documented at the implementations."""

    name: str
    why: str
    pack: Callable[[Tensor], Weight]
    linear: Callable[[Tensor, Weight], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    l2_norm: Callable[[Tensor, float], Tensor]
    situ_glu: Callable[[Tensor, float, float], Tensor]
    silu_glu: Callable[[Tensor], Tensor]
    residual_mix: Callable[[Tensor, Tensor, float], Tensor]
    conv_chunk: Callable[[Tensor, Tensor, Tensor], Tensor]
    conv_decode: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    log_decay: Callable[[Tensor, Tensor, float | None], Tensor]
    kda_prefill: Callable[..., None]
    kda_decode: Callable[..., Tensor]
    mla_attend: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    mla_decode: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The set for weights of ``dtype`` on ``device``. Raises UserError for a device type that nothing here serves."""
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {device}: kernels exist for 'cpu' and 'cuda'", param="--device")
    return Kernels(
        name="torch",
        why=f"torch operations, correct on every device; weights {_layout(device, dtype)}",
        pack=linear.pack,
        linear=linear.linear,
        rms_norm=norm.rms_norm,
        gated_rms_norm=norm.gated_rms_norm,
        l2_norm=norm.l2_norm,
        situ_glu=activation.situ_glu,
        silu_glu=activation.silu_glu,
        residual_mix=residual.mix,
        conv_chunk=kda.conv_chunk,
        conv_decode=kda.conv_decode,
        log_decay=kda.log_decay,
        kda_prefill=kda.prefill,
        kda_decode=kda.decode,
        mla_attend=mla.attend,
        mla_decode=mla.decode,
        route=moe.route,
        experts=moe.experts,
    )


def _layout(device: torch.device, dtype: torch.dtype) -> str:
    if linear.packs(dtype, device):
        return f"packed for oneDNN, which is faster in {dtype} than plain ones"
    return f"plain: on {device.type} in {dtype} nothing packs them"
