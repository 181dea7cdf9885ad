"""One verification: questions, agreement, thresholds, a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from k3stack.chat import Tokenizer
from k3stack.verify import agreement as agree
from k3stack.verify import questions as q
from k3stack.verify.statistics import clustered, wilson
from k3stack.verify.target import Answer, CannotScoreError, Target

FULL = (2000, 64, 500)
"""Tool calls, documents (of 32 questions each), conversations."""
QUICK = (128, 2, 24)
THRESHOLDS: Mapping[str, float] = {"tool_calls": 0.95, "long_lookups": 0.95, "conversations": 0.90}
"""Less than what the shipped checkpoint reaches (docs/k3-nano.md): the gate is about how it is run, not how good it is.
Questions and greedy answers are fixed, so a correct run repeats the checkpoint's own score."""
NARROW = "narrow"
AGREEMENT: Mapping[str, Mapping[str, float]] = {
    "float64": {"top1": 0.999, "mean_kl": 1e-7, "max_kl": 2e-5},
    "float32": {"top1": 0.999, "mean_kl": 1e-7, "max_kl": 2e-5},
    "bfloat16": {"top1": 0.98, "mean_kl": 1e-2, "max_kl": 6.0},
    NARROW: {"top1": 0.96, "mean_kl": 2e-2, "max_kl": 6.0},
}
"""By compute dtype; docs/verify.md says what each was measured against."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Score:
    """``ci``: 95 % interval. ``truncated`` and ``failed`` answers count as wrong and are told apart here."""

    score: float
    n: int
    ci: tuple[float, float]
    truncated: int
    failed: int
    seconds: float
    cached_tokens: float
    """Prompt tokens that were reused, on the mean of the answers; 0 where a server does not report them."""


def score(
    questions: Sequence[q.Question], answers: Sequence[Answer], seconds: float, *, whole: bool, clusters: bool
) -> Score:
    """``whole``: a group counts once, when all of its turns are right. ``clusters``: the interval knows the groups."""
    right = [
        answer.failure is None and not answer.truncated and q.is_right(question.expected, answer.content, answer.calls)
        for question, answer in zip(questions, answers, strict=True)
    ]
    groups = [question.group for question in questions]
    if whole:
        by_group: dict[int, bool] = {}
        for group, ok in zip(groups, right, strict=True):
            by_group[group] = by_group.get(group, True) and ok
        right, groups = list(by_group.values()), list(by_group)
    n = len(right)
    ci = clustered(right, groups) if clusters else wilson(sum(right), n)
    cut = sum(a.truncated for a in answers)
    failed = sum(a.failure is not None for a in answers)
    reused = sum(a.cached_tokens for a in answers) / max(1, len(answers))
    return Score(sum(right) / n, n, ci, cut, failed, round(seconds, 1), round(reused, 1))


def verify(
    target: Target,
    tokenizer: Tokenizer,
    *,
    dtype: str,
    narrow: bool = False,
    sizes: tuple[int, int, int] = FULL,
    quick: bool = False,
    thresholds: Mapping[str, float] | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """The report: the scores, the agreement (null with ``agreement_reason``), what was missed, and ``passed``.
    ``narrow``: cache rows or states are kept in less than ``dtype``."""
    say(f"verifying {target.name}")
    limits = {
        **THRESHOLDS,
        **{f"agreement.{k}": v for k, v in AGREEMENT[NARROW if narrow else dtype].items()},
        **(thresholds or {}),
    }
    report: dict[str, Any] = {"target": target.name}
    report |= _agreement(target, quick, say)
    built = q.build(QUICK if quick else sizes, tokenizer)
    plan = (
        ("tool_calls", built.tool_calls, False, False),
        ("long_lookups", built.long_lookups, False, True),
        ("conversations", built.conversations, True, False),
    )
    for name, questions, whole, clusters in plan:
        began = time.monotonic()
        answers = target.ask(questions, _progress(say, name, len(questions)))
        found = score(questions, answers, time.monotonic() - began, whole=whole, clusters=clusters)
        report[name] = asdict(found)
        say(f"{name}: {found.score:.4f} of {found.n:,}, 95 % interval {found.ci[0]:.4f} to {found.ci[1]:.4f}")
        failed = [a.failure for a in answers if a.failure is not None]
        if failed:
            say(f"{name}: {len(failed)} requests failed; the first: {failed[0]}")
    report["thresholds"] = limits
    report["missed"] = missed(report, limits)
    report["passed"] = not report["missed"]
    return report


def missed(report: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """One line for each threshold that is not met; agreement that could not be measured misses nothing."""
    out = [
        f"{name} {report[name]['score']:.4f} is below {limits[name]:g}"
        for name in THRESHOLDS
        if name in report and report[name]["score"] < limits[name]
    ]
    found = report.get("agreement")
    if found is not None:
        if found["top1"] < limits["agreement.top1"]:
            out.append(f"agreement.top1 {found['top1']:.5f} is below {limits['agreement.top1']:g}")
        for name in ("mean_kl", "max_kl"):
            if not found[name] <= limits[f"agreement.{name}"]:
                out.append(f"agreement.{name} {found[name]:.3g} is above {limits[f'agreement.{name}']:g}")
    return out


def _agreement(target: Target, quick: bool, say: Say) -> dict[str, Any]:
    reference = agree.load()
    try:
        found = agree.compare(agree.quick(reference) if quick else reference, target)
    except CannotScoreError as e:
        say(f"agreement: not measured; {e}")
        return {"agreement": None, "agreement_reason": str(e)}
    say(
        f"agreement: top1 {found.top1:.5f}, mean KL {found.mean_kl:.3g}, largest {found.max_kl:.3g} "
        f"at {found.n:,} positions"
    )
    return {"agreement": asdict(found)}


def _progress(say: Say, name: str, total: int) -> Callable[[int], None]:
    """Says at every tenth how far it is."""
    done = told = 0

    def tell(count: int) -> None:
        nonlocal done, told
        done += count
        if done * 10 // total > told:
            told = done * 10 // total
            say(f"  {name}: {done:,} of {total:,}")

    return tell
