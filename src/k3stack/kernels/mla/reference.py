"""MLA expanded and token by token (architecture, section 2.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3stack.kernels.precision import widen


def attend(q: Tensor, rows: Tensor, kv_b: Tensor, start: int) -> Tensor:
    """Causal attention of T tokens at positions start.. over the sequence's cache rows.

    q [T, H, nope + shared], rows [start + T, latent + shared], kv_b [H, nope + v, latent] (Wk then Wv of each head)
    -> [T, H, v] in q's dtype. ``score = (q_n . Wk c + q_r . r) (nope + shared)^-0.5``, softmax in the wide dtype.
    """
    latent = kv_b.shape[2]
    nope = q.shape[-1] - (rows.shape[1] - latent)
    c, r = widen(rows[:, :latent]), widen(rows[:, latent:])
    wk, wv = widen(kv_b[:, :nope]), widen(kv_b[:, nope:])
    keys, values = torch.einsum("hnc,sc->hsn", wk, c), torch.einsum("hvc,sc->hsv", wv, c)
    out = torch.empty(q.shape[0], q.shape[1], wv.shape[1], dtype=c.dtype)
    for t in range(q.shape[0]):
        n = start + t + 1
        qt = widen(q[t])
        for h in range(q.shape[1]):
            s = (keys[h, :n] @ qt[h, :nope] + r[:n] @ qt[h, nope:]) * q.shape[-1] ** -0.5
            p = torch.exp(s - s.max())
            out[t, h] = (p / p.sum()) @ values[h, :n]
    return out.to(q.dtype)
