"""KDA token by token, as its formulas stand (architecture, section 2.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv(raw: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then SiLU, of one sequence.

    raw [T, C] (projections), weight [taps, C] (the last tap meets the current token), window [taps - 1, C] (the raw
    projections before, oldest first) -> (y [T, C], the next window), all in weight's dtype.
    """
    taps = weight.shape[0]
    x = torch.cat([window, raw]).to(weight.dtype)
    y = torch.stack([(x[t : t + taps] * weight).sum(0) for t in range(raw.shape[0])])
    return y / (1 + torch.exp(-y)), x[x.shape[0] - taps + 1 :]


def log_decay(z: Tensor, exp_a: Tensor, lower_bound: float | None) -> Tensor:
    """z [T, H, K] (projection + dt_bias), exp_a [H] = exp(A_log) -> log decay g <= 0 [T, H, K].

    Bounded: ``bound * sigmoid(exp_a z)``; unbounded: ``-exp_a * softplus(z)``.
    """
    a = exp_a[:, None]
    if lower_bound is not None:
        return lower_bound / (1 + torch.exp(-a * z))
    return -a * (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule of one sequence.

    q, k [T, H, K] (L2-normalised; q is multiplied by K^-0.5 here), v [T, H, V], g [T, H, K] log decay, beta [T, H],
    state [H, K, V] -> (o [T, H, V], the state after). The state decays first, the prediction uses the decayed state,
    the output is read after the update.
    """
    s = state.clone()
    out = []
    for t in range(q.shape[0]):
        s = s * torch.exp(g[t])[..., None]
        d = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t][..., None] * d[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", s, q[t] * q.shape[-1] ** -0.5))
    return torch.stack(out), s
