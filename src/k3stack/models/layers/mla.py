"""The MLA attention of one layer: query and latent projections, cache rows, attention, output gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3stack.config.geometry import ModelGeometry
from k3stack.kernels.select import Kernels
from k3stack.models.batch import Step, Tail
from k3stack.models.exchange import Exchange
from k3stack.models.layers.part import Part, Slot, empty, matrix
from k3stack.models.views import ArenaViews


@dataclass(frozen=True, slots=True)
class Joined:
    """All projections of the input as one weight, of which kv_a's and the others' are parts."""

    weight: Tensor


class MlaAttention(Part):
    """``index`` counts MLA layers from 0. Projections of the input: kv_a, and as one weight q (or q_a) and gate; on a
    GPU these two are parts of one."""

    PRODUCTS = ("w_kv", "w_in", "w_q", "w_out")

    def __init__(
        self,
        geometry: ModelGeometry,
        index: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        latent_eps: float,
    ) -> None:
        mla, hidden = geometry.mla, geometry.hidden
        self.index, self.kernels, self.latent_eps = index, kernels, latent_eps
        self.heads, self.latent, self.qk_dim = mla.heads, mla.kv_lora_rank, mla.qk_dim
        out_width = mla.heads * mla.v_dim
        self.q_lora, self.output_gate, self.out_width = mla.q_lora_rank, mla.output_gate, out_width
        queries = self.heads * self.qk_dim
        self.sizes = (self.q_lora or queries, out_width if self.output_gate else 0)
        self.joined: Joined | None = None
        if kernels.device_tables:
            self.joined = Joined(matrix(mla.row_width + sum(self.sizes), hidden, dtype=dtype, device=device))
            self.w_kv, self.w_in = self.joined.weight.split([mla.row_width, sum(self.sizes)])
        else:
            self.w_kv = matrix(mla.row_width, hidden, dtype=dtype, device=device)
            self.w_in = matrix(sum(self.sizes), hidden, dtype=dtype, device=device)
        if self.q_lora is not None:
            self.q_norm = empty(self.q_lora, dtype=dtype, device=device)
            self.w_q = matrix(queries, self.q_lora, dtype=dtype, device=device)
        self.kv_norm = empty(self.latent, dtype=dtype, device=device)
        self.kv_b = empty(self.heads, mla.nope_dim + mla.v_dim, self.latent, dtype=dtype, device=device)
        self.w_out = matrix(hidden, out_width, dtype=dtype, device=device)

    def slots(self) -> dict[str, Slot]:
        q, gate = self.w_in.split(list(self.sizes))
        slots = {
            "mla.kv_a_proj_with_mqa": Slot(self.w_kv),
            "mla.kv_a_layernorm": Slot(self.kv_norm),
            "mla.kv_b_proj": Slot(self.kv_b.view(-1, self.latent)),
            "mla.o_proj": Slot(self.w_out),
        }
        if self.q_lora is None:
            slots["mla.q_proj"] = Slot(q)
        else:
            slots["mla.q_a_proj"] = Slot(q)
            slots["mla.q_a_layernorm"] = Slot(self.q_norm)
            slots["mla.q_b_proj"] = Slot(self.w_q)
        if self.output_gate:
            slots["mla.g_proj"] = Slot(gate)
        return slots

    def __call__(self, x: Tensor, step: Step, views: ArenaViews, tail: Tail | None = None) -> Tensor:
        """x [T, hidden] (normed) -> [T, hidden], or [N, hidden] of the ``tail``'s tokens; writes the cache rows of all
        new tokens, then attends."""
        rows = views.rows(self.index)
        if self.joined is not None and tail is None:
            kv, q, gate = self.kernels.linear(x, self.joined.weight).split((rows.shape[2], *self.sizes), dim=1)
        else:
            kv = self.kernels.linear(x, self.w_kv)
            if tail is not None and not tail.lengths:
                self.kernels.write_rows(*self._written(kv, rows, step))
                return x[:0]
            own = x if tail is None else x[tail.tokens]
            q, gate = self.kernels.linear(own, self.w_in).split(self.sizes, dim=1)
        written = self._written(kv, rows, step)
        tokens = q.shape[0]
        if self.q_lora is not None and self.kernels.mla_enter is not None and tail is None:
            q = self.kernels.linear(self.kernels.mla_enter(*written, q, self.q_norm), self.w_q)
        else:
            self.kernels.write_rows(*written)
            if self.q_lora is not None:
                q = self.kernels.linear(self.kernels.rms_norm(q, self.q_norm, self.latent_eps), self.w_q)
        q = q.reshape(tokens, self.heads, self.qk_dim)
        return self.kernels.linear(self._gated(q, rows, step, tail, gate), self.w_out)

    def _written(self, kv: Tensor, rows: Tensor, step: Step) -> tuple[Any, ...]:
        """What ``Kernels.write_rows`` takes."""
        return kv, self.kv_norm, self.latent_eps, rows, *step.cache_slots(rows.shape[1])

    def _gated(self, q: Tensor, rows: Tensor, step: Step, tail: Tail | None, gate: Tensor) -> Tensor:
        """Attention and output gate [T, H v] of a step's tokens, or the ``tail``'s."""
        if tail is None and not step.all_decode:
            return self._gate(self._attend(q, rows, step), gate)
        return self._decode(q, rows, step, tail, gate)

    def _decode(self, q: Tensor, rows: Tensor, step: Step, tail: Tail | None, gate: Tensor) -> Tensor:
        """Gated attention of a token a row: all of a step's, or the ``tail``'s."""
        if tail is None:
            lengths = step.lengths() if self.kernels.device_tables else step.decode_lengths
            given = q, rows, step.decode_pages, lengths, self.kv_b
        else:
            lengths = step.lengths(tail) if self.kernels.device_tables else tail.lengths
            given = q, rows, tail.pages, lengths, self.kv_b
        if self.kernels.mla_gated is not None:
            return self.kernels.mla_gated(*given, gate if self.output_gate else None)
        return self._gate(self.kernels.mla_decode(*given), gate)

    def _gate(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.kernels.output_gate(o, gate) if self.output_gate else o.reshape(o.shape[0], self.out_width)

    def sharded(self, x: Tensor, step: Step, views: ArenaViews, exchange: Exchange) -> Tensor:
        """x [S, hidden], the rank's share of a step's tokens -> its heads' part of the outputs [T, hidden]. What every
        rank would compute alike (cache rows, a low-rank query's first half) is computed of the share."""
        kernels, kv = self.kernels, self.kernels.linear(x, self.w_kv)
        if self.q_lora is None:
            x, kv = exchange.gather(x, kv)
            q, gate = kernels.linear(x, self.w_in).split(self.sizes, dim=1)
        else:
            q = kernels.rms_norm(kernels.linear(x, self.w_in[: self.q_lora]), self.q_norm, self.latent_eps)
            x, kv, q = exchange.gather(x, kv, q)
            q, gate = kernels.linear(q, self.w_q), kernels.linear(x, self.w_in[self.q_lora :])
        rows = views.rows(self.index)
        kernels.write_rows(*self._written(kv, rows, step))
        q = q.reshape(x.shape[0], self.heads, self.qk_dim)
        return kernels.linear(self._gated(q, rows, step, None, gate), self.w_out)

    def _attend(self, q: Tensor, rows: Tensor, step: Step) -> Tensor:
        """Attention of a step with chunks [T, H, v]."""
        parts = list(zip([chunk.tokens for chunk in step.chunks], self._attend_chunks(q, rows, step), strict=True))
        if step.one_chunk:
            return parts[0][1]
        if step.decode_count:
            t = step.decode_tokens
            lengths = step.lengths() if self.kernels.device_tables else step.decode_lengths
            o = self.kernels.mla_decode(q[t], rows, step.decode_pages, lengths, self.kv_b)
            parts.append((t, o))
        out = q.new_empty(q.shape[0], self.heads, parts[0][1].shape[2])
        for tokens, o in parts:
            out[tokens] = o
        return out

    def _attend_chunks(self, q: Tensor, rows: Tensor, step: Step) -> list[Tensor]:
        if self.kernels.mla_chunks is not None and len(step.chunks) > 1:
            table = step.page_table[[chunk.row for chunk in step.chunks]]
            starts = [chunk.start for chunk in step.chunks]
            return self.kernels.mla_chunks([q[chunk.tokens] for chunk in step.chunks], rows, table, starts, self.kv_b)
        found = []
        for chunk in step.chunks:
            end = chunk.start + chunk.count
            pages = step.page_table[chunk.row, : -(-end // rows.shape[1])]
            seen = rows[pages].view(-1, rows.shape[2])[:end]
            found.append(self.kernels.mla_attend(q[chunk.tokens], seen, self.kv_b, chunk.start))
        return found
