"""Which implementation of each operation runs: decided once, when a model is built, and explained.

Two sets: torch operations that run on any device, and Triton kernels for CUDA in bfloat16 and float32. The slow twins
in each folder's ``reference`` are for tests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3stack.config.geometry import ModelGeometry
from k3stack.errors import UserError
from k3stack.kernels.activation import cpu as activation
from k3stack.kernels.kda import cpu as kda
from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear import stacked
from k3stack.kernels.linear.cpu import Weight
from k3stack.kernels.mla import cpu as mla
from k3stack.kernels.moe import cpu as moe
from k3stack.kernels.norm import cpu as norm
from k3stack.kernels.precision import wide_dtype
from k3stack.kernels.residual import cpu as residual

HOPPER = 9
"""Its compute capability."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable an operation; shapes are documented at the implementations."""

    name: str
    why: str
    pack: Callable[[Tensor], Weight]
    stacker: Callable[[Sequence[Tensor]], stacked.Stacker]
    linear: Callable[[Tensor, Weight], Tensor]
    router_logits: Callable[[Tensor, Weight], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    l2_norm: Callable[[Tensor, float], Tensor]
    situ_glu: Callable[[Tensor, float, float], Tensor]
    silu_glu: Callable[[Tensor], Tensor]
    output_gate: Callable[[Tensor, Tensor], Tensor]
    residual_mix: Callable[[Tensor, Tensor, float], Tensor]
    conv_chunk: Callable[[Tensor, Tensor, Tensor], Tensor]
    conv_decode: Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]
    log_decay: Callable[[Tensor, Tensor, float | None], Tensor]
    kda_prefill: Callable[..., None]
    kda_decode: Callable[..., Tensor]
    write_rows: Callable[..., None]
    mla_attend: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    mla_decode: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]
    router_dtype: torch.dtype
    """Of the router's weight: ``router_logits`` takes it."""
    row_multiple: int = 1
    """Rows that a fused projection is filled up to: cuBLAS takes three times as long for an odd number of outputs."""
    device_tables: bool = False
    """Blocks and lengths of decode rows are given as device tensors, else as lists."""
    stacked_experts: bool = False
    """Experts' weights are one tensor [E, out, in] (MXFP4 stays packed), else a list of weights."""
    kda_step: Callable[..., Tensor] | None = None
    """A whole decode step of KDA between its projections (``kda.triton.decode_step``)."""
    kda_chunks: Callable[..., None] | None = None
    """All of KDA between its projections for the chunks of a step (``kda.triton_chunk.chunks``)."""
    mla_chunks: Callable[..., list[Tensor]] | None = None
    """``mla_attend`` of all chunks of a step over their pages (``mla.cpu.attend_chunks``)."""
    mla_enter: Callable[..., Tensor] | None = None
    """``write_rows``, and the norm of a low-rank query, in one (``mla.triton_ends.enter``)."""
    mla_gated: Callable[..., Tensor] | None = None
    """``mla_decode`` and the output gate in one (``mla.triton.gated``)."""
    choose: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    """What follows the joined products of few tokens (``moe.triton_route.choose``)."""
    experts_plus: Callable[..., Tensor] | None = None
    """``experts`` plus another product (``moe.triton.experts_plus``)."""
    linear_apart: Callable[[Tensor, Weight], Tensor | None] | None = None
    """``linear`` of few tokens, to be added up by those that read it (``linear.cuda.linear_apart``)."""
    linear_plus: Callable[[Tensor, Weight, Tensor], Tensor] | None = None
    """``linear`` plus a tensor, which may be overwritten."""
    linear_both: Callable[[Tensor, Weight, Tensor, Weight], Tensor] | None = None
    """The sum of two ``linear`` of as many outputs, in one."""
    arrange_experts: Callable[..., tuple[Any, Any]] | None = None
    """Brings the stacked experts' MXFP4 weights into the order that ``experts`` takes, once they are loaded."""
    add_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    """Addition and norm in one (``norm.triton.add_norm``)."""
    mix_norm: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
    """Addition, residual mix and norm in one (``residual.triton.mix_norm``)."""


def select_kernels(device: torch.device, dtype: torch.dtype, geometry: ModelGeometry | None = None) -> Kernels:
    """The set for weights of ``dtype`` on ``device``. Raises UserError for a device type that nothing here serves."""
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {device}: kernels exist for 'cpu' and 'cuda'", param="--device")
    if device.type == "cpu":
        return _torch(dtype, f"torch operations; weights {_layout(device, dtype)}")
    reason = why_not_triton(dtype, geometry)
    if reason is not None:
        return _torch(dtype, f"torch operations, correct on every device: {reason}")
    return _triton(dtype)


