"""Whole networks against golden outputs that third-party implementations computed (tests/golden/README.md)."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from k3stack.models.capture import Capture
from k3stack.models.network import Model
from tests.cpu.harness import NAMES, Sequence, TestArena, golden, model, off, relative

EXACT, FLOAT32 = 1e-9, 5e-4
PRECISIONS = [("float64", EXACT), ("float32", FLOAT32)]
BF16_LOGITS = {
    "k3_tiny_open": (0.07, 0.14, 0.48),
    "k3_tiny_8h_open": (0.06, 0.11, 0.28),
    "kimi_linear_tiny_open": (0.04, 0.05, 0.11),
}
"""Median, p90 and maximum over positions of the relative L2 distance, routing forced."""


def prompt(name: str, which: str) -> list[int]:
    ids: list[int] = golden(name)[f"input_ids_{which}"].tolist()
    return ids


def chosen(capture: Capture, layers: range) -> tuple[np.ndarray, Tensor, Tensor]:
    """Router ids in ascending order with their weights, and the margin of the choice, each [layer, T, ...]."""
    ids = torch.stack([capture.values["router_ids"][i].long().cpu() for i in layers])
    weights = torch.stack([capture.values["router_weights"][i].cpu() for i in layers])
    scores = torch.stack([capture.values["router_scores"][i].cpu() for i in layers]).sort(-1, descending=True).values
    order = ids.argsort(-1)
    k = ids.shape[-1]
    margin = scores[..., k - 1] - scores[..., k]
    return ids.gather(-1, order).numpy(), weights.gather(-1, order), margin


def check_memory(arena: TestArena, seq: Sequence, name: str, tolerance: float) -> None:
    """States, convolution windows and cache rows after prompt (a)."""
    g, views = golden(name), arena.views
    last = len(arena.model.geometry.kda_layers) - 1
    for layer, which in ((0, "first"), (last, "last")):
        assert off(views.recurrent(layer)[seq.block], g[f"kda_state_{which}"]) < tolerance
        assert off(views.window(layer)[seq.block], g[f"conv_state_{which}"]) < tolerance
    assert off(arena.rows(seq, 0)[:200], g["mla_rows_first"]) < tolerance


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_whole_prompt(name: str, dtype: str, tolerance: float) -> None:
    g, net = golden(name), model(name, dtype)
    arena, capture = TestArena(net), Capture()
    seq = arena.open()
    logits = arena.run([(seq, prompt(name, "a"))], every=True, capture=capture)
    seen = capture.values
    for layer, what in itertools.product(range(net.geometry.layers), ("attn_in", "attn_out", "ffn_in", "ffn_out")):
        assert off(seen[what][layer][-1], g[f"last_{what}"][layer]) < tolerance, (what, layer)
        assert off(seen["stream"][layer][-1], g["last_stream"][layer]) < tolerance, layer
    if "hidden_a" in g:
        for row, layer in enumerate(g["hidden_layers"]):
            assert off(seen["stream"][int(layer)], g["hidden_a"][row]) < tolerance
    if "last_final_mix" in g:
        assert off(seen["final_mix"][None][-1], g["last_final_mix"]) < tolerance
    assert off(seen["final_norm"][None][-1], g["last_final_norm"]) < tolerance
    ids, weights, margin = chosen(capture, range(net.geometry.dense_layers, net.geometry.layers))
    assert (ids == g["router_ids"]).all()
    assert off(weights, g["router_weights"]) < min(tolerance, 2e-5)
    assert off(margin, g["router_margin"]) < min(tolerance, 1e-4)
    assert off(logits, g["logits_a"]) < tolerance
    check_memory(arena, seq, name, tolerance)


def pieces(total: int, how: int | str) -> list[int]:
    """Chunk sizes that add up to ``total``."""
    rng = random.Random(how)
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, how if isinstance(how, int) else rng.choice([1, 2, 5, 17, 40, 65, 100])))
    return sizes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("how", [1, 7, 64, "random", "random again"])
def test_prompt_in_chunks(name: str, dtype: str, tolerance: float, how: int | str) -> None:
    arena = TestArena(model(name, dtype), seed=3)
    seq, ids = arena.open(), prompt(name, "a")
    parts, at = [], 0
    for size in pieces(len(ids), how):
        parts.append(arena.run([(seq, ids[at : at + size])], every=True))
        at += size
    assert off(torch.cat(parts), golden(name)["logits_a"]) < tolerance
    check_memory(arena, seq, name, tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_rows_alone_and_as_one_batch(name: str, dtype: str, tolerance: float) -> None:
    net, expected = model(name, dtype), golden(name)["logits_b_last"]
    rows = [prompt(name, f"b{i}") for i in range(3)]
    for i, ids in enumerate(rows):
        arena = TestArena(net)
        assert off(arena.run([(arena.open(), ids)])[0], expected[i]) < tolerance
    arena = TestArena(net)
    assert off(arena.run([(arena.open(), ids) for ids in rows]), expected) < tolerance


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_chunks_and_decode_rows_in_one_step(name: str, dtype: str, tolerance: float) -> None:
    """Prompt (a) advances token by token while the rows of (b) are prefilled in chunks beside it, in any order."""
    g, arena = golden(name), TestArena(model(name, dtype), seed=5)
    a, steps, rng = prompt(name, "a"), 12, random.Random(5)
    first = arena.open()
    arena.run([(first, a[: -steps - 1])])
    rows = [(arena.open(), prompt(name, f"b{i}")) for i in range(3)]
    done: dict[int, Tensor] = {}
    for i in range(steps + 1):
        work = [(first, [a[len(a) - steps - 1 + i]])]
        owners = [-1]
        for which, (seq, ids) in enumerate(rows):
            if which not in done:
                left = len(ids) - seq.length
                take = left if i == steps else min(left, rng.choice([1, 3, 16, 33]))
                work.append((seq, ids[seq.length : seq.length + take]))
                owners.append(which)
        order = rng.sample(range(len(work)), len(work))
        logits = arena.run([work[j] for j in order])
        for at, j in enumerate(order):
            if owners[j] < 0:
                assert off(logits[at], g["logits_a"][len(a) - steps - 1 + i]) < tolerance
            elif rows[owners[j]][0].length == len(rows[owners[j]][1]):
                done[owners[j]] = logits[at]
    assert off(torch.stack([done[i] for i in range(3)]), g["logits_b_last"]) < tolerance
    check_memory(arena, first, name, tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("together", [True, False])
def test_greedy_continuations_by_cached_decode(name: str, dtype: str, tolerance: float, together: bool) -> None:
    g, net = golden(name), model(name, dtype)
    prompts = [prompt(name, w) for w in ("a", "b0", "b1", "b2")]
    groups = [range(4)] if together else [[i] for i in range(4)]
    for group in groups:
        arena = TestArena(net, seed=9)
        seqs = [arena.open() for _ in group]
        logits = arena.run([(s, prompts[i]) for s, i in zip(seqs, group, strict=True)])
        for step in range(24):
            assert off(logits, g["greedy_logits"][list(group), step]) < tolerance + 1e-6, step
            tokens = logits.argmax(-1)
            assert tokens.tolist() == g["greedy_tokens"][list(group), step].tolist()
            logits = arena.run([(s, [int(t)]) for s, t in zip(seqs, tokens, strict=True)])


@pytest.mark.parametrize(("dtype", "limit"), [("float64", EXACT), ("float32", FLOAT32)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_any_tokens_or_none(name: str, dtype: str, limit: float) -> None:
    """The last layer leaves out tokens that nobody reads; states and rows stay complete."""
    g, a = golden(name), prompt(name, "a")
    arena = TestArena(model(name, dtype), seed=4)
    seq, other = arena.open(), arena.open()
    assert arena.run([(seq, a[:70])], wanted=[]).shape == (0, 512)
    logits = arena.run([(seq, a[70:140]), (other, a[:30])], wanted=[99, 3, 69])
    assert off(logits, g["logits_a"][[29, 73, 139]]) < limit
    logits = arena.run([(other, a[30:31]), (seq, a[140:])], wanted=[60, 0])
    assert off(logits, g["logits_a"][[199, 30]]) < limit
    assert not logits.is_inference()
    check_memory(arena, seq, name, limit)


@pytest.mark.parametrize("name", NAMES)
def test_latent_norm_eps_is_an_option(name: str) -> None:
    g, arena = golden(name), TestArena(model(name, "float64", 1e-5))
    logits = arena.run([(arena.open(), prompt(name, f"b{i}")) for i in range(3)])
    assert off(logits, g["logits_b_last_eps1e5"]) < EXACT
    assert off(logits, g["logits_b_last"]) > 1e-7
    if "logits_a_eps1e5" in g:
        every = arena.run([(arena.open(), prompt(name, "a"))], every=True)
        assert off(every, g["logits_a_eps1e5"]) < 1e-6


def forced(name: str, net: Model, tokens: slice) -> Capture:
    ids = torch.from_numpy(golden(name)["router_ids"]).long().to(net.device)
    return Capture({net.geometry.dense_layers + i: ids[i, tokens] for i in range(ids.shape[0])})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [200, 64, 1])
def test_bfloat16_with_forced_routing(name: str, size: int) -> None:
    g, net = golden(name), model(name, "bfloat16")
    arena = TestArena(net)
    seq, ids, parts = arena.open(), prompt(name, "a"), []
    for at in range(0, 200, size):
        part = slice(at, min(at + size, 200))
        parts.append(arena.run([(seq, ids[part])], every=True, capture=forced(name, net, part)))
    distance = relative(torch.cat(parts), g["logits_a"], dim=-1)
    median, p90, top = BF16_LOGITS[name]
    assert distance.median() < median
    assert distance.quantile(0.9) < p90
    assert distance.max() < top
    assert relative(arena.views.recurrent(0)[seq.block], g["kda_state_first"]) < 0.015
    assert relative(arena.rows(seq, 0), g["mla_rows_first"]) < 0.04
