"""Products on a GPU: plain weights, cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack(weight: Tensor) -> Tensor:
    """The weight as it is."""
    return weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``reference.linear``."""
    return F.linear(x, weight)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, hidden], weight [E, hidden] in x's dtype -> fp32 [T, E]; bfloat16 products are summed and kept in fp32."""
    if x.dtype == torch.bfloat16 and x.device.type == "cuda":
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
