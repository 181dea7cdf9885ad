"""The KDA recurrence with gradients: fla's chunked kernels on a GPU, a chunked torch form elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

CHUNK = 32


def import_chunk_kda(configs: int = 1) -> Any:
    """fla's ``chunk_kda``, with its autotuning cut to ``configs`` candidates a kernel.

    The full search takes minutes on a fresh machine. Candidates with four warps and two stages come first.
    """
    import fla.ops.utils.cache as cache

    original = cache.fla_cache_autotune

    def fewer(configs_given: list[Any], *args: Any, **kwargs: Any) -> Any:
        ranked = sorted(configs_given, key=lambda c: (abs(c.num_warps - 4), abs(c.num_stages - 2)))
        return original(ranked[:configs], *args, **kwargs)

    cache.fla_cache_autotune = fewer
    from fla.ops.kda import chunk_kda

    return chunk_kda


def chunk_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: list[int]) -> Tensor:
    """Outputs [T, H, V] for q, k, g [T, H, K], v [T, H, V], beta [T, H]; sequences end at ``cu``.

    q is scaled already; g is the log decay of each token (the form of the architecture's section on chunked prefill;
    only differences of summed decays are exponentiated, all of them <= 0).
    """
    parts = [_sequence(*(x[a:b] for x in (q, k, v, g, beta))) for a, b in itertools.pairwise(cu)]
    return torch.cat(parts)


def _sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    length, heads, width = q.shape
    pad = -length % CHUNK
    if pad:
        q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
        beta = torch.nn.functional.pad(beta, (0, 0, 0, pad))
    count = (length + pad) // CHUNK
    q, k, v, g = (x.view(count, CHUNK, heads, -1).permute(0, 2, 1, 3) for x in (q, k, v, g))  # [N, H, C, .]
    beta = beta.view(count, CHUNK, heads).permute(0, 2, 1)
    c = g.cumsum(2)
    delta = (c[:, :, :, None] - c[:, :, None]).clamp(max=0).exp()  # [N, H, i, j, K]; j > i is masked below
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    inner = torch.einsum("nhik,nhjk,nhijk->nhij", k, k, delta) * beta[..., None]
    system = inner.masked_fill(~lower.tril(-1), 0) + torch.eye(CHUNK, device=q.device, dtype=q.dtype)
    score = torch.einsum("nhik,nhjk,nhijk->nhij", q, k, delta).masked_fill(~lower, 0)
    decayed = k * c.exp() * beta[..., None]
    solved = torch.linalg.solve_triangular(system, torch.cat((v * beta[..., None], decayed), -1), upper=False)
    u, w = solved.split((v.shape[-1], width), -1)
    state = q.new_zeros(heads, width, v.shape[-1])
    out = []
    for n in range(count):
        new = u[n] - w[n] @ state
        out.append((q[n] * c[n].exp()) @ state + score[n] @ new)
        last = c[n, :, -1:]
        state = last.exp().transpose(1, 2) * state + (k[n] * (last - c[n]).exp()).transpose(1, 2) @ new
    return torch.stack(out).permute(0, 2, 1, 3).reshape(count * CHUNK, heads, -1)[:length]
