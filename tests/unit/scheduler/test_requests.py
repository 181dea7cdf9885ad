"""Requests from submission to their one end: limits, stops, refusals, aborts, drain, preemption, masks, scores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from k3stack.errors import BugError
from k3stack.estimate.pools import PoolPlan
from k3stack.executor.scripted import ToyModel
from k3stack.scheduler import PrefillFirst, Request, StopHit
from k3stack.scheduler.limits import lone_tokens
from tests.unit.scheduler.rig import Rig, pool, with_options


@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_tokens_are_those_of_a_lone_run(overlap: int, mixed: bool) -> None:
    rig = Rig(overlap=overlap, policy=PrefillFirst(mixed=mixed))
    for i in range(6):
        rig.submit(f"r{i}", [i, *range(10 + 3 * i)], max_tokens=5 + i)
    rig.run()
    rig.check_tokens()
    assert {end.reason for end in rig.ends.values()} == {"length"}


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_an_arena_far_too_small_preempts_and_still_answers_right(overlap: int, mixed: bool) -> None:
    rig = Rig(pool(blocks=5), with_options(max_running=32), overlap=overlap, policy=PrefillFirst(mixed=mixed))
    for i in range(32):
        kw = {"seed": i} if i % 3 == 0 else {"frequency_penalty": 0.5, "repetition_penalty": 1.1} if i % 3 == 1 else {}
        rig.submit(f"r{i}", [i, *range(10 + i % 7)], max_tokens=15 + i % 5, **kw)
    rig.run()
    rig.check_tokens()
    assert rig.scheduler.stats().preempted > 0
    assert all(end.reason == "length" for end in rig.ends.values())


def test_chunks_respect_the_budget_of_a_step() -> None:
    rig = Rig(options=with_options(chunk_tokens=8))
    rig.submit("long", 30)
    rig.submit("short", [7, 8, 9])
    rig.run()
    rig.check_tokens()
    for plan in rig.plans:
        assert sum(w.count for w in plan.groups[0].work) <= 8


def test_one_token_and_prompt_of_exactly_one_page() -> None:
    rig = Rig()
    rig.submit("a", [5], max_tokens=1)
    rig.submit("b", [1, 2, 3, 4], max_tokens=1)
    rig.submit("c", [9, 8, 7, 6], max_tokens=5)
    rig.run()
    rig.check_tokens()


def test_stop_id_ends_one_step_late_and_leaks_nothing() -> None:
    probe = Rig()
    probe.submit("p", 6, max_tokens=12)
    probe.run()
    stop = probe.tokens["p"][7]
    first = probe.tokens["p"].index(stop)
    rig = Rig()
    rig.submit("p", 6, max_tokens=12, stop_token_ids=(stop,))
    rig.run()
    assert rig.tokens["p"] == probe.tokens["p"][: first + 1]
    assert rig.ends["p"].reason == "stop" and rig.ends["p"].matched_stop == stop
    computed = sum(len(p.groups[0].decode) for p in rig.plans)
    assert computed == first + 1, "with two plans in flight one more token is computed, and dropped"


def test_eos_min_tokens_and_ignore_eos() -> None:
    model = ToyModel(vocab=16)
    rig = Rig(model=model)
    rig.submit("eos", 6, max_tokens=60, eos_ids=(3, 4, 5))
    rig.submit("least", [*range(6), 1], max_tokens=60, min_tokens=20, eos_ids=(3, 4, 5))
    rig.submit("ignore", 6, max_tokens=40, ignore_eos=True, eos_ids=(3, 4, 5))
    rig.run()
    rig.check_tokens()
    assert rig.ends["eos"].reason == "stop" and rig.ends["eos"].matched_stop in (3, 4, 5)
    assert rig.ends["least"].output_tokens >= 20
    assert rig.ends["ignore"].reason == "length" and set(rig.tokens["ignore"]) & {3, 4, 5}


@pytest.mark.parametrize("keep", [0, 1])
def test_stop_string_found_by_the_engine(keep: int) -> None:
    seen: list[int] = []

    def stopper(request: Request, new: Sequence[int]) -> StopHit | None:
        seen.extend(new)
        return StopHit(keep, "END") if len(seen) == 4 else None

    rig = Rig(stopper=stopper)
    rig.submit("s", 6, max_tokens=20, stop=("END",))
    rig.submit("t", [3, 1, 2], max_tokens=9)
    rig.run()
    assert rig.ends["s"].reason == "stop" and rig.ends["s"].matched_stop == "END"
    request = rig.requests["s"]
    alone = rig.model.generate(request.prompt_ids, request.sampling, limit=4)
    assert rig.tokens["s"] == alone[: 3 + keep]
    assert rig.ends["s"].output_tokens == 3 + keep
    assert len(seen) == 4, "the token sampled meanwhile is not looked at"
    rig.check_tokens("t")


def test_refusals_say_what_does_not_fit_and_by_how_much() -> None:
    rig = Rig(pool(blocks=4), with_options(context=100, max_queued=2, max_running=1))
    rig.submit("empty", [])
    rig.submit("context", 100)
    rig.submit("output", 60, max_tokens=41)
    rig.submit("cache", 49)
    rig.submit("both", 40, max_tokens=10)
    for rid, kind, figure in (
        ("empty", "invalid", "at least one"),
        ("context", "too_long", "shorter by 1"),
        ("output", "too_long", "1 more than the context of 100"),
        ("cache", "too_long", "1 more than the whole cache of 48"),
        ("both", "too_long", "1 more than the whole cache of 48"),
    ):
        assert rig.ends[rid].reason == "rejected" and rig.ends[rid].refusal == kind
        assert figure in rig.ends[rid].message
    rig.submit("fits", 40, max_tokens=9)
    rig.submit("open", 40, max_tokens=None)
    rig.submit("one too many", 3)
    assert rig.ends["one too many"].refusal == "queue_full" and "2" in rig.ends["one too many"].message
    rig.run()
    assert rig.ends["fits"].output_tokens == 9 and rig.ends["open"].output_tokens == 9


@pytest.mark.parametrize(
    "plan",
    [
        pool(blocks=5),
        pool(blocks=5, max_pages=7),
        pool(blocks=9, pages_per_block=1),
        pool(9, engine="sglang", max_states=5, max_pages=14, slots_per_request=5, max_running=1),
    ],
)
def test_a_prompt_that_memory_could_never_hold_is_refused_and_no_other(plan: PoolPlan) -> None:
    room = lone_tokens(plan)
    rig = Rig(plan)
    assert rig.memory.could_open(room) and not rig.memory.could_open(room + 1)
    rig.submit("fits", room, max_tokens=1)
    rig.submit("too long", room + 1, max_tokens=1)
    assert rig.ends["too long"].refusal == "too_long"
    rig.run()
    assert rig.ends["fits"].reason == "length"


def test_under_pressure_a_request_starts_when_there_is_room_for_all_of_it() -> None:
    """Two long ones push each other out; the small one that waits behind does not wait for one of them to end."""
    rig = Rig(pool(blocks=13), with_options(context=300, max_running=4))
    rig.submit("long", [1] * 40, max_tokens=120)
    rig.submit("longer", [2] * 60, max_tokens=110)
    while rig.scheduler.stats().preempted == 0:
        rig.turn()
    assert rig.scheduler.stats().waiting == 1
    rig.submit("small", [3] * 5, max_tokens=5, priority=0, arrival=-1.0)
    for _ in range(12):
        rig.turn()
    assert "small" in rig.ends and "long" not in rig.ends
    rig.run()
    rig.check_tokens()


def test_clipping_instead_of_refusing() -> None:
    rig = Rig(pool(blocks=4), with_options(clip_max_tokens=True))
    rig.submit("both", 40, max_tokens=200)
    rig.run()
    assert rig.ends["both"].output_tokens == 9 and rig.ends["both"].reason == "length"


def test_duplicate_id_is_a_bug() -> None:
    rig = Rig()
    rig.submit("a", 3)
    with pytest.raises(BugError, match="in use"):
        rig.scheduler.submit(rig.requests["a"])


@pytest.mark.parametrize("when", range(12))
@pytest.mark.parametrize("overlap", [1, 2])
def test_abort_at_any_moment(when: int, overlap: int) -> None:
    rig = Rig(overlap=overlap, options=with_options(chunk_tokens=8))
    for i in range(4):
        rig.submit(f"r{i}", [i, *range(12)], max_tokens=6)
    for turn in range(when + 1):
        if turn == when:
            rig.loop.launch()  # with steps in flight
            rig.scheduler.abort("r1", "client gone")
            rig.scheduler.abort("r1", "client gone")
            rig.take()
        rig.turn()
    rig.run()
    assert rig.ends["r1"].reason in ("abort", "length")
    rig.check_tokens()


def test_abort_of_what_is_unknown_or_over_does_nothing() -> None:
    rig = Rig()
    rig.submit("a", 3, max_tokens=2)
    rig.run()
    rig.scheduler.abort("a")
    rig.scheduler.abort("never")
    assert rig.scheduler.take_events() == []


def test_drain_finishes_what_was_accepted() -> None:
    rig = Rig()
    rig.submit("a", 3)
    rig.scheduler.drain()
    rig.submit("b", 3)
    assert rig.ends["b"].refusal == "draining"
    assert not rig.scheduler.drained
    rig.run()
    assert rig.scheduler.drained and rig.ends["a"].reason == "length"


def test_priorities_go_first_and_age() -> None:
    rig = Rig(options=with_options(max_running=1, aging_s=10.0))
    rig.submit("running", 3, max_tokens=3)
    rig.turn()
    rig.submit("low", 3, max_tokens=1, priority=-1, arrival=0.0)
    rig.submit("high", 3, max_tokens=1, priority=1, arrival=5.0)
    rig.submit("normal", 3, max_tokens=1, arrival=9.0)
    rig.submit("late high", 3, max_tokens=1, priority=1, arrival=30.0)
    rig.run()
    order = sorted(rig.ends, key=lambda rid: rig.ends[rid].times.finished)
    assert order == ["high", "running", "normal", "low", "late high"]


def test_a_higher_priority_takes_the_only_row() -> None:
    rig = Rig(options=with_options(max_running=1))
    rig.submit("low", 6, max_tokens=20)
    for _ in range(6):
        rig.turn()
    rig.submit("high", [4, 5], max_tokens=3, priority=1)
    rig.run()
    rig.check_tokens()
    assert rig.ends["high"].times.finished < rig.ends["low"].times.finished
    assert rig.scheduler.stats().preempted == 1


def test_no_preemption_for_priority_when_it_is_off() -> None:
    rig = Rig(options=with_options(max_running=1, priority_preemption=False))
    rig.submit("low", 6, max_tokens=20)
    for _ in range(6):
        rig.turn()
    rig.submit("high", [4, 5], max_tokens=3, priority=1)
    rig.run()
    assert rig.ends["high"].times.finished > rig.ends["low"].times.finished
    assert rig.scheduler.stats().preempted == 0


@pytest.mark.parametrize("overlap", [1, 2])
def test_masked_rows_decode_in_every_step_with_masks_of_all_tokens_before(overlap: int) -> None:
    def mask_of(outputs: Sequence[int]) -> bytes:
        allowed = {(7 * len(outputs) + sum(outputs)) % 64, 9}
        return bytes(sum(1 << (i & 7) for i in allowed if i >> 3 == byte) for byte in range(8))

    rig = Rig(model=ToyModel(vocab=64), overlap=overlap, mask_of=mask_of)
    rig.submit("g", 20, max_tokens=10, masked=True)
    rig.submit("plain", 9, max_tokens=12)
    rig.run()
    rig.check_tokens()
    assert len(rig.tokens["g"]) == 10
    steps = [p.step for p in rig.plans if any(w.masked for w in p.groups[0].work)]
    assert steps[-1] - steps[0] <= 9 + 1, "a chunk of the other request at most comes in between"


def test_masked_rows_without_a_source_of_masks_are_a_bug() -> None:
    rig = Rig()
    rig.submit("g", 20, masked=True)
    with pytest.raises(BugError, match="mask"):
        rig.turn()
    rig.take()
    assert rig.ends["g"].reason == "error"


@pytest.mark.parametrize("first", [0, 1, 5, 8, 19])
def test_prompt_scores_come_once_and_whole(first: int) -> None:
    rig = Rig(options=with_options(chunk_tokens=6))
    rig.submit("warm", 20, max_tokens=4)
    rig.run()
    request = rig.submit("scored", 20, max_tokens=3, prompt_logprobs_from=first, logprobs=True)
    rig.run()
    rig.check_tokens()
    scored = [entry for event in rig.events["scored"] for entry in event.scored]
    assert [None if s is None else s.token for s in scored] == [
        None if i == 0 else token for i, token in enumerate(request.prompt_ids) if i >= first
    ]
    sampled = [entry for event in rig.events["scored"] for entry in event.logprobs]
    assert [entry.token for entry in sampled] == rig.tokens["scored"]


def test_times_and_counts_in_the_end() -> None:
    rig = Rig()
    rig.submit("a", 20, max_tokens=4)
    rig.run()
    end = rig.ends["a"]
    times = end.times
    assert times.started is not None and times.first_token is not None
    assert times.queued <= times.started < times.first_token < times.finished
    assert (end.prompt_tokens, end.output_tokens, end.cached_tokens) == (20, 4, 0)
