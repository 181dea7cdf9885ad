"""One rank of a layout alone in the engine: its share of the bytes, its exchanges counted, any token id taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3stack import LLM, SamplingParams
from k3stack.errors import UserError
from k3stack.kernels.moe.cpu import choices_here
from k3stack.models.emulate import DRAWN, busiest_to
from k3stack.models.layers.ffn import MoeFfn

PATH = str(Path(__file__).parents[1] / "golden" / "k3_tiny_8h_open")
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(("ep", "rank", "routing"), [(2, 1, "mean"), (2, 0, "slowest"), (1, 1, "mean")])
def test_a_rank_runs_alone(ep: int, rank: int, routing: str) -> None:
    options = {"arena_gib": 0.02, "emulate_rank": rank, "tp_size": 2, "ep_size": ep, "emulate_routing": routing}
    with LLM(PATH, arena_gib=0.02) as llm:
        whole, layout = llm.info["pools"]["actual"]["weight_bytes"], llm._engine.plan.layout
        vocab = llm.info["vocab"]
    with LLM(PATH, **options) as llm:
        pools = llm.info["pools"]
        assert pools["predicted"] == pools["actual"]
        assert 0.4 * whole < pools["actual"]["weight_bytes"] < 0.75 * whole
        assert llm._engine.plan.layout.recurrent_bytes * 2 == layout.recurrent_bytes
        prompts = [[vocab - 1, 5, 9], list(range(40)), [7] * 70]
        found = llm.generate(prompts, GREEDY)
        assert [len(r.token_ids) for r in found] == [9, 9, 9]
        assert all(token < vocab // 2 for r in found for token in r.token_ids)
        stats = llm.stats()
        layers = llm.info["layers"]
        assert stats["exchanges"]["count"] == 2 * layers * stats["scheduler"]["steps"]
        tokens = stats["scheduler"]["prefill_tokens"] + stats["scheduler"]["decode_tokens"]
        assert stats["exchanges"]["bytes"] == pytest.approx(tokens * llm.info["emulated"]["bytes_a_token"])
        ffn = next(layer.ffn for layer in llm._engine.model.layers if isinstance(layer.ffn, MoeFfn))
        logits = torch.zeros(DRAWN + 3, ffn.moe.experts)
        ids, _ = ffn.kernels.route(logits, ffn.bias, ffn.moe.top_k, 1.0, True, None)
        assert len(ids) == DRAWN + 3
        assert len(ids.unique()) == ffn.moe.experts
        assert torch.equal(ids[:3], ids[DRAWN:])


def test_the_busiest_ranks_experts_become_the_emulated_ones() -> None:
    ids = torch.rand(64, 32).topk(4, -1).indices
    turned = busiest_to(ids, 5, range(8, 16), 32)
    touched = torch.bincount(turned[:5].unique() // 8, minlength=4)
    assert touched[1] == touched.max()
    assert torch.equal(turned.unique(), ids.unique()) or len(turned.unique()) == len(ids.unique())


def test_what_cannot_be_emulated_is_refused() -> None:
    for options, text in (({"tp_size": 2, "emulate_rank": 2}, "outside"), ({"tp_size": 3, "emulate_rank": 0}, "3")):
        with pytest.raises(UserError, match=text):
            LLM(PATH, arena_gib=0.02, **options)


def test_choices_of_other_ranks_add_nothing() -> None:
    x, weights = torch.randn(5, 3), torch.rand(5, 2)
    ids = torch.tensor([[0, 9], [4, 5], [5, 1], [8, 4], [7, 6]])
    seen = []

    def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(ids.flatten().tolist())
        return x * (ids + 1) * weights

    found = choices_here(experts, x, ids, weights, [None] * 4, None, None, 4)
    here = (ids >= 4) & (ids < 8)
    expected = x * (torch.where(here, ids - 3, 0) * weights).sum(1, keepdim=True)
    torch.testing.assert_close(found, expected)
    assert seen == [[0, 1, 1, 0, 3, 2]]
    assert not choices_here(experts, x[:1], ids[:1], weights[:1], [None] * 4, None, None, 4).any()
