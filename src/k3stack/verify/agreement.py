"""Teacher-forced agreement with stored outputs of the reference: finer by orders of magnitude than any score.

The file holds token sequences, and for chosen positions the reference's 32 best log-probabilities and the mass of the
rest. Two kinds of sequence: short conversations, scored from their start in one batch, and documents
of 8,192 tokens whose tail is scored after the document itself was computed by an earlier request, so that it continues
from a cached prefix and a restored state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3stack.chat import Tokenizer
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.verify.language.talk import Conversation, Talker
from k3stack.verify.target import Scoring, Target

TOP = 32
ASKED_TOP = 64
"""More than the reference keeps, so that its ids are found also where the order has changed a little."""
SHORT, LONG = 24, 2
TAIL = 700
RESOLUTION = 1e-7
"""What a sum of float32 probabilities can tell from one."""
Logits = Callable[[Sequence[int]], npt.NDArray[np.floating]]


@dataclass(frozen=True)
class Reference:
    """``positions[i]``: for sequence i the positions t whose prediction of ``ids[t]`` is stored, ascending."""

    work: tuple[Scoring, ...]
    positions: tuple[npt.NDArray[np.int64], ...]
    top_ids: tuple[npt.NDArray[np.uint16], ...]
    top_logprobs: tuple[npt.NDArray[np.float32], ...]
    rest: tuple[npt.NDArray[np.float32], ...]
    """Mass of all other tokens."""


@dataclass(frozen=True)
class Agreement:
    top1: float
    """Share of positions with the same most likely token."""
    mean_kl: float
    max_kl: float
    """KL divergence of the reference's distribution from the target's, in nats; the rest counts as one outcome."""
    n: int


def sequences(tokenizer: Tokenizer, encode: Callable[[Conversation], tuple[list[int], int]]) -> list[Scoring]:
    """What is scored. ``encode``: ids of a conversation, and how many of them come before its first question."""
    talker = Talker("verify:agreement", held_out=True)
    work = []
    for i in range(SHORT):
        ids, _ = encode((talker.conversation, talker.tool_use)[i % 2]())
        work.append(Scoring(tuple(ids[:1200]), 1))
    for _ in range(LONG):
        text, facts = talker.long_text(tokenizer.encode_text, 8192)
        ids, first = encode(talker.ask_about(text, talker.rng.sample(facts, 12), "low"))
        work.append(Scoring(tuple(ids[: first + TAIL]), first, first))
    return work


def make(work: Sequence[Scoring], logits: Logits) -> Reference:
    """The reference from a model's ``logits`` (float64 for a good one)."""
    positions, ids, values, rest = [], [], [], []
    for w in work:
        step = 1 if w.first else 4
        at = np.arange(max(1, w.start), len(w.ids), step)
        rows = np.asarray(logits(w.ids), np.float64)[at - 1]
        rows -= rows.max(1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(1, keepdims=True))
        order = np.argsort(-rows, 1, kind="stable")[:, :TOP]
        positions.append(at)
        ids.append(order.astype(np.uint16))
        values.append(np.take_along_axis(rows, order, 1).astype(np.float32))
        np.put_along_axis(rows, order, -np.inf, 1)
        rest.append(np.exp(rows).sum(1).astype(np.float32))
    return Reference(tuple(work), tuple(positions), tuple(ids), tuple(values), tuple(rest))


def save(reference: Reference, path: Path) -> None:
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for i, w in enumerate(reference.work):
        arrays[f"ids{i}"] = np.array(w.ids, np.uint16)
        arrays[f"from{i}"] = np.array((w.start, w.first), np.int64)
        arrays[f"at{i}"] = reference.positions[i]
        arrays[f"top{i}"] = reference.top_ids[i]
        arrays[f"logprob{i}"] = reference.top_logprobs[i]
        arrays[f"rest{i}"] = reference.rest[i]
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def load(path: Path | None = None) -> Reference:
    """The stored reference of the built-in model, or another file of the same form."""
    raw = path.read_bytes() if path else files("k3stack.verify").joinpath("data/nano-agreement.npz").read_bytes()
    with np.load(io.BytesIO(raw)) as a:
        count = sum(name.startswith("ids") for name in a.files)
        work = tuple(
            Scoring(tuple(a[f"ids{i}"].tolist()), int(a[f"from{i}"][0]), int(a[f"from{i}"][1])) for i in range(count)
        )
        stored = [tuple(a[f"{part}{i}"] for i in range(count)) for part in ("at", "top", "logprob", "rest")]
    return Reference(work, *stored)


def quick(reference: Reference) -> Reference:
    """Six short sequences and one long one."""
    keep = [*range(6), len(reference.work) - 1]
    parts = (reference.positions, reference.top_ids, reference.top_logprobs, reference.rest)
    picked = [tuple(part[i] for i in keep) for part in parts]
    return Reference(tuple(reference.work[i] for i in keep), *picked)


def compare(reference: Reference, target: Target) -> Agreement:
    """Score the reference's sequences with ``target``. Raises CannotScoreError."""
    same: list[bool] = []
    divergence: list[float] = []
    for i, entries in enumerate(target.score(reference.work, ASKED_TOP)):
        offset = len(reference.work[i].ids) - len(entries)
        for row, at in enumerate(reference.positions[i].tolist()):
            entry = entries[at - offset]
            ids, values = reference.top_ids[i][row].tolist(), reference.top_logprobs[i][row].astype(np.float64)
            same.append(entry.top_ids[0] == ids[0])
            divergence.append(kl(ids, values, float(reference.rest[i][row]), entry))
    return Agreement(float(np.mean(same)), float(np.mean(divergence)), float(np.max(divergence)), len(same))


def kl(ids: Sequence[int], logprobs: npt.NDArray[np.float64], rest: float, entry: TokenLogprobs) -> float:
    """KL in nats over the reference's best tokens and the rest as one outcome.

    A token that the target does not list is at most as likely as the last one it lists: that bound stands for it.
    """
    listed = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
    floor = min(entry.top_logprobs)
    other = np.array([listed.get(i, floor) for i in ids], np.float64)
    p, q = np.exp(logprobs), np.exp(other)
    total = float((p * (logprobs - other)).sum())
    if rest > 0:
        total += rest * float(np.log(rest / max(1 - q.sum(), RESOLUTION)))
    return max(total, 0.0)
