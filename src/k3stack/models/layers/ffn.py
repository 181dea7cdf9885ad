"""Feed-forward blocks: the dense MLP, and the mixture of experts with its router, latent width and shared MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3stack.config.geometry import ModelGeometry
from k3stack.config.tensors import MXFP4_GROUP, PACKED_PER_BYTE
from k3stack.kernels.activation.glu import Glu
from k3stack.kernels.mxfp4.weight import Mxfp4Weight
from k3stack.kernels.precision import wide_dtype
from k3stack.kernels.select import Kernels
from k3stack.models.capture import Capture
from k3stack.models.exchange import Exchange
from k3stack.models.layers.part import Part, Slot, empty, matrix
from k3stack.models.share import WHOLE, Share

JOINED_ROWS = 64
"""Tokens up to which the products of a block's input are one."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Router, latent product, and gate and up of the shared MLP as one weight, of which they are parts."""

    weight: Tensor
    sizes: tuple[int, int, int]


def shared_width_of(geometry: ModelGeometry, share: Share) -> int:
    """Of the shared MLP here; 0: there is none."""
    return geometry.moe.shared_width // share.tp if geometry.moe.shared_experts else 0


def glu(geometry: ModelGeometry, kernels: Kernels) -> Glu:
    """The model's gated activation: [..., gate | up] -> [...]."""
    beta, linear_beta = geometry.situ_beta, geometry.situ_linear_beta
    if geometry.activation == "silu":
        return Glu("silu", beta, linear_beta, kernels.silu_glu)
    return Glu("situ", beta, linear_beta, lambda gate_up: kernels.situ_glu(gate_up, beta, linear_beta))


class Mlp(Part):
    """``down(act(gate x, up x))``; gate and up are one weight."""

    PRODUCTS = ("w13", "w2")

    def __init__(
        self,
        kind: str,
        hidden: int,
        width: int,
        kernels: Kernels,
        act: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        w13: Tensor | None = None,
    ) -> None:
        """``w13``: its place, where it is a part of a larger weight."""
        self.kind, self.width, self.kernels, self.act = kind, width, kernels, act
        self.w13 = matrix(2 * width, hidden, dtype=dtype, device=device) if w13 is None else w13
        self.w2 = matrix(hidden, width, dtype=dtype, device=device)

    def slots(self) -> dict[str, Slot]:
        return {
            f"{self.kind}.gate_proj": Slot(self.w13[: self.width]),
            f"{self.kind}.up_proj": Slot(self.w13[self.width :]),
            f"{self.kind}.down_proj": Slot(self.w2),
        }

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.kernels.linear(self.act(self.kernels.linear(x, self.w13)), self.w2)


