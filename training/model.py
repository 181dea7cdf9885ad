"""K3-nano in training form: the architecture of Kimi-K3 over one flat stream of packed sequences.

Parameters are float32 masters. A forward pass rounds matrices to bfloat16 (float32 on a CPU), and experts to MXFP4,
so that what is exported is what was trained. Element-wise parts are small functions that ``torch.compile`` fuses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import kda, mxfp4


@dataclass(frozen=True)
class NanoConfig:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 9
    heads: int = 8
    kda_dim: int = 32
    q_rank: int = 128
    kv_rank: int = 96
    nope: int = 32
    shared_key: int = 32
    v_dim: int = 32
    dense_width: int = 768
    experts: int = 32
    top_k: int = 4
    latent: int = 64
    expert_width: int = 256
    shared_experts: int = 1
    block: int = 4
    eps: float = 1e-5
    latent_eps: float = 1e-6
    gate_bound: float = -5.0
    situ_beta: float = 4.0
    situ_linear: float = 25.0

    @property
    def mla_layers(self) -> list[int]:
        """0-based: every fourth layer and the last."""
        return [i for i in range(self.layers) if i % 4 == 3 or i == self.layers - 1]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def situ(gate_up: Tensor, beta: float, linear: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    out = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear * torch.tanh(up / linear)
    return out.to(gate_up.dtype)


def mix(rows: list[Tensor], weight: Tensor, score: Tensor, eps: float) -> Tensor:
    """Softmax-weighted mean of the bank rows and the running prefix (the last of ``rows``)."""
    both = weight.to(rows[0].dtype).float() * score.to(rows[0].dtype).float()
    scores = []
    for row in rows:
        wide = row.float()
        scores.append((wide * both).sum(-1) * torch.rsqrt(wide.square().mean(-1) + eps))
    share = torch.stack(scores, -1).softmax(-1)
    total = rows[0].float() * share[:, :1]
    for i in range(1, len(rows)):
        total = total + rows[i].float() * share[:, i : i + 1]
    return total.to(rows[0].dtype)


def conv_silu(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Depthwise causal convolution over the flat stream [N, C]; a tap before a sequence's start counts as zero."""
    taps = weight.shape[-1]
    out = x.float() * weight[:, -1]
    for back in range(1, taps):
        moved = F.pad(x, (0, 0, back, 0))[: x.shape[0]].float()
        out = out + torch.where(position[:, None] >= back, moved, 0.0) * weight[:, taps - 1 - back]
    return F.silu(out)


def kda_inputs(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    position: Tensor,
    heads: int,
    bound: float,
) -> tuple[Tensor, ...]:
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in conv_silu(qkv, conv, position).chunk(3, -1))
    width = q.shape[-1]
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * width**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    z = (f.float() + dt_bias).unflatten(-1, (heads, -1))
    g = bound * torch.sigmoid(a_log.exp()[:, None] * z)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype), g, torch.sigmoid(b.float())


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    wide = o.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(-2) * torch.sigmoid(gate.float())).to(gate.dtype)


class Permute(torch.autograd.Function):
    """Rows in another order; the gradient goes back by the inverse order instead of by atomic adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.order = order
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, in] sorted by expert, weight [E, out, in] -> [M, out]; ``ends`` int32 [E] are the groups' ends."""
    if x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.transpose(-1, -2), offs=ends)
    parts, start = [], 0
    for e, end in enumerate(ends.tolist()):
        parts.append(x[start:end] @ weight[e].T)
        start = end
    return torch.cat(parts)


class Batch:
    """One packed stream on the device: ids and positions [N], sequence ends, and what to predict where."""

    def __init__(self, data: dict[str, Any], device: torch.device) -> None:
        def put(name: str, dtype: torch.dtype) -> Tensor:
            tensor = torch.from_numpy(data[name].astype("int64" if dtype == torch.int64 else data[name].dtype))
            return tensor.to(dtype).to(device, non_blocking=True)

        self.cu_list: list[int] = data["cu"].tolist()
        self.cu_cpu = torch.tensor(self.cu_list, dtype=torch.int32)
        self.cu = self.cu_cpu.to(device)
        self.longest = max(b - a for a, b in zip(self.cu_list, self.cu_list[1:], strict=False))
        self.ids = put("ids", torch.int64)
        self.position = put("position", torch.int32)
        self.where = put("where", torch.int64)
        self.target = put("target", torch.int64)
        self.weight = put("weight", torch.float32)
        self.turn = data["turn"]
        self.kind = data["kind"]


def _matrix(out: int, inp: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(out, inp) * gain / math.sqrt(inp))


