"""Scores, thresholds and the order of questions, with a target that answers from a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3stack.errors import UserError
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.verify import agreement as agree
from k3stack.verify import dataset, run
from k3stack.verify import questions as q
from k3stack.verify.target import Answer, CannotScoreError, Progress, Scoring


class Oracle:
    """Knows every right answer and has no probabilities."""

    name = "oracle"

    def ask(self, questions: Sequence[q.Question], tell: Progress) -> list[Answer]:
        tell(len(questions))
        return [Answer(question.expected.content, question.expected.calls) for question in questions]

    def score(self, work: Sequence[Scoring], top: int) -> list[list[TokenLogprobs]]:
        raise CannotScoreError("an oracle has no probabilities")


def test_a_conversation_counts_when_every_turn_is_right() -> None:
    talks = q.conversations(10)
    answers = Oracle().ask(talks, lambda n: None)
    answers[0] = dataclasses.replace(answers[0], content="no")
    answers[1] = dataclasses.replace(answers[1], truncated=True)
    found = run.score(talks, answers, 1.0, whole=True, clusters=False)
    assert found.score == pytest.approx(0.9) and found.n == 10 and found.truncated == 1


def test_missed_thresholds_are_named() -> None:
    report: dict[str, Any] = {name: {"score": 0.96} for name in run.THRESHOLDS}
    limits = {**run.THRESHOLDS, **{f"agreement.{k}": v for k, v in run.AGREEMENT["float32"].items()}}
    assert run.missed({**report, "agreement": None}, limits) == []
    report["tool_calls"] = {"score": 0.5}
    report["agreement"] = {"top1": 1.0, "mean_kl": float("nan"), "max_kl": 0.0}
    assert run.missed(report, limits) == [
        f"tool_calls 0.5000 is below {limits['tool_calls']:g}",
        f"agreement.mean_kl nan is above {limits['agreement.mean_kl']:g}",
    ]


def test_divergence_of_equal_and_of_shifted_outputs() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 200)) * 3
    work = [Scoring(tuple(range(7)), 1, 3)]
    reference = agree.make(work, lambda ids: np.concatenate((logits, logits[:1])))

    class Fixed(Oracle):
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def score(self, work: Sequence[Scoring], top: int) -> list[list[TokenLogprobs]]:
            logp = self.values - np.log(np.exp(self.values).sum(-1, keepdims=True))
            best = np.argsort(-logp, 1)[:, : agree.ASKED_TOP]
            rows = zip(best, logp, strict=True)
            return [[TokenLogprobs(0, 0.0, tuple(o.tolist()), tuple(row[o].tolist())) for o, row in rows]]

    same = agree.compare(reference, Fixed(logits))
    assert same.top1 == 1.0 and same.max_kl < 0.01 and same.n == 6
    moved = logits + rng.normal(size=logits.shape) * 0.3
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    right = (p * (np.log(p) - moved + np.log(np.exp(moved).sum(1, keepdims=True)))).sum(1).mean()
    found = agree.compare(reference, Fixed(moved))
    assert found.mean_kl == pytest.approx(right, rel=0.15), "nearly the divergence over the whole vocabulary"


def test_reference_survives_its_file(tmp_path: Path) -> None:
    work = [Scoring((1, 2, 3, 4), 1), Scoring((5, 6, 7), 2, 2)]
    made = agree.make(work, lambda ids: np.random.default_rng(len(ids)).normal(size=(len(ids), 50)))
    agree.save(made, tmp_path / "r.npz")
    back = agree.load(tmp_path / "r.npz")
    assert back.work == made.work
    for mine, theirs in zip((*back.top_logprobs, *back.rest), (*made.top_logprobs, *made.rest), strict=True):
        assert np.array_equal(mine, theirs)


def test_the_stored_reference_is_small_and_reaches_far() -> None:
    stored = agree.load()
    assert sum(len(at) for at in stored.positions) > 3000
    assert sum(w.first >= 8192 for w in stored.work) >= 2, "tails after 8,192 tokens"
    assert all(ids.shape[1] == agree.TOP for ids in stored.top_ids)


def test_dataset_counts_truncation_apart(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    lines = [{"question": f"What is {i} thousand?", "answer": f"Because.\n#### {i},000"} for i in range(1, 5)]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    items = dataset.read(file)
    assert [item.answer for item in items] == [1000.0, 2000.0, 3000.0, 4000.0]

    class Server:
        name = "server"

        def ask_plain(self, texts: Sequence[str], tell: Progress) -> list[Answer]:
            tell(len(texts))
            right, wrong = Answer("It is 1,000.", ()), Answer("It is 3.", ())
            return [right, wrong, Answer("3000", (), truncated=True), Answer("", (), failure="gone")]

    found = dataset.run(Server(), items, lambda text: None)
    assert found["score"] == 0.25 and found["score_of_complete"] == 0.5
    assert (found["wrong"], found["truncated"], found["failed"]) == (1, 1, 1)
    file.write_text('{"question": "?"}\n')
    with pytest.raises(UserError, match=r"q\.jsonl:1"):
        dataset.read(file)
