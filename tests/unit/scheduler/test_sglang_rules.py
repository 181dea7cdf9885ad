"""Behaviour sglang: admission by estimate, chunks at whole pages, retraction by least output."""

from __future__ import annotations

from typing import Any

import pytest

from k3stack.errors import UserError
from k3stack.scheduler import SchedulerOptions, SglangEstimate
from k3stack.scheduler.sglang_rules import SglangRules
from tests.unit.scheduler.rig import Rig, pool


def sglang_pool(requests: int, pages: int, slots: int = 3) -> Any:
    states = requests * slots
    return pool(states + -(-pages // 4), 4, 4, engine="sglang", max_states=states, max_pages=pages,
                slots_per_request=slots, max_running=requests)  # fmt: skip


def options(**fields: Any) -> SchedulerOptions:
    base = {"context": 4096, "max_running": 8, "chunk_tokens": 16, "max_queued": 64}
    return SchedulerOptions.for_sglang(**{**base, **fields})


def rules(rig: Rig) -> SglangRules:
    found = rig.scheduler._rules
    assert isinstance(found, SglangRules)
    return found


def running(rig: Rig) -> int:
    stats = rig.scheduler.stats()
    return stats.prefilling + stats.decoding + stats.finishing


def test_admission_counts_the_whole_output_of_a_candidate() -> None:
    """25 pages are 100 tokens. A candidate needs prompt + output + one page of rows below what is left:
    20 + 20 + 4 < 100, then 44 < 100 - 20 (pages of the first) - held."""
    for outputs, admitted in ((16, 2), (60, 1)):
        rig = Rig(sglang_pool(4, 25), options(chunk_tokens=64), overlap=1)
        for rid in "ab":
            rig.submit(rid, [ord(rid), *range(19)], max_tokens=outputs)
        rig.turn()
        assert running(rig) == admitted, outputs
        rig.run()
        rig.check_tokens()


def test_fixed_length_requests_hold_all_of_their_output_back() -> None:
    """A running request of 20 + 40 tokens with 35 left holds 35 or the share of it; the second needs 20 + 12 + 4."""
    for fixed, admitted in ((False, 2), (True, 1)):
        rig = Rig(sglang_pool(4, 25), options(chunk_tokens=64), overlap=1)
        rig.submit("a", [1, *range(19)], max_tokens=60, ignore_eos=fixed)
        for _ in range(6):
            rig.turn()
        rules(rig).share = 0.2
        rig.submit("b", [2, *range(19)], max_tokens=12)
        rig.turn()
        assert running(rig) == admitted
        rig.run()
        rig.check_tokens()


def test_chunks_end_at_whole_pages_and_only_one_is_cut() -> None:
    rig = Rig(sglang_pool(4, 64), options(chunk_tokens=16), overlap=1, prefix_cache=False)
    rig.submit("a", [1, *range(9)], max_tokens=2)
    rig.submit("b", [2, *range(29)], max_tokens=2)
    rig.submit("c", [3, *range(5)], max_tokens=2)
    rig.run()
    rig.check_tokens()
    chunks = [[(w.start, w.count) for w in p.groups[0].work] for p in rig.plans if p.groups[0].work]
    # a takes 10; of the 6 left, b gets one page; then b goes first. Of the 6 left then, c's 6 would fill two pages.
    assert chunks == [[(0, 10), (0, 4)], [(4, 16)], [(20, 10), (0, 4)], [(4, 2)]]


def test_the_estimate_decays_and_is_reset_when_idle() -> None:
    rig = Rig(sglang_pool(2, 64), options(), overlap=1)
    assert rules(rig).share == pytest.approx(0.7)
    rig.submit("a", 8, max_tokens=31)
    for _ in range(31):
        rig.turn()
    assert rules(rig).share == pytest.approx(0.7 - 30 * (0.7 - 0.7 * 0.14) / 600)
    rig.run()
    assert rules(rig).share == pytest.approx(0.7)
    for _ in range(700):
        rules(rig).decoded(1)
    assert rules(rig).share == pytest.approx(0.098)


def test_least_output_and_longest_prompt_are_retracted_first() -> None:
    rig = Rig(sglang_pool(3, 22), options(chunk_tokens=64), overlap=1, prefix_cache=False)
    rules(rig).first = rules(rig).share = rules(rig).least = 0.0
    for rid, prompt, outputs in (("most", 8, 40), ("long", 12, 40), ("short", 8, 40)):
        rig.submit(rid, [ord(rid[0]), *range(prompt - 1)], max_tokens=outputs)
        for _ in range(3 if rid == "most" else 1):
            rig.turn()
    order: list[str] = []
    preempted = rules(rig).preempted
    rules(rig).preempted = lambda e: (order.append(e.rid), preempted(e))[1]  # type: ignore[method-assign]
    while len(order) < 2 and rig.turn():
        assert rules(rig).share <= 1
    assert order == ["long", "short"]
    assert rules(rig).share > 0
    rig.run()
    rig.check_tokens()
    assert rig.ends["most"].times.finished == min(e.times.finished for e in rig.ends.values())


def test_finish_order_admits_what_the_estimate_would_not() -> None:
    """Two requests of 20 + 60 tokens in 100: the estimate refuses the second; it would do so in finish order too
    (160 tokens in all); but 20 + 10 beside 20 + 60 fit, since the first to finish frees its tokens."""
    for second, admitted in ((60, 1), (10, 2)):
        rig = Rig(sglang_pool(4, 25), options(chunk_tokens=64, estimate=SglangEstimate(finish_order=True)),
                  overlap=1, prefix_cache=False)  # fmt: skip
        rig.submit("a", [1, *range(19)], max_tokens=60, ignore_eos=True)
        rig.submit("b", [2, *range(19)], max_tokens=second, ignore_eos=True)
        rig.turn()
        assert running(rig) == admitted
        rig.run()
        rig.check_tokens()


def test_the_estimate_of_a_small_pool_would_not_admit_both() -> None:
    rig = Rig(sglang_pool(4, 25), options(chunk_tokens=64), overlap=1, prefix_cache=False)
    rig.submit("a", [1, *range(19)], max_tokens=60, ignore_eos=True)
    rig.submit("b", [2, *range(19)], max_tokens=10, ignore_eos=True)
    rig.turn()
    assert running(rig) == 1
    rig.run()


def test_chunks_below_a_page_are_refused() -> None:
    with pytest.raises(UserError, match="page of 4"):
        Rig(sglang_pool(2, 16), options(chunk_tokens=3))
