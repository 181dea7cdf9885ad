"""The work of one step on one rank: bytes that must move and operations that must be done. No times here.

The floor of a step follows from this and a rate; ``seconds`` turns it into a time with measured efficiencies. Counted
are: every weight once but the embedding (rows are gathered) and the vision tower; the routed experts that the step's
tokens touch; each running state read and written; the cache rows that attention reads; and the sums over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3stack.config.geometry import ModelGeometry
from k3stack.config.layout import ParallelLayout, SizingEngine, layer_kinds, stage_layers
from k3stack.config.shard import largest_part_bytes, row
from k3stack.config.tensors import ITEMSIZE, PACKED_PER_BYTE, TensorSpec
from k3stack.estimate.pools import BlockLayout, block_layout
from k3stack.estimate.weights import weight_table

KDA_CHUNK = 64
"""Tokens of one chunk of the chunked KDA form: sets the operations inside a chunk."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes. All rows of one data-parallel group together."""

    decode_rows: int = 0
    decode_context: int = 0
    """Cached tokens of all decode rows together."""
    verify: int = 1
    """Tokens computed per decode row (1, or the drafter's block + 1)."""
    chunk_rows: int = 0
    chunk_tokens: int = 0
    chunk_prefix: int = 0
    """Cached tokens in front of all chunks together."""
    chunk_pairs: float = 0.0
    """Attended pairs of all chunks: sum of new · prefix + new² / 2."""
    samples: int = 0
    """Rows that sample a token after this step."""

    @property
    def tokens(self) -> int:
        return self.chunk_tokens + self.decode_rows * self.verify


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per value of what is not weights, and whether expert products run at the 8-bit rate."""

    row: int = 2
    recurrent: int = 4
    conv: int = 2
    experts_fp8: bool = False


@dataclass(frozen=True, slots=True)
class RankWork:
    """Bytes and operations of one step on one rank (one pipeline stage)."""

    dense_bytes: float = 0.0
    expert_bytes: float = 0.0
    head_bytes: float = 0.0
    state_bytes: float = 0.0
    cache_bytes: float = 0.0
    dense_flops: float = 0.0
    expert_flops: float = 0.0
    head_flops: float = 0.0
    attention_flops: float = 0.0
    sums: int = 0
    sum_bytes: float = 0.0
    """Bytes of all those sums together (one direction, before the algorithm's factor)."""

    @property
    def bytes(self) -> float:
        """All bytes that this rank's memory must move."""
        return self.dense_bytes + self.expert_bytes + self.head_bytes + self.state_bytes + self.cache_bytes

    @property
    def flops(self) -> float:
        return self.dense_flops + self.expert_flops + self.head_flops + self.attention_flops


def experts_touched(experts: float, top_k: int, tokens: float) -> float:
    """Distinct experts of one layer that ``tokens`` tokens choose, uniform routing: n · (1 − (1 − k/n)^tokens)."""
    return experts * -math.expm1(tokens * math.log1p(-top_k / experts)) if tokens > 0 else 0.0


class RankModel:
    """Work of steps under one layout, on the ranks of one pipeline stage. Built once, asked for every step."""

    def __init__(
        self,
        geometry: ModelGeometry,
        layout: ParallelLayout,
        *,
        engine: SizingEngine = "k3",
        precision: Precision | None = None,
        stage: int = 0,
        sharded_prefill: bool = False,
    ) -> None:
        """``sharded_prefill``: copied projections run on a rank's share of a chunk's tokens (reduce-scatter form)."""
        p = precision or Precision()
        self.geometry, self.layout, self.precision = geometry, layout, p
        self.layers = stage_layers(geometry, layout, engine)[stage]
        n_kda, n_mla = layer_kinds(geometry, self.layers)
        self._first, self._last = stage == 0, stage == layout.pp - 1
        self.block: BlockLayout = block_layout(
            geometry,
            recurrent_itemsize=p.recurrent,
            conv_itemsize=p.conv,
            row_itemsize=p.row,
            tp=layout.attn_tp,
            dcp=layout.dcp,
            kda_layers=n_kda,
            mla_layers=n_mla,
        )
        self.sharded_prefill = sharded_prefill
        self._n_mla = n_mla
        self._n_moe = sum(1 for i in geometry.moe_layers if i in self.layers)
        self._weights(engine)
        self._attention()

    def _weights(self, engine: SizingEngine) -> None:
        geometry, layout = self.geometry, self.layout
        table = weight_table(geometry)
        self.dense_bytes = self.head_bytes = self.head_params = 0.0
        self.cut_params = self.copied_params = 0.0
        for bundle in table.bundles:
            spec = bundle.spec
            rule = row(spec.kind, engine)
            if rule is None or spec.kind == "embed" or spec.kind.startswith("vision."):
                continue
            part = largest_part_bytes(spec, geometry, layout, engine)
            if spec.kind == "lm_head":
                if self._last:
                    self.head_bytes, self.head_params = float(part), _params(spec, part)
                continue
            here = sum(1 for x in bundle.layers if (x in self.layers if x is not None else self._last))
            self.dense_bytes += part * here
            if _is_product(spec):
                if part < spec.nbytes or layout.tp == 1:
                    self.cut_params += _params(spec, part) * here
                else:
                    self.copied_params += _params(spec, part) * here
        one = sum(largest_part_bytes(b.spec, geometry, layout, engine) for b in table.experts)
        self.expert_bytes = float(one)
        whole = sum(_params(b.spec, b.spec.nbytes) for b in table.experts if not b.spec.kind.endswith(".scale"))
        # Mean over ranks: a token's top_k experts are spread over the tp ranks, whole (ep) or cut (tp).
        self.expert_params_per_token = whole * geometry.moe.top_k / layout.tp

    def _attention(self) -> None:
        mla, kda = self.geometry.mla, self.geometry.kda
        heads = mla.heads / self.layout.attn_tp
        self.prefill_pair_flops = 2.0 * heads * (mla.qk_dim + mla.v_dim) * self._n_mla
        self.expand_flops = 2.0 * heads * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim) * self._n_mla
        # Absorbed decode: under DCP every rank has all heads of its group but only its own rows.
        self.decode_pair_flops = 2.0 * heads * (mla.row_width + mla.kv_lora_rank) * self._n_mla
        k = kda.head_dim
        per_head = 2.0 * (2 * KDA_CHUNK * k + 2 * KDA_CHUNK * k + 3 * k * k)
        self.kda_flops = per_head * kda.heads / self.layout.attn_tp * self.block.state_layers

    def touched(self, tokens: float, *, slowest: bool = False, reach: float = 1.0) -> float:
        """Routed experts of one layer whose weights a rank reads: the mean rank's, or the slowest rank's expectation.

        The slowest of ``ep`` ranks reads about mean + sqrt(2 ln ep) standard deviations (binomial, as the number of
        touched experts among those a rank owns). ``reach``: tokens choose among this share of the experts only, as
        uneven routing makes it look (1: uniform).
        """
        moe, ep = self.geometry.moe, self.layout.ep
        within = max(moe.experts * reach, float(moe.top_k))
        mean = experts_touched(within, moe.top_k, tokens) / ep
        if not slowest or ep == 1:
            return mean
        owned = within / ep
        share = mean / owned
        return min(owned, mean + math.sqrt(2 * math.log(ep)) * math.sqrt(owned * share * (1 - share)))

    def work(
        self, load: StepLoad, *, slowest: bool = False, verify_spread: float = 1.0, reach: float = 1.0
    ) -> RankWork:
        """Bytes and operations of ``load`` on one rank.

        ``verify_spread``: the tokens that a verification computes for one row follow one another and share experts;
        as many distinct experts are touched as by 1 + spread · (verify − 1) unrelated tokens. ``reach``: see
        ``touched``; a floor uses 1 for both.
        """
        layout, block = self.layout, self.block
        # Under attention-DP the experts see the tokens of all groups, attention only its own.
        moe_tokens = load.tokens * layout.dp
        unrelated = load.chunk_tokens + load.decode_rows * (1 + verify_spread * (load.verify - 1))
        cache = (load.decode_context + load.chunk_prefix) * block.row_bytes * block.cache_layers / layout.dcp
        states = (load.decode_rows + load.chunk_rows) * 2.0 * block.state_bytes
        copied = self.copied_params / (layout.tp if self.sharded_prefill and load.chunk_tokens else 1)
        # Kimi-Linear's experts live on the full width; K3's partial sum is the latent.
        width = (self.geometry.moe.latent or 0) + self.geometry.hidden
        sums = 0 if layout.tp == 1 else 2 * len(self.layers)
        return RankWork(
            dense_bytes=self.dense_bytes,
            expert_bytes=(
                self.touched(unrelated * layout.dp, slowest=slowest, reach=reach) * self.expert_bytes * self._n_moe
            ),
            head_bytes=self.head_bytes if load.samples else 0.0,
            state_bytes=states,
            cache_bytes=cache,
            dense_flops=2.0 * load.tokens * (self.cut_params + copied),
            expert_flops=2.0 * moe_tokens * self.expert_params_per_token * self._n_moe,
            head_flops=2.0 * load.samples * self.head_params,
            attention_flops=(
                load.chunk_pairs * self.prefill_pair_flops
                + (load.chunk_tokens + load.chunk_prefix) * self.expand_flops
                + load.chunk_tokens * self.kda_flops
                + load.decode_context * load.verify * self.decode_pair_flops / layout.dcp
            ),
            sums=sums,
            # Two sums a layer: the attention output [hidden], then latent and shared partials in one buffer.
            sum_bytes=0.0 if not sums else load.tokens * len(self.layers) * 2.0 * (self.geometry.hidden + width),
        )


def _is_product(spec: TensorSpec) -> bool:
    """Whether the tensor is the weight of a matrix product (not a norm, bias, convolution or decay)."""
    return len(spec.shape) == 2 and not spec.kind.startswith("residual.") and min(spec.shape) > 1


def _params(spec: TensorSpec, nbytes: float) -> float:
    per_byte = PACKED_PER_BYTE if spec.kind.endswith(".packed") else 1
    return nbytes / ITEMSIZE[spec.dtype] * per_byte
