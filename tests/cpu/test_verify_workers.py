"""`k3 verify` in several processes with the model in each."""

from __future__ import annotations

from k3stack.verify import agreement as agree
from k3stack.verify import questions as q
from k3stack.verify.run import AGREEMENT
from k3stack.verify.workers import Workers
from tests.cpu.test_nano_faults import part


def test_two_processes_score_and_answer() -> None:
    with Workers("nano", "float32", 2) as target:
        found = agree.compare(part([0, 1]), target)
        documents = q.long_lookups(2, target.tokenizer, asked=3, tokens=500)
        answers = target.ask(documents, lambda n: None)
    assert found.top1 == 1.0 and found.mean_kl <= AGREEMENT["float32"]["mean_kl"]
    right = [q.is_right(x.expected, a.content, a.calls) for x, a in zip(documents, answers, strict=True)]
    assert right == [True] * 6, "these the model answers right, whoever runs it"
    reused = [a.cached_tokens >= 448 for a in answers]
    assert reused == [False, False, True] * 2, "the second question shows where prompts part, the third reuses"