class Kda(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        width = c.heads * c.kda_dim
        for name in ("q", "k", "v", "g"):
            setattr(self, name, _matrix(width, c.hidden))
        self.o = _matrix(c.hidden, width, 0.5)
        self.f_a, self.f_b = _matrix(c.kda_dim, c.hidden), _matrix(width, c.kda_dim, 0.5)
        self.b = _matrix(c.heads, c.hidden)
        self.conv = nn.Parameter(torch.randn(3 * width, 4) * 0.25 + torch.tensor([0.0, 0.0, 0.0, 0.6]))
        self.a_log = nn.Parameter(torch.zeros(c.heads))
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-9.0, 0.0))
        self.norm = nn.Parameter(torch.ones(c.kda_dim))

    def forward(self, n: Tensor, batch: Batch, ops: Ops) -> Tensor:
        c = self.c
        width = c.heads * c.kda_dim
        weights = torch.cat([w.to(n.dtype) for w in (self.q, self.k, self.v, self.g, self.f_a, self.b)])
        qkv, gate, low, b = (n @ weights.T).split((3 * width, width, c.kda_dim, c.heads), -1)
        f = low @ self.f_b.to(n.dtype).T
        q, k, v, g, beta = ops.kda_inputs(
            qkv, f, b, self.conv, self.a_log, self.dt_bias, batch.position, c.heads, c.gate_bound
        )
        o = ops.recurrence(q, k, v, g, beta, batch)
        return ops.gated_norm(o, self.norm, gate, c.eps) @ self.o.to(n.dtype).T