def _expert_weights(
    geometry: ModelGeometry, count: int, width: int, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Any]:
    """gate and up, then down, of ``count`` experts as ``Kernels.stacked_experts`` has them."""
    inner = geometry.moe.expert_width
    shapes = ((2 * inner, width), (width, inner))
    if not kernels.stacked_experts:
        # One tensor an expert, so that each can be laid out for the product by itself.
        w13, w2 = ([matrix(*shape, dtype=dtype, device=device) for _ in range(count)] for shape in shapes)
        return w13, w2
    if not geometry.moe.mxfp4:
        w13, w2 = (empty(count, *shape, dtype=dtype, device=device) for shape in shapes)
        return w13, w2
    w13, w2 = (
        Mxfp4Weight(
            empty(count, rows, columns // PACKED_PER_BYTE, dtype=torch.uint8, device=device),
            empty(count, rows, columns // MXFP4_GROUP, dtype=torch.uint8, device=device),
        )
        for rows, columns in shapes
    )
    return w13, w2


class DenseFfn(Part):
    """The dense feed-forward of the first layers."""

    def __init__(self, geometry: ModelGeometry, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        act = glu(geometry, kernels)
        self.mlp = Mlp("dense", geometry.hidden, geometry.dense_width, kernels, act, dtype, device)

    def slots(self) -> dict[str, Slot]:
        return self.mlp.slots()

    def __call__(self, x: Tensor, layer: int, capture: Capture | None) -> Tensor:
        return self.mlp(x)

    def sharded(self, x: Tensor, exchange: Exchange) -> Tensor:
        """x [S, hidden] -> [S, hidden] of the rank's share of tokens."""
        return exchange.scatter(self.mlp(*exchange.gather(x)))[0]


class MoeFfn(Part):
    """Routed experts (in the latent width where there is one) plus the shared MLP on the full width."""

    PRODUCTS = ("router", "w13", "w2", "down", "up")

    def __init__(
        self,
        geometry: ModelGeometry,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        share: Share = WHOLE,
    ) -> None:
        moe, hidden = geometry.moe, geometry.hidden
        self.moe, self.kernels, self.eps = moe, kernels, geometry.rms_eps
        self.act = glu(geometry, kernels)
        width = moe.latent or hidden
        shared_width = shared_width_of(geometry, share)
        sizes = (moe.experts, moe.latent or 0, 2 * shared_width)
        self.joined: Joined | None = None
        if kernels.choose is not None and dtype == kernels.router_dtype == torch.bfloat16:
            self.joined = Joined(matrix(sum(sizes), hidden, dtype=dtype, device=device), sizes)
        router, down, w13 = (None, None, None) if self.joined is None else self.joined.weight.split(list(sizes))
        # Router scores are summed in the wide dtype, of exact products.
        if router is None:
            router = matrix(moe.experts, hidden, dtype=kernels.router_dtype, device=device)
        self.router = router
        self.bias = empty(moe.experts, dtype=wide_dtype(dtype), device=device)
        self.local = share.experts(moe.experts)
        self.w13, self.w2 = _expert_weights(geometry, len(self.local), width, kernels, dtype, device)
        lists = {"w13": self.w13, "w2": self.w2} if not kernels.stacked_experts else {}
        self.stackers = {name: kernels.stacker(weights) for name, weights in lists.items()}
        if moe.latent is not None:
            self.down = matrix(moe.latent, hidden, dtype=dtype, device=device) if down is None else down
            self.up = matrix(hidden, moe.latent, dtype=dtype, device=device)
            self.latent_norm = empty(moe.latent, dtype=dtype, device=device) if moe.latent_norm else None
        self.shared = None
        if moe.shared_experts:
            self.shared = Mlp("moe.shared", hidden, shared_width, kernels, self.act, dtype, device, w13)

    def slots(self) -> dict[str, Slot]:
        slots = {"moe.router": Slot(self.router), "moe.router_bias": Slot(self.bias)}
        if self.moe.latent is not None:
            slots |= {"moe.latent_down": Slot(self.down), "moe.latent_up": Slot(self.up)}
            if self.latent_norm is not None:
                slots["moe.latent_norm"] = Slot(self.latent_norm)
        return slots | (self.shared.slots() if self.shared is not None else {})

    def expert_slot(self, expert: int, matrix: str, part: str = "weight") -> Slot:
        """Destination of matrix 'w1' (gate), 'w2' (down) or 'w3' (up) of one expert; where they stay packed, of its
        ``part`` 'packed' or 'scale'."""
        weights: Any = self.w2 if matrix == "w2" else self.w13
        if isinstance(weights, Mxfp4Weight):
            weights = weights.scale if part == "scale" else weights.packed
        own = weights[expert - self.local.start]
        if matrix == "w2":
            return Slot(own)
        width = self.moe.expert_width
        return Slot(own[:width] if matrix == "w1" else own[width:])

    def finish(self) -> None:
        for name, stacker in self.stackers.items():
            setattr(self, name, stacker.finish(getattr(self, name)))
        self.stackers = {}
        if isinstance(self.w13, Mxfp4Weight) and self.kernels.arrange_experts is not None:
            self.w13, self.w2 = self.kernels.arrange_experts(self.w13, self.w2)

    def __call__(self, x: Tensor, layer: int, capture: Capture | None) -> Tensor:
        """x [T, hidden] (normed) -> [T, hidden]."""
        if self.joined is not None and capture is None and x.shape[0] <= JOINED_ROWS:
            return self._few(x, self.joined)
        moe = self.moe
        logits = self.kernels.router_logits(x, self.router)
        forced = capture.forced(layer) if capture is not None else None
        ids, weights = self.kernels.route(logits, self.bias, moe.top_k, moe.scaling_factor, moe.renormalize, forced)
        if capture is not None:
            capture.put("router_ids", layer, ids)
            capture.put("router_weights", layer, weights)
            capture.put("router_scores", layer, torch.sigmoid(logits) + self.bias)
        z = x if moe.latent is None else self.kernels.linear(x, self.down)
        routed = self._experts(z, ids, weights)
        if moe.latent is not None:
            routed = self.kernels.linear(routed, self.up)
        return routed if self.shared is None else routed.add_(self.shared(x))

    def sharded(self, x: Tensor, exchange: Exchange) -> Tensor:
        """x [S, hidden] -> [S, hidden] of the rank's share of tokens: router and latent projections run on the share,
        the rank's experts and its part of the shared MLP on all tokens."""
        moe, kernels = self.moe, self.kernels
        logits = kernels.router_logits(x, self.router)
        choice = kernels.route(logits, self.bias, moe.top_k, moe.scaling_factor, moe.renormalize)
        z = x if moe.latent is None else kernels.linear(x, self.down)
        if moe.latent is None:
            x, ids, weights = exchange.gather(x, *choice)
            z = x
        else:
            x, z, ids, weights = exchange.gather(x, z, *choice)
        partials = [kernels.experts(z, ids, weights, self.w13, self.w2, self.act, *self._own)]
        if self.shared is not None:
            partials.append(self.shared(x))
        routed, *shared = exchange.scatter(*partials)
        if moe.latent is not None:
            if self.latent_norm is not None:
                routed = kernels.rms_norm(routed, self.latent_norm, self.eps)
            routed = kernels.linear(routed, self.up)
        return routed + shared[0] if shared else routed

    @property
    def _own(self) -> tuple[int, int] | tuple[()]:
        """The first expert here and how many there are; nothing: all are here."""
        return (self.local.start, self.moe.experts) if len(self.local) < self.moe.experts else ()

    def _experts(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums [T, latent or hidden] of the experts here, normed where the model norms them."""
        moe = self.moe
        routed = self.kernels.experts(z, ids, weights, self.w13, self.w2, self.act, *self._own)
        if moe.latent is None or self.latent_norm is None:
            return routed
        return self.kernels.rms_norm(routed, self.latent_norm, self.eps)

    def _few(self, x: Tensor, joined: Joined) -> Tensor:
        """The same for few tokens: all products of x are one."""
        moe, kernels = self.moe, self.kernels
        assert kernels.choose is not None
        assert kernels.linear_plus is not None
        assert kernels.linear_both is not None
        products = None if kernels.linear_apart is None else kernels.linear_apart(x, joined.weight)
        if products is None:
            products = kernels.router_logits(x, joined.weight)
        ids, weights, latent, hidden = kernels.choose(
            products, self.bias, joined.sizes, self.act, moe.top_k, moe.scaling_factor, moe.renormalize
        )
        if moe.latent is None and self.shared is not None and kernels.experts_plus is not None:
            given = (x, ids, weights, self.w13, self.w2, self.act, (hidden, self.shared.w2))
            return kernels.experts_plus(*given, *self._own)
        routed = self._experts(x if moe.latent is None else latent, ids, weights)
        if self.shared is None:
            return routed if moe.latent is None else kernels.linear(routed, self.up)
        if moe.latent is None:
            return kernels.linear_plus(hidden, self.shared.w2, routed)
        return kernels.linear_both(routed, self.up, hidden, self.shared.w2)
