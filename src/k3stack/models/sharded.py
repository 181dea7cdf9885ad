"""Token-sharded prefill: the forward pass of one rank that keeps the residual stream of its share of the tokens alone.

Residual mixes, norms, the router, the latent projections and those of attention that every rank holds whole are done
for T / ranks tokens instead of T. Two exchanges a sub-layer take the place of one sum: inputs are gathered, outputs
summed and scattered, which moves as many bytes as a sum does, and the narrow inputs besides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3stack.kernels.precision import wide_dtype
from k3stack.models.batch import ForwardBatch
from k3stack.models.exchange import Exchange
from k3stack.models.network import Model
from k3stack.models.views import ArenaViews


def forward(model: Model, batch: ForwardBatch, views: ArenaViews, exchange: Exchange) -> Tensor:
    """As ``Model.forward`` of all ranks together, each with its ``exchange``: the rank's columns of the logits
    [N, vocab / ranks] of the tokens ``batch.logit_index``. The number of tokens is a multiple of the ranks'.
    """
    with torch.inference_mode():
        stream = model.stream(_embed(model, batch.ids, exchange))
        for i, layer in enumerate(model.layers):
            x = stream.attention_input(i, layer.input_norm)
            (y,) = exchange.scatter(layer.attention.sharded(x, batch.step, views, exchange))
            stream.attention_output(i, y)
            m = stream.ffn_input(i, layer.post_norm)
            stream.ffn_output(i, layer.ffn.sharded(m, exchange))
        normed = model.kernels.rms_norm(stream.final(), model.norm, model.geometry.rms_eps)
        (every,) = exchange.gather(normed)
        return model.kernels.linear(every[batch.logit_index], model.lm_head).to(wide_dtype(model.dtype))


def _embed(model: Model, ids: Tensor, exchange: Exchange) -> Tensor:
    """[S, hidden] of the share's tokens: each rank looks up the rows that it holds."""
    here = ids - model.share.tp_rank * model.geometry.vocab
    mine = (here >= 0) & (here < model.geometry.vocab)
    found = F.embedding(torch.where(mine, here, 0), model.embed) * mine.unsqueeze(1)
    return exchange.scatter(found)[0]
