"""MLA of chunks on a GPU: expanded keys and values, and torch's fused attention where it takes the dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from k3stack.kernels.mla import cpu


def attend(q: Tensor, rows: Tensor, kv_b: Tensor, start: int) -> Tensor:
    """Causal attention of one sequence's chunk; see ``reference.attend`` for shapes."""
    if q.dtype != torch.bfloat16:
        return cpu.attend(q, rows, kv_b, start)
    count, heads, width = q.shape
    latent = kv_b.shape[2]
    nope = width - (rows.shape[1] - latent)
    rows = rows.to(q.dtype)
    expanded = (rows[:, :latent] @ kv_b.view(-1, latent).T).view(rows.shape[0], heads, -1).transpose(0, 1)
    keys = torch.cat([expanded[..., :nope], rows[:, latent:].expand(heads, -1, -1)], dim=-1)
    # The fused kernel wants values as wide as keys.
    values = F.pad(expanded[..., nope:], (0, width - (expanded.shape[2] - nope)))
    mask = causal_lower_right(count, rows.shape[0])
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=width**-0.5
    )
    return out[0].transpose(0, 1)[..., : expanded.shape[2] - nope]
