"""The cases that have crashed other engines, each by name, on the toy device, with one and two plans in flight."""

from __future__ import annotations

import pytest

from k3stack.scheduler import PrefillFirst
from tests.unit.scheduler.rig import Rig, pool, with_options

both = pytest.mark.parametrize("overlap", [1, 2])


@both
def test_prompt_fully_cached(overlap: int) -> None:
    rig = Rig(overlap=overlap)
    rig.submit("first", 16, max_tokens=8)
    rig.run()
    rig.submit("again", 16, max_tokens=8)
    rig.submit("with answer", [*range(1, 17), *rig.tokens["first"]], max_tokens=8)
    rig.run()
    rig.check_tokens()
    # At least one token has to be computed: the snapshot at 16 is of no use for "again", a shallower one may be.
    assert rig.ends["again"].cached_tokens < 16
    assert rig.ends["with answer"].cached_tokens >= 16


@both
def test_prompt_of_exactly_one_page_again_and_again(overlap: int) -> None:
    rig = Rig(overlap=overlap)
    for i in range(4):
        rig.submit(f"r{i}", [1, 2, 3, 4], max_tokens=5)
        if i % 2:
            rig.run()
    rig.run()
    rig.check_tokens()


@both
def test_hit_that_ends_inside_a_page(overlap: int) -> None:
    rig = Rig(overlap=overlap)
    rig.submit("first", 10, max_tokens=1)
    rig.run()
    rig.submit("longer", [*range(1, 11), 77, 78, 79], max_tokens=6)
    rig.submit("other", [*range(1, 11), 55], max_tokens=6)
    rig.run()
    rig.check_tokens()
    assert rig.ends["longer"].cached_tokens == 10 and rig.ends["other"].cached_tokens == 10


@both
def test_pages_cached_without_a_snapshot(overlap: int) -> None:
    rig = Rig(overlap=overlap)
    rig.submit("first", 20, max_tokens=4)
    rig.run()
    rig.submit("fork", [*range(1, 13), 99, 98, 97], max_tokens=6)
    rig.run()
    rig.check_tokens()
    assert rig.ends["fork"].cached_tokens < 12
    assert rig.memory.stats().pages_without_snapshot >= 1


@both
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_two_running_requests_insert_the_same_prefix(overlap: int, chunk: int) -> None:
    rig = Rig(overlap=overlap, options=with_options(chunk_tokens=chunk), policy=PrefillFirst(mixed=True))
    rig.submit("a", 20, max_tokens=12)
    rig.submit("b", 20, max_tokens=12)
    rig.submit("c", [*range(1, 19), 50], max_tokens=12)
    rig.run()
    rig.check_tokens()
    assert rig.tokens["a"] == rig.tokens["b"]


@both
def test_two_requests_share_a_prefix_once_it_exists(overlap: int) -> None:
    rig = Rig(overlap=overlap)
    rig.submit("a", 32, max_tokens=30)
    for _ in range(4):
        rig.turn()
    rig.submit("b", [*range(1, 33), 5], max_tokens=4)
    for _ in range(2):
        rig.turn()
    assert "a" not in rig.ends
    pages = rig.memory.stats().pages_running
    assert pages < 2 * 9, "the prompt's eight pages are held once"
    rig.run()
    rig.check_tokens()
    assert rig.ends["b"].cached_tokens == 32


@both
@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_abort_with_a_step_in_flight_then_the_same_prompt(overlap: int, turns: int) -> None:
    rig = Rig(overlap=overlap, options=with_options(chunk_tokens=8))
    rig.submit("a", 20, max_tokens=12)
    for _ in range(turns):
        rig.turn()
    rig.loop.launch()
    rig.scheduler.abort("a")
    rig.take()
    rig.scheduler.check()
    rig.submit("b", 20, max_tokens=12)
    rig.run()
    rig.check_tokens()
    assert rig.ends["a"].reason == "abort"


@both
def test_preemption_followed_by_a_full_hit(overlap: int) -> None:
    """What the preempted request had is still there when it comes back: all of it but the last token is reused."""
    rig = Rig(pool(blocks=8), overlap=overlap, options=with_options(max_running=1))
    rig.submit("low", 20, max_tokens=40, frequency_penalty=0.3, seed=5)
    for _ in range(15):
        rig.turn()
    had = len(rig.tokens["low"])
    rig.submit("high", [9, 9, 9], max_tokens=2, priority=1)
    rig.run()
    rig.check_tokens()
    assert rig.scheduler.stats().preempted == 1
    adds = [a for p in rig.plans for a in p.groups[0].added if a.sampling.seed == 5]
    assert len(adds) == 2
    resumed = adds[1]
    assert resumed.length >= 20 + had - 1
    assert resumed.output_count == len(resumed.output_ids) >= had


@both
def test_preemption_without_anything_left_starts_anew(overlap: int) -> None:
    rig = Rig(pool(blocks=8), overlap=overlap, options=with_options(max_running=1), prefix_cache=False)
    rig.submit("low", 20, max_tokens=40, repetition_penalty=1.2)
    for _ in range(15):
        rig.turn()
    rig.submit("high", [9, 9, 9], max_tokens=2, priority=1)
    rig.run()
    rig.check_tokens()
    adds = [a for p in rig.plans for a in p.groups[0].added if a.sampling.repetition_penalty == 1.2]
    assert [a.length for a in adds] == [0, 0] and adds[1].prompt_ids == rig.requests["low"].prompt_ids


@both
def test_a_lone_request_that_fits_exactly_finishes(overlap: int) -> None:
    """Everything else in memory gives way to it, cached prefixes of other requests and its own snapshots."""
    rig = Rig(pool(blocks=5), overlap=overlap, track_interval=4)
    for i in range(6):
        rig.submit(f"warm{i}", [i, *range(20)], max_tokens=4)
    rig.run()
    rig.submit("all", [7] * 33, max_tokens=32)
    rig.run()
    rig.check_tokens()
    assert rig.ends["all"].reason == "length"
    assert rig.scheduler.stats().rescued == 0


@both
def test_flush_while_requests_run(overlap: int) -> None:
    rig = Rig(overlap=overlap)
    for i in range(4):
        rig.submit(f"r{i}", [i % 2, *range(12)], max_tokens=10)
    for _ in range(12):
        rig.turn()
        rig.memory.flush()
    rig.run()
    rig.check_tokens()
