"""How layers are joined: the ordinary residual stream, and Attention Residuals (architecture, section 2.2)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from k3stack.config.geometry import ModelGeometry
from k3stack.kernels.precision import wide_dtype
from k3stack.kernels.select import Kernels
from k3stack.models.layers.part import Part, Slot, empty


class Stream(Protocol):
    """What flows between the layers in one forward pass."""

    def attention_input(self, layer: int) -> Tensor:
        """[T, hidden], before the layer's input norm."""
        ...

    def attention_output(self, layer: int, y: Tensor) -> None: ...

    def ffn_input(self, layer: int) -> Tensor: ...

    def ffn_output(self, layer: int, y: Tensor) -> None: ...

    def current(self) -> Tensor:
        """The stream (or running prefix) as it stands."""
        ...

    def keep(self, tokens: Tensor) -> None:
        """Go on with these tokens alone, in this order."""
        ...

    def final(self) -> Tensor:
        """[T, hidden] of the tokens kept, before the final norm."""
        ...


class PlainStream:
    """``x += attention(norm(x)); x += ffn(norm(x))``."""

    def __init__(self, embedded: Tensor) -> None:
        self.x = embedded

    def attention_input(self, layer: int) -> Tensor:
        return self.x

    def attention_output(self, layer: int, y: Tensor) -> None:
        self.x.add_(y)

    def ffn_input(self, layer: int) -> Tensor:
        return self.x

    def ffn_output(self, layer: int, y: Tensor) -> None:
        self.x.add_(y)

    def current(self) -> Tensor:
        return self.x

    def keep(self, tokens: Tensor) -> None:
        self.x = self.x[tokens]

    def final(self) -> Tensor:
        return self.x


class ResidualScorers(Part):
    """Attention Residuals' score vectors: norm weight times scorer, for two mixes a layer and one at the end."""

    def __init__(self, geometry: ModelGeometry, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        if geometry.residual_block is None:
            raise ValueError("this model has an ordinary residual stream")
        self.kernels, self.eps = kernels, geometry.rms_eps
        self.block, self.rows = geometry.residual_block, geometry.residual_rows
        wide = wide_dtype(dtype)
        # [layer, attention | ffn, norm | scorer, hidden]; the norm's rows become the products in finish().
        self.weights = empty(geometry.layers, 2, 2, geometry.hidden, dtype=wide, device=device)
        self.output = empty(2, geometry.hidden, dtype=wide, device=device)

    def slots(self) -> dict[str, Slot]:
        return {
            "residual.output_norm": Slot(self.output[0]),
            "residual.output_proj": Slot(self.output[1:]),
        }

    def layer_slots(self, layer: int) -> dict[str, Slot]:
        w = self.weights[layer]
        return {
            "residual.attn_norm": Slot(w[0, 0]),
            "residual.attn_proj": Slot(w[0, 1:]),
            "residual.mlp_norm": Slot(w[1, 0]),
            "residual.mlp_proj": Slot(w[1, 1:]),
        }

    def finish(self) -> None:
        self.weights[:, :, 0] *= self.weights[:, :, 1]
        self.output[0] *= self.output[1]


class ResidualStream:
    """A token's bank rows and its running prefix, side by side in one buffer [T, rows + 1, hidden].

    The prefix is the last row in use. Opening a block freezes it as a bank row, and the next row becomes the prefix.
    """

    def __init__(self, embedded: Tensor, scorers: ResidualScorers) -> None:
        self.scorers = scorers
        self.bank = embedded.new_empty(embedded.shape[0], scorers.rows + 1, embedded.shape[1])
        self.bank[:, 0] = embedded
        self.prefix = 0

    def _mix(self, score: Tensor) -> Tensor:
        return self.scorers.kernels.residual_mix(self.bank[:, : self.prefix + 1], score, self.scorers.eps)

    def attention_input(self, layer: int) -> Tensor:
        return self._mix(self.scorers.weights[layer, 0, 0])

    def attention_output(self, layer: int, y: Tensor) -> None:
        if layer % self.scorers.block == 0:
            # The incoming prefix is frozen (the mix above did not see it as a bank row); the new one begins with y.
            self.prefix += 1
            self.bank[:, self.prefix] = y
        else:
            self.bank[:, self.prefix] += y

    def ffn_input(self, layer: int) -> Tensor:
        return self._mix(self.scorers.weights[layer, 1, 0])

    def ffn_output(self, layer: int, y: Tensor) -> None:
        self.bank[:, self.prefix] += y

    def current(self) -> Tensor:
        return self.bank[:, self.prefix]

    def keep(self, tokens: Tensor) -> None:
        self.bank = self.bank[tokens]

    def final(self) -> Tensor:
        return self._mix(self.scorers.output[0])
