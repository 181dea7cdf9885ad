"""The whole network: embedding, layers joined by a residual stream, final norm, head.

Kimi-K3 and Kimi-Linear are one network with variants: the geometry decides per layer which attention and which
feed-forward block stands there, and which stream joins them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.config.geometry import ModelGeometry
from k3stack.config.tensors import TensorSpec
from k3stack.errors import BugError
from k3stack.kernels.linear.cpu import Packed
from k3stack.kernels.precision import wide_dtype
from k3stack.kernels.select import Kernels, select_kernels
from k3stack.models.batch import ForwardBatch
from k3stack.models.capture import Capture
from k3stack.models.layers.ffn import DenseFfn, MoeFfn
from k3stack.models.layers.kda import KdaAttention
from k3stack.models.layers.mla import MlaAttention
from k3stack.models.layers.part import Part, Slot, empty, matrix
from k3stack.models.layers.stream import PlainStream, ResidualScorers, ResidualStream, Stream
from k3stack.models.share import WHOLE, Share
from k3stack.models.views import ArenaViews


class Layer(Part):
    """Attention and feed-forward of one layer with their input norms."""

    def __init__(
        self,
        geometry: ModelGeometry,
        layer: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        latent_eps: float,
        share: Share,
    ) -> None:
        hidden = geometry.hidden
        self.input_norm = empty(hidden, dtype=dtype, device=device)
        self.post_norm = empty(hidden, dtype=dtype, device=device)
        self.attention: KdaAttention | MlaAttention
        if layer in geometry.kda_layers:
            self.attention = KdaAttention(geometry, geometry.kda_layers.index(layer), kernels, dtype, device)
        else:
            index = geometry.mla_layers.index(layer)
            self.attention = MlaAttention(geometry, index, kernels, dtype, device, latent_eps)
        self.ffn: DenseFfn | MoeFfn
        if layer < geometry.dense_layers:
            self.ffn = DenseFfn(geometry, kernels, dtype, device)
        else:
            self.ffn = MoeFfn(geometry, kernels, dtype, device, share)

    def slots(self) -> dict[str, Slot]:
        own = {"layer.input_norm": Slot(self.input_norm), "layer.post_attention_norm": Slot(self.post_norm)}
        return own | self.attention.slots() | self.ffn.slots()

    def finish(self) -> None:
        self.attention.finish()
        self.ffn.finish()


class Model(Part):
    """Weights (uninitialised until a loader fills them; see ``models.load``) and the forward pass."""

    PRODUCTS = ("lm_head",)

    def __init__(
        self,
        geometry: ModelGeometry,
        *,
        dtype: torch.dtype,
        device: torch.device,
        latent_norm_eps: float = 1e-6,
        share: Share = WHOLE,
    ) -> None:
        self.geometry, self.dtype, self.device = geometry, dtype, device
        self.latent_norm_eps, self.share = latent_norm_eps, share
        self.kernels = select_kernels(device, dtype, geometry)
        self.embed = empty(geometry.vocab, geometry.hidden, dtype=dtype, device=device)
        self.layers = [
            Layer(geometry, i, self.kernels, dtype, device, latent_norm_eps, share) for i in range(geometry.layers)
        ]
        self.scorers: ResidualScorers | None = None
        if geometry.residual_block is not None:
            self.scorers = ResidualScorers(geometry, self.kernels, dtype, device)
        self.norm = empty(geometry.hidden, dtype=dtype, device=device)
        self.lm_head = matrix(geometry.vocab, geometry.hidden, dtype=dtype, device=device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they lie in memory, without ``filling_bytes``."""
        return sum(w.nbytes for w in self.all_weights())

    @property
    def filling_bytes(self) -> int:
        """Bytes beside the weights' own, for which their layouts fill rows up to whole blocks."""
        return sum(w.filling for w in self.all_weights() if isinstance(w, Packed))

    def slots(self) -> dict[str, Slot]:
        own = {"embed": Slot(self.embed), "norm": Slot(self.norm), "lm_head": Slot(self.lm_head)}
        return own | (self.scorers.slots() if self.scorers is not None else {})

    def layer_slots(self, layer: int) -> dict[str, Slot]:
        """Destinations of the tensors of one layer, routed experts left out."""
        slots = self.layers[layer].slots()
        return slots | (self.scorers.layer_slots(layer) if self.scorers is not None else {})

    def expert_slot(self, spec: TensorSpec) -> Slot:
        """Destination of a routed expert's matrix (MXFP4: of the decoded one, or, packed, of codes or scales)."""
        if spec.layer is None or spec.expert is None:
            raise BugError(f"{spec.name} is not a routed expert's tensor")
        ffn = self.layers[spec.layer].ffn
        if not isinstance(ffn, MoeFfn):
            raise BugError(f"layer {spec.layer} has no routed experts")
        matrix, part = spec.kind.split(".")[2:]
        return ffn.expert_slot(spec.expert, matrix, part)

    def local_experts(self, layer: int) -> range:
        """Routed experts of an MoE layer that lie here."""
        ffn = self.layers[layer].ffn
        return ffn.local if isinstance(ffn, MoeFfn) else range(0)

    def materialise(self) -> None:
        """Give memory to all weights that have none yet, for who fills them in any order."""
        for place in self.places():
            weight = place.get()
            if isinstance(weight, Tensor) and weight.is_meta:
                place.put(torch.empty(weight.shape, dtype=weight.dtype, device=self.device))

    def finish(self) -> None:
        """Compute what is derived from the weights and pack those that are not; called once, by the loader."""
        for place in self.places():
            weight = place.get()
            if isinstance(weight, Tensor):
                place.pack(weight)
        for layer in self.layers:
            layer.finish()
        if self.scorers is not None:
            self.scorers.finish()

    def forward(self, batch: ForwardBatch, views: ArenaViews, capture: Capture | None = None) -> Tensor:
        """Run the batch's tokens; states and cache rows in the arena move on in place.

        Returns logits [N, vocab] of the tokens ``batch.logit_index``, float64 for float64 weights, else float32.
        """
        with torch.inference_mode():
            hidden = self._hidden(batch, views, capture)
        # Outside, so that callers get an ordinary tensor, which they may change in place.
        with torch.no_grad():
            return self.head(hidden)

    def embedded(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, hidden]."""
        return F.embedding(ids, self.embed)

    def head(self, normed: Tensor) -> Tensor:
        """[N, hidden] after the final norm -> logits [N, vocab]."""
        return self.kernels.linear(normed, self.lm_head).to(wide_dtype(self.dtype))

    def _hidden(self, batch: ForwardBatch, views: ArenaViews, capture: Capture | None) -> Tensor:
        """[N, hidden] after the final norm."""
        step, kernels, eps = batch.step, self.kernels, self.geometry.rms_eps
        stream = self.stream(self.embedded(batch.ids))
        for i, layer in enumerate(self.layers):
            tail = step.tail if i == len(self.layers) - 1 and capture is None else None
            x = stream.attention_input(i, layer.input_norm)
            y = layer.attention(x, step, views, tail)
            if tail is not None:
                stream.keep(tail.tokens)
                if not tail.lengths:
                    return y
            stream.attention_output(i, y)
            m = stream.ffn_input(i, layer.post_norm)
            z = layer.ffn(m, i, capture)
            stream.ffn_output(i, z)
            if capture is not None:
                seen = (("attn_in", x), ("attn_out", y), ("ffn_in", m), ("ffn_out", z), ("stream", stream.current()))
                for name, value in seen:
                    capture.put(name, i, value)
        if tail is None and batch.logit_index is not None:
            stream.keep(batch.logit_index)
        mixed = stream.final()
        normed = kernels.rms_norm(mixed, self.norm, eps)
        if capture is not None:
            capture.put("final_mix", None, mixed)
            capture.put("final_norm", None, normed)
        return normed

    def stream(self, embedded: Tensor) -> Stream:
        kernels, eps = self.kernels, self.geometry.rms_eps
        if self.scorers is None:
            return PlainStream(embedded, kernels, eps)
        return ResidualStream(embedded, self.scorers, kernels, eps)
