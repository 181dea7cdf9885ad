"""Several processes as one target, with targets in them that answer from a table."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from k3stack.cli.verify import run as verify_command
from k3stack.errors import Unavailable, UserError
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.verify import questions as q
from k3stack.verify import run, workers
from k3stack.verify.target import Answer, CannotScoreError, Progress, Scoring, Target


@dataclass(frozen=True)
class Fake:
    """Right answers, with its process id as the number of cached tokens; ``fate`` is what happens instead."""

    fate: str = ""
    name: str = "fake"

    def __call__(self) -> AbstractContextManager[Target]:
        if self.fate == "refuse":
            raise UserError("there is no such model", param="--model-path")
        return nullcontext(self)

    def ask(self, questions: Sequence[q.Question], tell: Progress) -> list[Answer]:
        if self.fate == "killed" and any(question.group == 0 for question in questions):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fate == "raises" and any(question.group == 0 for question in questions):
            raise ZeroDivisionError
        for _ in questions:
            tell(1)
        wrong = {0, 5}
        return [
            Answer("no" if x.group in wrong else x.expected.content, x.expected.calls, cached_tokens=os.getpid())
            for x in questions
        ]

    def score(self, work: Sequence[Scoring], top: int) -> list[list[TokenLogprobs]]:
        if self.fate == "cannot score":
            raise CannotScoreError("no probabilities here")
        return [[TokenLogprobs(token, -float(top)) for token in w.ids[w.start :]] for w in work]


def started(fate: str = "", count: int = 2) -> workers.Workers:
    return workers.Workers("nano", "float32", count, make=Fake(fate))


def test_answers_come_back_in_order_from_all_of_them() -> None:
    talks = q.conversations(12)
    told: list[int] = []
    with started() as target:
        answers = target.ask(talks, told.append)
        work = [Scoring((1, 2, 3), 1), Scoring((4, 5, 6, 7), 2), Scoring((8, 9), 1)]
        scores = target.score(work, 5)
        few = target.ask(q.tool_calls(1), told.append)
    assert "2 processes" in target.name
    alone = Fake().ask(talks, lambda n: None)
    assert [dataclasses.replace(a, cached_tokens=0) for a in answers] == [
        dataclasses.replace(a, cached_tokens=0) for a in alone
    ]
    by_group: dict[int, set[int]] = {}
    for talk, answer in zip(talks, answers, strict=True):
        by_group.setdefault(talk.group, set()).add(answer.cached_tokens)
    assert all(len(pids) == 1 for pids in by_group.values()), "a group is asked by one process"
    assert len(set.union(*by_group.values())) == 2 and os.getpid() not in set.union(*by_group.values())
    assert sum(told) == len(talks) + 1 and len(few) == 1
    assert [[(e.token, e.logprob) for e in own] for own in scores] == [
        [(2, -5), (3, -5)],
        [(6, -5), (7, -5)],
        [(9, -5)],
    ]
    # Scores and intervals do not know how many processes there were.
    for whole, clusters in ((True, False), (False, True)):
        two, one = (run.score(talks, a, 1.0, whole=whole, clusters=clusters) for a in (answers, alone))
        assert (two.score, two.n, two.ci) == (one.score, one.n, one.ci) and two.score < 1


@pytest.mark.parametrize(("fate", "how"), [("killed", "by signal 9"), ("raises", "with exit status 1")])
def test_a_dead_worker_is_reported_and_the_others_end(fate: str, how: str) -> None:
    with started(fate) as target, pytest.raises(Unavailable, match=rf"process \d of 2 \(pid \d+\) ended {how}"):
        target.ask(q.tool_calls(8), lambda n: None)
    assert multiprocessing.active_children() == []


def test_what_a_worker_refuses_is_raised_here() -> None:
    with pytest.raises(UserError, match="there is no such model"):
        started("refuse")
    with started("cannot score") as target:
        with pytest.raises(CannotScoreError, match="no probabilities here"):
            target.score([Scoring((1, 2), 1)], 4)
        assert len(target.ask(q.tool_calls(3), lambda n: None)) == 3, "and it goes on"
    assert multiprocessing.active_children() == []


def test_the_usual_number_of_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(workers, "usable_cores", lambda: 64)
    assert workers.usual_count("nano", "cpu", quick=True) == 2
    assert workers.usual_count("nano", "cpu", quick=False) == 8
    assert workers.usual_count("nano", "cuda", quick=False) == 1
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    monkeypatch.setattr(workers, "SMALL_BYTES", 4)
    assert workers.usual_count(str(tmp_path), "cpu", quick=False) == 1
    monkeypatch.undo()
    assert 1 <= workers.usable_cores() <= (os.cpu_count() or 1)


def test_the_command_refuses_impossible_numbers() -> None:
    for words in (["--model-path", "nano", "--workers", "0"], ["--base-url", "http://127.0.0.1:9", "--workers", "2"]):
        with pytest.raises(UserError, match="--workers"):
            verify_command(words)
    with pytest.raises(UserError, match="--device is cuda"):
        verify_command(["--model-path", "nano", "--device", "cuda", "--workers", "2"])
