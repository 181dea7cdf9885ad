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

    def attention_input(self, layer: int, norm: Tensor) -> Tensor:
        """[T, hidden], normalised with the weight ``norm`` [hidden]."""
        ...

    def attention_output(self, layer: int, y: Tensor) -> None: ...

    def ffn_input(self, layer: int, norm: Tensor) -> Tensor: ...

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
    """``x += attention(norm(x)); x += ffn(norm(x))``. Where one kernel adds and normalises, a block's output waits for
    the next norm."""

    def __init__(self, embedded: Tensor, kernels: Kernels, eps: float) -> None:
        self.x, self.kernels, self.eps = embedded, kernels, eps
        self._waiting: Tensor | None = None

    def attention_input(self, layer: int, norm: Tensor) -> Tensor:
        return self._normed(norm)

    def attention_output(self, layer: int, y: Tensor) -> None:
        self._join(y)

    def ffn_input(self, layer: int, norm: Tensor) -> Tensor:
        return self._normed(norm)

    def ffn_output(self, layer: int, y: Tensor) -> None:
        self._join(y)

    def current(self) -> Tensor:
        self._settle()
        return self.x

    def keep(self, tokens: Tensor) -> None:
        self._settle()
        self.x = self.x[tokens]

    def final(self) -> Tensor:
        self._settle()
        return self.x

    def _normed(self, norm: Tensor) -> Tensor:
        y, self._waiting = self._waiting, None
        if y is None or self.kernels.add_norm is None:
            return self.kernels.rms_norm(self.x, norm, self.eps)
        return self.kernels.add_norm(self.x, y, norm, self.eps)

    def _join(self, y: Tensor) -> None:
        self._settle()
        self._waiting = y
        if self.kernels.add_norm is None:
            self._settle()

    def _settle(self) -> None:
        if self._waiting is not None:
            self.x.add_(self._waiting)
            self._waiting = None


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
    Where one kernel adds, mixes and normalises, a block's output waits for the next mix.
    """

    def __init__(self, embedded: Tensor, scorers: ResidualScorers, kernels: Kernels, eps: float) -> None:
        self.scorers, self.kernels, self.eps = scorers, kernels, eps
        self.bank = embedded.new_empty(embedded.shape[0], scorers.rows + 1, embedded.shape[1])
        self.bank[:, 0] = embedded
        self.prefix = 0
        self._scores = scorers.weights[:, :, 0].flatten(0, 1).unbind()
        self._waiting: Tensor | None = None
        self._replaces = False

    def attention_input(self, layer: int, norm: Tensor) -> Tensor:
        return self._mix(self._scores[2 * layer], norm)

    def attention_output(self, layer: int, y: Tensor) -> None:
        if layer % self.scorers.block == 0:
            # The incoming prefix is frozen (the mix above did not see it as a bank row); the new one begins with y.
            self._settle()
            self.prefix += 1
            self._join(y, replaces=True)
        else:
            self._join(y, replaces=False)

    def ffn_input(self, layer: int, norm: Tensor) -> Tensor:
        return self._mix(self._scores[2 * layer + 1], norm)

    def ffn_output(self, layer: int, y: Tensor) -> None:
        self._join(y, replaces=False)

    def current(self) -> Tensor:
        self._settle()
        return self.bank[:, self.prefix]

    def keep(self, tokens: Tensor) -> None:
        self._settle()
        self.bank = self.bank[tokens]

    def final(self) -> Tensor:
        self._settle()
        return self.kernels.residual_mix(self.bank[:, : self.prefix + 1], self.scorers.output[0], self.scorers.eps)

    def _mix(self, score: Tensor, norm: Tensor) -> Tensor:
        rows = self.bank[:, : self.prefix + 1]
        if self.kernels.mix_norm is None:
            self._settle()
            return self.kernels.rms_norm(self.kernels.residual_mix(rows, score, self.scorers.eps), norm, self.eps)
        y, change = self._waiting, 0 if self._waiting is None else 1 + self._replaces
        self._waiting = None
        # ``y`` took more than one kernel, and all of them came after the last mix.
        _, normed = self.kernels.mix_norm(
            rows, y, change, score, self.scorers.eps, norm, self.eps, mixed=False, early=y is not None
        )
        assert normed is not None
        return normed

    def _join(self, y: Tensor, *, replaces: bool) -> None:
        """``y`` [T, hidden] is added to the prefix, or becomes it."""
        self._settle()
        self._waiting, self._replaces = y, replaces
        if self.kernels.mix_norm is None:
            self._settle()

    def _settle(self) -> None:
        """Bring the prefix up to date."""
        if self._waiting is None:
            return
        if self._replaces:
            self.bank[:, self.prefix] = self._waiting
        else:
            self.bank[:, self.prefix] += self._waiting
        self._waiting = None
