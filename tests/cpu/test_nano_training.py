"""The training script runs, learns, stops and resumes on a CPU; the generator is deterministic."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from training import kda, train

from k3stack.models.builtin import resolve
from k3stack.verify.language import words
from k3stack.verify.language.talk import Talker
from k3stack.verify.language.variety import Coiner, label, parts

TOKENIZER = f"{resolve('nano').path}/tiktoken.model"


def test_generator_is_deterministic_and_keeps_held_out_words_out() -> None:
    one, two = (Talker("seed", held_out=False) for _ in range(2))
    assert [one.conversation() for _ in range(5)] == [two.conversation() for _ in range(5)]
    assert Talker("seed", held_out=True).tool_call() != Talker("seed", held_out=False).tool_call()
    shown = json.dumps([one.tool_use().tools for _ in range(400)])
    for word in words.HELD_OUT - words.OTHER_ROLES:
        assert f'"{word}"' not in shown and f'_{word}"' not in shown, word
    assert len(words.HELD_OUT - words.OTHER_ROLES) > 60
    assert "weather" not in shown


def test_training_coins_names_and_no_held_out_word() -> None:
    coiner = Coiner(Talker("coined", held_out=False).namer)
    keys = [coiner.key() for _ in range(3000)]
    counts = Counter(len(parts(key)) for key in keys)
    assert all(counts[n] > 60 for n in (1, 2, 3, 4)), counts
    assert len({w for key in keys for w in parts(key)} - {*words.PARAMS}) > 1500, "most words are new"
    assert {key for key in keys if "_" in key} and {key for key in keys if "-" in key}
    assert any(key != key.lower() for key in keys)
    nouns = [coiner.noun() for _ in range(1000)]
    alike = [coiner.noun_like(noun) for noun in nouns]
    assert all(a != b for a, b in zip(nouns, alike, strict=True))
    for name in (*keys, *nouns, *alike, *(coiner.key_like(key) for key in keys)):
        assert not words.HELD_OUT & {w for part in name.split() for w in parts(part)}, name
    assert label("seatCount") == label("seat_count") == label("seat-count") == "seat count"


def test_training_declares_tools_that_are_easily_confused() -> None:
    maker = Talker("alike", held_out=False).maker
    boxes = [maker.toolbox(4) for _ in range(200)]
    shared_nouns = [box for box in boxes if len({t.noun for t in box}) < 4]
    assert len(shared_nouns) > 30 and len([box for box in boxes if len({t.verb for t in box}) < 4]) > 30
    for box in boxes:
        assert len({t.name for t in box}) == 4
        told_apart = {(t.noun, t.act, t.verb if t.act else "") for t in box}
        assert len(told_apart) == 4, "what is asked for names one tool"


def test_chunked_recurrence_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    t, h, d = 75, 2, 16
    q, k, v = (torch.randn(t, h, d, dtype=torch.float64) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    g, beta = -5 * torch.rand(t, h, d, dtype=torch.float64), torch.rand(t, h, dtype=torch.float64)
    out = []
    state = torch.zeros(h, d, d, dtype=torch.float64)
    for i in range(t):
        if i == 40:  # a second sequence begins
            state = torch.zeros_like(state)
        state = g[i].exp()[..., None] * state
        delta = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
        state = state + k[i][..., None] * delta[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[i]))
    assert torch.allclose(kda.chunk_torch(q, k, v, g, beta, [0, 40, t]), torch.stack(out), atol=1e-12)


def test_smoke_training_learns_and_resumes(tmp_path: Path) -> None:
    common = ["--smoke", "--tokenizer", TOKENIZER, "--tokens", "1024", "--workers", "1", "--warmup", "3"]
    first = train.main([*common, "--out", str(tmp_path / "a"), "--steps", "8", "--show", "4", "--eval-seconds", "999"])
    assert first["log"][-1]["tool_call"]["token"] > 0.05
    more = ["--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a"), "--steps", "2", "--eval-seconds", "999"]
    second = train.main([*common, *more])
    assert second["steps"] == 10 and second["starts"] == 2
    assert second["log"][-1]["tool_call"]["token"] > 0.05
