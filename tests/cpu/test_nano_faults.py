"""Agreement sees planted faults and is blind to changes that do no harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear import stacked
from k3stack.memory.memory import Memory
from k3stack.models.layers.ffn import MoeFfn
from k3stack.verify import agreement as agree
from k3stack.verify.local import LocalTarget
from k3stack.verify.run import AGREEMENT

LIMITS = AGREEMENT["float32"]


def part(indices: Sequence[int]) -> agree.Reference:
    """Some of the stored sequences."""
    whole = agree.load()
    fields = (whole.work, whole.positions, whole.top_ids, whole.top_logprobs, whole.rest)
    return agree.Reference(*(tuple(field[i] for i in indices) for field in fields))


SHORT = range(4)
LONG = [agree.SHORT]


def passes(found: agree.Agreement) -> bool:
    return found.top1 >= LIMITS["top1"] and found.mean_kl <= LIMITS["mean_kl"] and found.max_kl <= LIMITS["max_kl"]


def experts(target: LocalTarget) -> list[MoeFfn]:
    return [layer.ffn for layer in target.llm._engine.model.layers if isinstance(layer.ffn, MoeFfn)]


@pytest.fixture
def target() -> Iterator[LocalTarget]:
    with LocalTarget("nano", "float32", "cpu", arena_gib=0.2) as made:
        yield made


def test_untouched_passes(target: LocalTarget) -> None:
    assert passes(agree.compare(part(SHORT), target))


def test_skipped_latent_norm_fails(target: LocalTarget) -> None:
    experts(target)[3].latent_norm = None
    assert not passes(agree.compare(part(SHORT), target))


def test_wrong_epsilon_fails(target: LocalTarget) -> None:
    model: Any = target.llm._engine.model
    model.geometry = replace(model.geometry, rms_eps=1e-3)
    for layer in model.layers:
        for piece in (layer.attention, layer.ffn):
            if hasattr(piece, "eps"):
                piece.eps = 1e-3
    assert not passes(agree.compare(part(SHORT), target))


def reorder(ffn: MoeFfn, order: list[int]) -> None:
    ffn.w13, ffn.w2 = (stacked.pack_all([linear.unpack(w[e]) for e in order]) for w in (ffn.w13, ffn.w2))


def test_two_swapped_experts_fail(target: LocalTarget) -> None:
    ffn = experts(target)[0]
    reorder(ffn, [9 if e == 4 else 4 if e == 9 else e for e in range(len(ffn.w13))])
    assert not passes(agree.compare(part(SHORT), target))


@pytest.mark.parametrize(
    "options", [{"chunked_prefill_size": 192}, {"max_running_requests": 1}], ids=["chunk", "batch"]
)
def test_harmless_options_pass(options: dict[str, Any]) -> None:
    with LocalTarget("nano", "float32", "cpu", **{"arena_gib": 0.2, **options}) as target:
        assert passes(agree.compare(part(SHORT), target))


def test_other_order_of_equal_experts_passes(target: LocalTarget) -> None:
    """Experts are chosen and summed in the opposite order, so that ties break the other way."""
    for ffn in experts(target):
        ffn.router, ffn.bias = linear.pack(linear.unpack(ffn.router).flip(0)), ffn.bias.flip(0)
        reorder(ffn, list(range(len(ffn.w13)))[::-1])
    assert passes(agree.compare(part(SHORT), target))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_tail_after_a_cached_prefix_passes(dtype: str) -> None:
    with LocalTarget("nano", dtype, "cpu", arena_gib=0.5) as target:
        assert passes(agree.compare(part(LONG), target))


def round_states(target: LocalTarget) -> None:
    """After each step every state that it touched is rounded to bfloat16."""
    model: Any = target.llm._engine.model
    forward = model.forward

    def rounding(batch: Any, views: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(batch, views, *args, **kwargs)
        for layer in range(len(model.geometry.kda_layers)):
            states = views.recurrent(layer)
            states[batch.state_blocks] = states[batch.state_blocks].bfloat16().float()
        return out

    model.forward = rounding


@pytest.mark.slow
def test_state_in_bfloat16_fails() -> None:
    with LocalTarget("nano", "float32", "cpu", arena_gib=0.5) as target:
        round_states(target)
        assert not passes(agree.compare(part(LONG), target))


@pytest.mark.slow
def test_snapshot_restored_one_page_late_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is kept as if it were of 64 tokens later than it is."""
    taken = Memory.snapshot
    late: list[int] = []

    def shifted(self: Memory, seq: int, ids: Sequence[int], length: int) -> Any:
        ops = taken(self, seq, ids, length)
        row = self._rows[seq]
        if ops and row.pending and length + 64 <= len(ids):
            at, block = row.pending[-1]
            row.pending[-1] = (at + 64, block)
            late.append(at)
        return ops

    monkeypatch.setattr(Memory, "snapshot", shifted)
    with LocalTarget("nano", "float32", "cpu", arena_gib=0.5) as target:
        found = agree.compare(part(LONG), target)
    assert late, "the fault was planted"
    assert not passes(found)
    assert torch.isfinite(torch.tensor(found.mean_kl))
