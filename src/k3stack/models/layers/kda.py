"""The KDA attention of one layer: projections, short convolution, gates, the delta rule, gated output norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3stack.config.geometry import ModelGeometry
from k3stack.kernels.precision import wide_dtype, widen
from k3stack.kernels.select import Kernels
from k3stack.models.batch import Step, Tail
from k3stack.models.exchange import Exchange
from k3stack.models.layers.part import Part, Slot, empty, first, matrix, taps_first
from k3stack.models.views import ArenaViews

L2_EPS = 1e-6


class KdaAttention(Part):
    """``index`` counts KDA layers from 0. All projections of the input are one weight: q, k, v, gate and b, of which
    ranks hold their heads' rows, then f_a (and a low-rank gate's first half), of which every rank holds all."""

    PRODUCTS = ("w_in", "w_f", "w_g", "w_out")

    def __init__(
        self, geometry: ModelGeometry, index: int, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        kda, hidden = geometry.kda, geometry.hidden
        self.index, self.kernels, self.eps = index, kernels, geometry.rms_eps
        self.heads, self.head_dim, self.width = kda.heads, kda.head_dim, kda.width
        self.lower_bound = kda.gate_lower_bound
        self.full_rank = kda.full_rank_gate
        own = (3 * self.width, self.width if self.full_rank else 0, self.heads)
        low = (self.head_dim, 0 if self.full_rank else self.head_dim)
        fill = [-sum(n) % kernels.row_multiple for n in (own, low)]
        self.sizes = (*own, fill[0], *low, fill[1])
        self.own_rows = sum(own) + fill[0]
        wide = wide_dtype(dtype)
        self.w_in = matrix(sum(self.sizes), hidden, dtype=dtype, device=device)
        for rows in (self.w_in[sum(own) : self.own_rows], self.w_in[self.own_rows + sum(low) :]):
            rows.zero_()
        self.w_f = matrix(self.width, self.head_dim, dtype=dtype, device=device)
        self.w_g = None if self.full_rank else matrix(self.width, self.head_dim, dtype=dtype, device=device)
        self.w_out = matrix(hidden, self.width, dtype=dtype, device=device)
        self.conv = empty(kda.conv_kernel, 3 * self.width, dtype=wide, device=device)
        self.exp_a = empty(self.heads, dtype=wide, device=device)
        self.dt_bias = empty(self.width, dtype=wide, device=device)
        self.norm = empty(self.head_dim, dtype=wide, device=device)

    def slots(self) -> dict[str, Slot]:
        w = self.width
        _, gate, b, _, fa, ga, _ = self.w_in.split(list(self.sizes))
        slots = {f"kda.{n}_proj": Slot(self.w_in[i * w : (i + 1) * w]) for i, n in enumerate("qkv")}
        slots |= {f"kda.{n}_conv1d": Slot(self.conv[:, i * w : (i + 1) * w], taps_first) for i, n in enumerate("qkv")}
        slots |= {
            "kda.f_a_proj": Slot(fa),
            "kda.f_b_proj": Slot(self.w_f),
            "kda.b_proj": Slot(b),
            "kda.A_log": Slot(self.exp_a, first(self.heads)),
            "kda.dt_bias": Slot(self.dt_bias),
            "kda.o_norm": Slot(self.norm),
            "kda.o_proj": Slot(self.w_out),
        }
        if self.w_g is None:
            return slots | {"kda.g_proj": Slot(gate)}
        return slots | {"kda.g_a_proj": Slot(ga), "kda.g_b_proj": Slot(self.w_g)}

    def finish(self) -> None:
        self.exp_a.exp_()

    def __call__(self, x: Tensor, step: Step, views: ArenaViews, tail: Tail | None = None) -> Tensor:
        """x [T, hidden] (normed) -> [T, hidden], or [N, hidden] of the ``tail``'s tokens; states and windows of the
        step's rows move on in place."""
        raw, gate, b, _, f, low, _ = self._projected(x, step).split(self.sizes, dim=-1)
        y = self._between((raw, f, gate if self.full_rank else low, b), step, views, tail)
        return x[:0] if tail is not None and not tail.lengths else self.kernels.linear(y, self.w_out)

    def sharded(self, x: Tensor, step: Step, views: ArenaViews, exchange: Exchange) -> Tensor:
        """x [S, hidden], the rank's share of a step's tokens -> its heads' part of the outputs [T, hidden]. What every
        rank would compute alike is computed of the share."""
        w_own, w_low = self.w_in.tensor_split((self.own_rows,))
        x, low = exchange.gather(x, self.kernels.linear(x, w_low))
        raw, gate, b, _ = self.kernels.linear(x, w_own).split(self.sizes[:4], dim=1)
        f, gate_low, _ = low.split(self.sizes[4:], dim=1)
        y = self._between((raw, f, gate if self.full_rank else gate_low, b), step, views)
        return self.kernels.linear(y, self.w_out)

    def _projected(self, x: Tensor, step: Step) -> Tensor:
        """All products of the input, of few tokens perhaps to be added up by ``Kernels.kda_step``."""
        kernels, apart = self.kernels, None
        if step.all_decode and kernels.kda_step is not None and kernels.linear_apart is not None:
            apart = kernels.linear_apart(x, self.w_in)
        return kernels.linear(x, self.w_in) if apart is None else apart

    def _between(
        self, projected: tuple[Tensor, ...], step: Step, views: ArenaViews, tail: Tail | None = None
    ) -> Tensor:
        """From the input's projections raw, f, gate and b of T tokens to [T, width], or that of the ``tail``'s."""
        kernels, raw = self.kernels, projected[0]
        if step.all_decode and kernels.kda_step is not None:
            y = self._whole_step(kernels.kda_step, projected, step, views)
            return y if tail is None else y[tail.tokens]
        if not step.all_decode and kernels.kda_chunks is not None:
            y = self._whole_chunks(kernels.kda_chunks, projected, step, views)
            return y if tail is None else y[tail.tokens]
        _, f, gate, b = projected
        tokens, heads, k = raw.shape[0], self.heads, self.head_dim
        z = widen(kernels.linear(f, self.w_f)).add_(self.dt_bias)
        g = kernels.log_decay(z.view(tokens, heads, k), self.exp_a, self.lower_bound)
        beta = torch.sigmoid(widen(b))
        qkv = self._convolve(raw, step, views.window(self.index)).view(tokens, 3, heads, k)
        query, key = kernels.l2_norm(qkv[:, :2], L2_EPS).unbind(1)
        o = self._recur(query, key, qkv[:, 2], g, beta, step, views.recurrent(self.index))
        if tail is not None:
            o, gate, tokens = o[tail.tokens], gate[tail.tokens], len(tail.lengths)
        if self.w_g is not None:
            gate = kernels.linear(gate, self.w_g)
        y = kernels.gated_rms_norm(o, gate.reshape(tokens, heads, k), self.norm, self.eps)
        return y.view(tokens, self.width)

    def _whole_step(
        self, run: Callable[..., Tensor], projected: tuple[Tensor, ...], step: Step, views: ArenaViews
    ) -> Tensor:
        """A decode step in one kernel: [R, width], to be projected out."""
        arena = (views.window(self.index), views.recurrent(self.index), step.decode_block_index)
        return run(*projected, *self._vectors, *arena, self.lower_bound, self.eps, self.w_f, self.w_g)

    def _whole_chunks(
        self, run: Callable[..., None], projected: tuple[Tensor, ...], step: Step, views: ArenaViews
    ) -> Tensor:
        """Chunks, and decode rows beside them, from the projections on: [T, width], to be projected out."""
        inputs = self._gates(projected)
        out = inputs[0].new_empty(inputs[0].shape[0], self.width)
        if step.decode_count and self.kernels.kda_step is not None:
            t = step.decode_tokens
            arena = (views.window(self.index), views.recurrent(self.index), step.decode_block_index)
            rows = (x[t] for x in inputs)
            out[t] = self.kernels.kda_step(*rows, *self._vectors, *arena, self.lower_bound, self.eps)
        arena = (views.window(self.index), views.recurrent(self.index), step.chunk_tiles)
        run(*inputs, *self._vectors, *arena, self.lower_bound, self.eps, out)
        return out

    @property
    def _vectors(self) -> tuple[Tensor, ...]:
        return self.conv, self.exp_a, self.dt_bias, self.norm

    def _gates(self, projected: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """With the decay's and the gate's second projections."""
        raw, f, gate, b = projected
        f = self.kernels.linear(f, self.w_f)
        if self.w_g is not None:
            gate = self.kernels.linear(gate, self.w_g)
        return raw, f, gate, b

    def _convolve(self, raw: Tensor, step: Step, windows: Tensor) -> Tensor:
        if step.all_decode:
            return self.kernels.conv_decode(raw, self.conv, windows, step.decode_blocks)
        if step.one_chunk:
            return self.kernels.conv_chunk(raw, self.conv, windows[step.chunks[0].block])
        out = self.conv.new_empty(raw.shape)
        for chunk in step.chunks:
            out[chunk.tokens] = self.kernels.conv_chunk(raw[chunk.tokens], self.conv, windows[chunk.block])
        if step.decode_count:
            tokens = step.decode_tokens
            out[tokens] = self.kernels.conv_decode(raw[tokens], self.conv, windows, step.decode_blocks)
        return out

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, step: Step, states: Tensor) -> Tensor:
        blocks = step.decode_blocks
        if step.all_decode:
            return self.kernels.kda_decode(q, k, v, g, beta, states, blocks)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if step.decode_count:
            t = step.decode_tokens
            out[t] = self.kernels.kda_decode(q[t], k[t], v[t], g[t], beta[t], states, blocks)
        self.kernels.kda_prefill(q, k, v, g, beta, states, step.tiles, out)
        return out
