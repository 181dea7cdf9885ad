"""Which question is asked when, and how questions are shared."""

from __future__ import annotations

import itertools
from collections import Counter

from k3stack.verify import questions as q
from k3stack.verify.order import Order, deal, places, shares


def drain(order: Order, at_once: int) -> tuple[list[list[int]], int]:
    """Rounds of questions, each answered before the next; the most that were open."""
    rounds = []
    while order.left:
        taken = list(itertools.islice(iter(order.take, None), at_once))
        rounds.append(taken)
        for i in taken:
            order.done(i)
    assert order.take() is None
    return rounds, max(map(len, rounds))


def test_a_turn_waits_for_the_one_before() -> None:
    order = Order([(7, 0), (7, 1), (7, 2), (7, 2), (7, 2)], 64)
    assert (order.take(), order.take()) == (0, None)
    order.done(0)
    assert (order.take(), order.take()) == (1, None)
    order.done(1)
    assert [order.take() for _ in range(4)] == [2, 3, 4, None]
    for i in (4, 2, 3):
        assert order.left == {4: 3, 2: 2, 3: 1}[i]
        order.done(i)
    assert order.left == 0


def test_conversations_go_on_beside_each_other_and_the_longest_begin_first() -> None:
    talks = q.conversations(40)
    order = Order(places(talks), 16)
    rounds, most = drain(order, 16)
    assert sorted(i for taken in rounds for i in taken) == list(range(len(talks)))
    assert most == 16, "one turn each of 16 conversations at once"
    turns = Counter(t.group for t in talks)
    first = [turns[talks[i].group] for i in rounds[0]]
    assert first == sorted(turns.values(), reverse=True)[:16]
    assert len(rounds) < 1.3 * len(talks) / 16, "no waiting for the slowest of a wave"
    seen: dict[int, int] = {}
    for i in (i for taken in rounds for i in taken):
        assert seen.get(talks[i].group, -1) == talks[i].turn - 1
        seen[talks[i].group] = talks[i].turn


def test_few_documents_are_open_at_once() -> None:
    """Their questions fill the batch; more of them would only fill the memory."""
    asked = [(g, min(i, 2)) for g in range(20) for i in range(32)]
    order = Order(asked, 64)
    assert [order.take() for _ in range(4)] == [0, 32, 64, None]
    rounds, most = drain(Order(asked, 64), 64)
    assert most == 64
    finished = [max(n for n, taken in enumerate(rounds) if any(asked[i][0] == g for i in taken)) for g in range(20)]
    assert finished == sorted(finished)


def test_shares_keep_groups_together_and_are_alike() -> None:
    talks = q.conversations(60)
    for count in (1, 2, 3):
        parts = shares(talks, count)
        assert sorted(i for part in parts for i in part) == list(range(len(talks)))
        assert len(parts) == count and all(part == sorted(part) for part in parts)
        groups = [{talks[i].group for i in part} for part in parts]
        assert sum(map(len, groups)) == 60
        assert max(map(len, parts)) <= 1.25 * min(map(len, parts))
    # Every effort in turn: dealing the questions out one by one would give one share all the short answers.
    calls = q.tool_calls(64)
    efforts = [Counter(calls[i].effort for i in part if calls[i].thinking) for part in shares(calls, 2)]
    assert [found["max"] for found in efforts] == [4, 4]


def test_deal_gives_the_dearest_first_and_leaves_nobody_empty() -> None:
    assert deal([1, 9, 3, 3, 4], 2) == [[0, 1], [2, 3, 4]]
    assert deal([5, 5], 4) == [[0], [1]]
    assert deal([], 3) == []
