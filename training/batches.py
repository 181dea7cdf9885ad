"""Packed batches from the generator: worker processes fill a queue with streams of a fixed number of tokens."""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path
from typing import Any

import numpy as np

from k3stack.verify.language.talk import Conversation, Talker
from training.format import Formatter

Data = dict[str, Any]
KINDS = ("tool_call", "tool_use", "conversation", "chat", "lookup")
WEIGHTS = (1.0, 1.0, 1.0, 0.6, 1.5)


def mixture(progress: float) -> tuple[tuple[float, ...], int]:
    """Shares of tokens by kind, and the longest document in sentences, at ``progress`` 0..1 of the training.

    Documents grow from a few sentences to about 1,000 (12,000 tokens): look-ups form on short ones first.
    """
    if progress < 0.04:
        return (0.2, 0.15, 0.15, 0.1, 0.4), 40
    if progress < 0.1:
        return (0.2, 0.15, 0.2, 0.05, 0.4), 120
    if progress < 0.2:
        return (0.15, 0.15, 0.2, 0.03, 0.47), 400
    return (0.28, 0.16, 0.28, 0.01, 0.27), 1000


def draw(talker: Talker, kind: str, longest: int) -> Conversation:
    if kind != "lookup":
        return getattr(talker, kind)()  # type: ignore[no-any-return]
    rng = talker.rng
    if longest > 500 and rng.random() < 0.6:  # most tokens of the late phase come from full-length documents
        sentences = rng.randint(500, longest)
    else:
        sentences = int(2 ** rng.uniform(2.5, np.log2(min(longest, 500))))
    return talker.lookup(sentences, max(3, min(56, sentences // 3)))


def pack(talks: list[tuple[list[int], list[bool], int]], size: int, pad: int) -> Data:
    """One stream of exactly ``size`` tokens; the last conversation is cut, and a short rest is padding."""
    ids = np.full(size, pad, np.uint16)
    mask = np.zeros(size, bool)
    weight = np.ones(size, np.float32)
    kind = np.zeros(size, np.uint8)
    position = np.zeros(size, np.int32)
    cu, at = [0], 0
    for tokens, learn, which in talks:
        n = min(len(tokens), size - at)
        if n == 0:
            break
        ids[at : at + n], mask[at : at + n] = tokens[:n], learn[:n]
        kind[at : at + n], weight[at : at + n] = which, WEIGHTS[which]
        position[at : at + n] = np.arange(n)
        at += n
        cu.append(at)
    if at < size:
        position[at:] = np.arange(size - at)
        cu.append(size)
    where = np.flatnonzero(mask)
    turn = np.cumsum(np.diff(where, prepend=-9) > 1)
    # A think block's tail and the response's head are one run of the mask, so a run is one assistant turn.
    return {
        "ids": ids,
        "position": position,
        "cu": np.array(cu, np.int64),
        "where": where - 1,
        "target": ids[where],
        "weight": weight[where],
        "turn": turn,
        "kind": kind[where],
    }


def fill(talker: Talker, form: Formatter, size: int, progress: float, fixed: tuple[float, ...] | None = None) -> Data:
    """One batch; ``fixed`` shares of tokens by kind replace those of the curriculum."""
    shares, longest = mixture(progress)
    shares = fixed or shares
    talks: list[tuple[list[int], list[bool], int]] = []
    for which, kind in enumerate(KINDS):
        room = int(size * shares[which])
        while room > 0:
            ids, mask = form.encode(draw(talker, kind, longest))
            ids, mask = ids[:16384], mask[:16384]
            talks.append((ids, mask, which))
            room -= len(ids)
    talker.rng.shuffle(talks)
    return pack(talks, size, form.pad)


def questions(form: Formatter, kind: str, size: int, *, held_out: bool, sentences: int = 0, asked: int = 24) -> Data:
    """A stream of whole conversations of one kind, for scores during training."""
    talker = Talker(f"eval:{kind}:{sentences}", held_out=held_out)
    which = KINDS.index(kind)
    talks, total = [], 0
    while True:
        talk = talker.lookup(sentences, asked, density=0.5) if kind == "lookup" else getattr(talker, kind)()
        ids, mask = form.encode(talk)
        if total + len(ids) > size:
            return pack(talks, size, form.pad)
        talks.append((ids, mask, which))
        total += len(ids)


def _work(queue: Any, progress: Any, model_file: str, size: int, shares: tuple[float, ...] | None, seed: str) -> None:
    form = Formatter(Path(model_file))
    number = 0
    while True:
        talker = Talker(f"{seed}:{number}", held_out=False)
        queue.put(fill(talker, form, size, progress.value, shares))
        number += 1


class Source:
    """``next()`` gives batches; ``progress.value`` moves the curriculum. Call ``stop`` at the end.

    The order in which workers deliver is not fixed; each worker's stream is (seed, worker number, batch number).
    """

    def __init__(
        self, model_file: Path, size: int, workers: int, seed: str, shares: tuple[float, ...] | None = None
    ) -> None:
        context = mp.get_context("fork")
        self.progress = context.Value("d", 0.0)
        self.queue: Any = context.Queue(maxsize=4)
        args = (self.queue, self.progress, str(model_file), size, shares)
        self.workers = [context.Process(target=_work, args=(*args, f"{seed}:{w}"), daemon=True) for w in range(workers)]
        for worker in self.workers:
            worker.start()

    def next(self) -> Data:
        return self.queue.get(timeout=120)  # type: ignore[no-any-return]

    def stop(self) -> None:
        for worker in self.workers:
            worker.terminate()