def select_least_kept(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """How top-k and top-p find what they keep on ``device`` (see ``sampling.reference``); None: by sorting the largest
    few, with the host's help."""
    if device.type != "cuda" or why_not_triton(torch.float32, None) is not None:
        return None
    from k3stack.kernels.sampling import triton as sampling

    return sampling.least_kept


def why_not_triton(dtype: torch.dtype, geometry: ModelGeometry | None) -> str | None:
    """What keeps the Triton kernels from serving a model on a GPU; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the Triton kernels compute in float32 and bfloat16, not in {dtype}"
    if torch.cuda.is_available() and (own := torch.cuda.get_device_capability())[0] != HOPPER:
        # Those before it lack its copies and starts, those after it its matrix instructions of four warps.
        given = f"compute capability {HOPPER}.0, not {own[0]}.{own[1]}"
        return f"the Triton kernels are made of Hopper's instructions ({given})"
    if geometry is not None:
        sizes, latent = (geometry.kda.head_dim, geometry.mla.shared_dim), geometry.mla.kv_lora_rank
        if any(n < 16 or n & (n - 1) for n in sizes):
            return f"KDA head and shared key are {sizes} wide; the Triton kernels take powers of two from 16 on"
        if latent < 16 or latent % 16:
            return f"the latent is {latent} wide; the Triton kernels take multiples of 16"
    return None


def _torch(dtype: torch.dtype, why: str) -> Kernels:
    return Kernels(
        name="torch",
        why=why,
        pack=linear.pack,
        stacker=stacked.Stacker,
        linear=linear.linear,
        router_logits=linear.router_logits,
        rms_norm=norm.rms_norm,
        gated_rms_norm=norm.gated_rms_norm,
        l2_norm=norm.l2_norm,
        situ_glu=activation.situ_glu,
        silu_glu=activation.silu_glu,
        output_gate=activation.output_gate,
        residual_mix=residual.mix,
        conv_chunk=kda.conv_chunk,
        conv_decode=kda.conv_decode,
        log_decay=kda.log_decay,
        kda_prefill=kda.prefill,
        kda_decode=kda.decode,
        write_rows=mla.write_rows,
        mla_attend=mla.attend,
        mla_chunks=mla.attend_chunks,
        mla_decode=mla.decode,
        route=moe.route,
        experts=moe.experts,
        router_dtype=wide_dtype(dtype),
    )


def _triton(dtype: torch.dtype) -> Kernels:
    import triton

    from k3stack.kernels import launch
    from k3stack.kernels.activation import triton as fast_activation
    from k3stack.kernels.kda import triton as fast_kda
    from k3stack.kernels.kda import triton_chunk as fast_kda_chunk
    from k3stack.kernels.linear import cuda as fast_linear
    from k3stack.kernels.mla import cuda as mla_cuda
    from k3stack.kernels.mla import triton as fast_mla
    from k3stack.kernels.mla import triton_ends as mla_ends
    from k3stack.kernels.moe import triton as fast_moe
    from k3stack.kernels.moe import triton_route as fast_route
    from k3stack.kernels.mxfp4.weight import in_tiles
    from k3stack.kernels.norm import triton as fast_norm
    from k3stack.kernels.residual import triton as fast_residual

    return Kernels(
        name="triton",
        why="Triton kernels for CUDA; cuBLAS for plain products; torch for MLA of chunks"
        + ("" if launch.STARTS else f"; started by Triton {triton.__version__} itself, at more of the host's time"),
        pack=fast_linear.pack,
        stacker=stacked.Stacker,
        linear=fast_linear.linear,
        router_logits=fast_linear.router_logits,
        rms_norm=fast_norm.rms_norm,
        gated_rms_norm=fast_norm.gated_rms_norm,
        l2_norm=fast_norm.l2_norm,
        situ_glu=fast_activation.situ_glu,
        silu_glu=fast_activation.silu_glu,
        output_gate=fast_activation.output_gate,
        residual_mix=fast_residual.mix,
        conv_chunk=kda.conv_chunk,
        conv_decode=kda.conv_decode,
        log_decay=kda.log_decay,
        kda_prefill=kda.prefill,
        kda_decode=kda.decode,
        write_rows=mla_ends.write_rows,
        mla_attend=mla_cuda.attend,
        mla_decode=fast_mla.decode,
        route=fast_route.route,
        experts=fast_moe.experts,
        router_dtype=dtype,
        row_multiple=64,
        device_tables=True,
        stacked_experts=True,
        kda_step=fast_kda.decode_step,
        kda_chunks=fast_kda_chunk.chunks,
        mla_enter=mla_ends.enter,
        mla_gated=fast_mla.gated,
        arrange_experts=in_tiles if dtype == torch.bfloat16 else None,
        choose=fast_route.choose,
        experts_plus=fast_moe.experts_plus,
        linear_apart=fast_linear.linear_apart,
        linear_plus=fast_linear.linear_plus,
        linear_both=fast_linear.linear_both,
        add_norm=fast_norm.add_norm,
        mix_norm=fast_residual.mix_norm,
    )


def _layout(device: torch.device, dtype: torch.dtype) -> str:
    if linear.packs(dtype, device):
        return f"packed for oneDNN, which is faster in {dtype} than plain ones"
    return f"plain: on {device.type} in {dtype} nothing packs them"