class Mla(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.q_a, self.q_b = _matrix(c.q_rank, c.hidden), _matrix(c.heads * (c.nope + c.shared_key), c.q_rank)
        self.kv_a = _matrix(c.kv_rank + c.shared_key, c.hidden)
        self.kv_b = _matrix(c.heads * (c.nope + c.v_dim), c.kv_rank)
        self.g, self.o = _matrix(c.heads * c.v_dim, c.hidden), _matrix(c.hidden, c.heads * c.v_dim, 0.5)
        self.q_norm, self.kv_norm = nn.Parameter(torch.ones(c.q_rank)), nn.Parameter(torch.ones(c.kv_rank))

    def forward(self, n: Tensor, batch: Batch, ops: Ops) -> Tensor:
        c = self.c
        first = torch.cat([w.to(n.dtype) for w in (self.q_a, self.kv_a, self.g)])
        low, latent, shared, gate = (n @ first.T).split((c.q_rank, c.kv_rank, c.shared_key, c.heads * c.v_dim), -1)
        q = (ops.rms(low, self.q_norm, c.latent_eps) @ self.q_b.to(n.dtype).T).unflatten(-1, (c.heads, -1))
        kv = (ops.rms(latent, self.kv_norm, c.latent_eps) @ self.kv_b.to(n.dtype).T).unflatten(-1, (c.heads, -1))
        k_own, v = kv.split((c.nope, c.v_dim), -1)
        k = torch.cat((k_own, shared[:, None].expand(-1, c.heads, -1)), -1)
        o = ops.attention(q, k, v, batch).flatten(-2)
        return (o * torch.sigmoid(gate.float()).to(n.dtype)) @ self.o.to(n.dtype).T


class Mlp(nn.Module):
    def __init__(self, c: NanoConfig, width: int) -> None:
        super().__init__()
        self.c = c
        self.gate, self.up, self.down = (
            _matrix(width, c.hidden),
            _matrix(width, c.hidden),
            _matrix(c.hidden, width, 0.5),
        )

    def forward(self, m: Tensor, ops: Ops) -> Tensor:
        both = torch.cat((self.gate, self.up)).to(m.dtype)
        return ops.situ(m @ both.T, self.c.situ_beta, self.c.situ_linear) @ self.down.to(m.dtype).T


class Moe(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.router = _matrix(c.experts, c.hidden)
        self.register_buffer("bias", torch.zeros(c.experts))
        self.down, self.up = _matrix(c.latent, c.hidden), _matrix(c.hidden, c.latent, 0.5)
        shape = (c.experts, c.expert_width, c.latent)
        self.w1 = nn.Parameter(torch.randn(shape) / math.sqrt(c.latent))
        self.w3 = nn.Parameter(torch.randn(shape) / math.sqrt(c.latent))
        self.w2 = nn.Parameter(torch.randn(c.experts, c.latent, c.expert_width) / math.sqrt(c.expert_width))
        self.norm = nn.Parameter(torch.ones(c.latent))
        self.shared = Mlp(c, c.shared_experts * c.expert_width)
        self.load: Tensor | None = None

    def forward(self, m: Tensor, ops: Ops) -> Tensor:
        c = self.c
        scores = torch.sigmoid(m.float() @ self.router.to(m.dtype).float().T)
        chosen = (scores.detach() + self.bias).topk(c.top_k, -1).indices
        picked = scores.gather(1, chosen)
        weight = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = (
            torch.bincount(flat, minlength=c.experts)
            if not m.is_cuda
            else torch.zeros(c.experts, dtype=torch.int64, device=m.device).scatter_add_(0, flat, torch.ones_like(flat))
        )
        self.load = counts
        ends = counts.cumsum(0).to(torch.int32)
        z = m @ self.down.to(m.dtype).T
        x = Permute.apply(z[:, None].expand(-1, c.top_k, -1).reshape(-1, c.latent), order, inverse)
        w13 = ops.fake(torch.cat((self.w1, self.w3), 1)).to(m.dtype)
        h = ops.situ(grouped(x, w13, ends), c.situ_beta, c.situ_linear)
        y = Permute.apply(grouped(h, ops.fake(self.w2).to(m.dtype), ends), inverse, order)
        summed = (y.unflatten(0, (-1, c.top_k)).float() * weight[..., None]).sum(1).to(m.dtype)
        return ops.rms(summed, self.norm, c.eps) @ self.up.to(m.dtype).T + self.shared(m, ops)


class Layer(nn.Module):
    def __init__(self, c: NanoConfig, index: int) -> None:
        super().__init__()
        self.attn: nn.Module = Mla(c) if index in c.mla_layers else Kda(c)
        self.ff: nn.Module = Mlp(c, c.dense_width) if index == 0 else Moe(c)
        for name in ("attn_norm", "ff_norm", "attn_res_norm", "ff_res_norm"):
            setattr(self, name, nn.Parameter(torch.ones(c.hidden)))
        self.attn_res, self.ff_res = nn.Parameter(torch.zeros(c.hidden)), nn.Parameter(torch.zeros(c.hidden))


class Ops:
    """The functions a forward pass is made of: fused on a GPU, plain torch elsewhere."""

    def __init__(self, device: torch.device, *, compiled: bool) -> None:
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.rms, self.situ, self.mix = wrap(rms), wrap(situ), wrap(mix)
        self.kda_inputs, self.gated_norm, self.fake = wrap(kda_inputs), wrap(gated_norm), wrap(mxfp4.fake)
        self.chunk_kda = kda.import_chunk_kda() if self.cuda else None

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch) -> Tensor:
        if self.chunk_kda is None:
            return kda.chunk_torch(q, k, v, g, beta, batch.cu_list)
        extra = (x[None].contiguous() for x in (q, k, v, g, beta))
        out, _ = self.chunk_kda(
            *extra,
            scale=1.0,
            safe_gate=True,
            lower_bound=-5.0,
            disable_recompute=True,
            cu_seqlens=batch.cu,
            cu_seqlens_cpu=batch.cu_cpu,
        )
        return out[0]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Causal attention inside each sequence: q, k [N, H, d], v [N, H, dv] -> [N, H, dv]."""
        scale = q.shape[-1] ** -0.5
        if not self.cuda:
            parts = []
            for a, b in zip(batch.cu_list, batch.cu_list[1:], strict=False):
                one = F.scaled_dot_product_attention(
                    q[a:b].transpose(0, 1), k[a:b].transpose(0, 1), v[a:b].transpose(0, 1), is_causal=True, scale=scale
                )
                parts.append(one.transpose(0, 1))
            return torch.cat(parts)
        wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out = torch.ops.aten._flash_attention_forward(
            q.contiguous(),
            k.contiguous(),
            wide.contiguous(),
            batch.cu,
            batch.cu,
            batch.longest,
            batch.longest,
            0.0,
            True,
            False,
            scale=scale,
        )[0]
        return out[..., : v.shape[-1]]


class Nano(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.5)
        self.head = nn.Parameter(torch.randn(c.vocab, c.hidden) / math.sqrt(c.hidden))
        self.layers = nn.ModuleList([Layer(c, i) for i in range(c.layers)])
        self.norm, self.res_norm = nn.Parameter(torch.ones(c.hidden)), nn.Parameter(torch.ones(c.hidden))
        self.res = nn.Parameter(torch.zeros(c.hidden))

    def hidden(self, batch: Batch, ops: Ops) -> Tensor:
        """Normed hidden states [N, D] before the head."""
        c = self.c
        p = self.embed[batch.ids].to(ops.dtype)
        bank: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            u = ops.mix([*bank, p], layer.attn_res_norm, layer.attn_res, c.eps) if bank else p
            opened = i % c.block == 0
            if opened:
                bank = [*bank, p]
            y = layer.attn(ops.rms(u, layer.attn_norm, c.eps), batch, ops)
            p = y if opened else p + y
            u = ops.mix([*bank, p], layer.ff_res_norm, layer.ff_res, c.eps)
            p = p + layer.ff(ops.rms(u, layer.ff_norm, c.eps), ops)
        return ops.rms(ops.mix([*bank, p], self.res_norm, self.res, c.eps), self.norm, c.eps)

    def logits(self, batch: Batch, ops: Ops) -> Tensor:
        """Float32 logits [M, vocab] at the positions that predict an assistant's token."""
        h = self.hidden(batch, ops)[batch.where]
        return (h @ self.head.to(h.dtype).T).float()

    def balance(self, rate: float) -> float:
        """Moves each router's selection bias against its load; returns the worst load over the mean."""
        worst = []
        for layer in self.layers:
            if isinstance(layer.ff, Moe) and layer.ff.load is not None:
                load = layer.ff.load.float()
                layer.ff.bias += rate * torch.sign(load.mean() - load)
                worst.append(load.max() / load.mean())
        return torch.stack(worst).max()
