"""A model's gated activation as a value: callable, and readable by kernels that have it built in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Glu:
    """[..., gate | up] -> [...]. The two betas are SiTU's."""

    kind: Literal["situ", "silu"]
    beta: float
    linear_beta: float
    call: Callable[[Tensor], Tensor]

    def __call__(self, gate_up: Tensor) -> Tensor:
        return self.call(gate_up)
