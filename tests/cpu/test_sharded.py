"""Token-sharded prefill: two ranks in two threads, each with its half of the weights and of the tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from k3stack.config.geometry import load_geometry
from k3stack.config.layout import ParallelLayout
from k3stack.config.shard import rank_slice
from k3stack.config.tensors import TensorSpec, expected_tensors
from k3stack.kernels.mxfp4 import cpu as mxfp4
from k3stack.models import sharded
from k3stack.models.network import Model
from k3stack.models.share import rank_share
from tests.cpu.harness import GOLDEN, TestArena, golden, off
from tests.cpu.test_golden_network import EXACT, prompt

RANKS = 2


class Meeting:
    """Where the ranks lay down what they give each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.laid: list[tuple[Tensor, ...]] = [()] * RANKS


class Together:
    """One rank's ``Exchange``: waits until all ranks have come."""

    def __init__(self, meeting: Meeting, rank: int, tokens: int) -> None:
        self.meeting, self.rank = meeting, rank
        self.share = slice(rank * tokens // RANKS, (rank + 1) * tokens // RANKS)

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return self._meet(parts, torch.cat)

    def scatter(self, *partials: Tensor) -> tuple[Tensor, ...]:
        return tuple(p[self.share] for p in self._meet(partials, lambda all_: torch.stack(all_).sum(0)))

    def _meet(self, mine: tuple[Tensor, ...], join: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, ...]:
        self.meeting.laid[self.rank] = mine
        self.meeting.barrier.wait(30)
        joined = tuple(join(list(each)) for each in zip(*self.meeting.laid, strict=True))
        self.meeting.barrier.wait(30)
        return joined


def stored(path: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  it is no dictionary
    return tensors


def rank_model(path: Path, layout: ParallelLayout, rank: int) -> Model:
    """A rank's model with its part of the checkpoint's tensors."""
    geometry, tensors = load_geometry(str(path)), stored(path)
    own, share = rank_share(geometry, layout, rank)
    model = Model(own, dtype=torch.float64, device=torch.device("cpu"), share=share)
    model.materialise()

    def put(spec: TensorSpec, slot: Any) -> None:
        part = rank_slice(spec, geometry, layout, "k3", rank)
        if part is None:
            return
        if spec.kind.endswith(".scale"):
            return
        value = tensors[spec.name]
        if spec.kind.endswith(".packed"):
            scale = tensors[spec.name.replace("weight_packed", "weight_scale")]
            mxfp4.decode_into(value, scale, slot.dest)
            return
        value = value if part.dim is None else value.narrow(part.dim, part.start, part.stop - part.start)
        slot.dest.copy_(value if slot.fit is None else slot.fit(value))

    for spec in expected_tensors(geometry, vision=False):
        if spec.expert is not None:
            if spec.expert in model.local_experts(spec.layer or 0):
                put(spec, model.expert_slot(spec))
            continue
        slots = model.slots() if spec.layer is None else model.layer_slots(spec.layer)
        put(spec, slots[spec.kind])
    model.finish()
    return model


@pytest.mark.parametrize("name", ["k3_tiny_open", "kimi_linear_tiny_open"])
def test_two_ranks_together_are_the_whole_network(name: str) -> None:
    path, layout = GOLDEN / name, ParallelLayout(tp=RANKS, ep=RANKS)
    ids = prompt(name, "a")
    tokens = len(ids) // RANKS * RANKS
    meeting, logits = Meeting(), [torch.empty(0)] * RANKS

    def run(rank: int) -> None:
        model = rank_model(path, layout, rank)
        arena = TestArena(model)
        batch = arena.batch([(arena.open(), ids[:tokens])], every=True)
        logits[rank] = sharded.forward(model, batch, arena.views, Together(meeting, rank, tokens))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert off(torch.cat(logits, 1), golden(name)["logits_a"][:tokens]) < EXACT
