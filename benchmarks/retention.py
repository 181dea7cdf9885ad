"""What share of prompt tokens is found cached, by what the memory evicts: by worth (ours) and by least recent use.

The real allocator and prefix tree at Kimi-K3's sizes (TP8), one request at a time, no network. Traffic:

- in turn: 8 or 40 histories of 4,000 tokens whose turns come round one after the other;
- shuffled: the same 8, each round in another order;
- agents: sessions born at random on one system prompt that return after lognormal pauses (median 20 arrivals) and end;
- agents, 60 % once: as before, three in five sessions end after their first turn;
- popular: 60 documents asked about with Zipf's frequencies, each time another question.

    python benchmarks/retention.py [--blocks 14 30 60 120] [--json]
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Callable, Iterator

from k3stack.config.models import model_geometry
from k3stack.estimate.pools import block_layout, plan_pools
from k3stack.memory import Memory
from k3stack.memory.retention import Recency

ANSWER = 40
Traffic = Iterator[list[int]]


def tokens(count: int, rng: random.Random) -> list[int]:
    return rng.choices(range(160_000), k=count)


def in_turn(rng: random.Random, histories: int, rounds: int = 8, shuffled: bool = False) -> Traffic:
    sessions = [tokens(4_000, rng) for _ in range(histories)]
    for _ in range(rounds):
        if shuffled:
            rng.shuffle(sessions)
        for ids in sessions:
            ids += tokens(60, rng)
            yield ids


def agents(rng: random.Random, once: float = 0.0, requests: int = 800) -> Traffic:
    system = tokens(2_000, rng)
    waiting: list[tuple[float, int, int, list[int]]] = []
    now, born = 0.0, 0
    for _ in range(requests):
        if not waiting or waiting[0][0] > now + 1:
            now, born = now + 1, born + 1
            turns = 1 if rng.random() < once else rng.randint(2, 12)
            ids = system + tokens(rng.randint(500, 6_000), rng)
        else:
            now, _, turns, ids = heapq.heappop(waiting)
        ids += tokens(rng.randint(20, 600), rng)
        yield ids
        if turns > 1:
            heapq.heappush(waiting, (now + rng.lognormvariate(3.0, 1.0), born * 100 + turns, turns - 1, ids))


def popular(rng: random.Random, documents: int = 60, requests: int = 600) -> Traffic:
    texts = [tokens(4_000, rng) for _ in range(documents)]
    for _ in range(requests):
        (text,) = rng.choices(texts, [1 / (i + 1) for i in range(documents)])
        yield [*text, *tokens(60, rng)]


TRAFFIC: dict[str, Callable[[random.Random], Traffic]] = {
    "8 in turn": lambda rng: in_turn(rng, 8),
    "40 in turn": lambda rng: in_turn(rng, 40),
    "8 shuffled": lambda rng: in_turn(rng, 8, 12, shuffled=True),
    "agents": agents,
    "agents, 60 % once": lambda rng: agents(rng, 0.6),
    "popular": popular,
}


def serve(memory: Memory, ids: list[int], rng: random.Random) -> bool:
    """One request from open to close; ``ids`` grows by the answer. False: the arena is too small for it."""
    opened = memory.open(0, ids)
    if opened is None:
        return False
    at = opened.cached
    while at < len(ids):
        end = memory.cut(0, at, min(len(ids), at + 16_384))
        if memory.extend(0, end) is None:
            memory.close(0, ids, state_at=None)
            return False
        memory.snapshot(0, ids, end)
        memory.advance(0, ids, end)
        at = end
    ids += tokens(ANSWER, rng)
    fits = memory.extend(0, len(ids)) is not None
    memory.close(0, ids, state_at=len(ids) - 1 if fits else None)
    return fits


def share(traffic: str, blocks: int, by_worth: bool) -> float:
    """Cached share of all prompt tokens."""
    layout = block_layout(model_geometry("kimi-k3"), tp=8)
    plan = plan_pools(layout, blocks * layout.block_bytes)
    memory, rng = Memory(plan, ranking=None if by_worth else Recency()), random.Random(1)
    for ids in TRAFFIC[traffic](rng):
        serve(memory, ids, rng)
    memory.check()
    stats = memory.stats()
    return stats.cached_tokens / stats.prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[14, 30, 60, 120])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = {t: {b: [share(t, b, True), share(t, b, False)] for b in args.blocks} for t in TRAFFIC}
    if args.json:
        print(json.dumps(rows))
        return
    print("| traffic | " + " | ".join(f"{b} blocks" for b in args.blocks) + " |")
    print("|---" * (len(args.blocks) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{100 * w:.0f} / {100 * r:.0f} %" for w, r in row.values()) + " |")


if __name__ == "__main__":
    main()
