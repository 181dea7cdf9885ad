"""The cases that crashed other engines, and the contracts of the calls, one by one (pages of 4 tokens)."""

from __future__ import annotations

import pytest

from k3stack.errors import BugError
from k3stack.memory import NO_BLOCK, Memory
from k3stack.memory.ops import CopyPage, CopyState, SetPage
from tests.unit.memory.rig import Rig
from tests.unit.memory.twin import pool

PROMPT = (1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5)
FORTY = tuple(range(40))


def rig(blocks: int = 40, **options: object) -> Rig:
    return Rig(pool(blocks), **{"track_interval": 4, **options})


def test_fully_cached_prompt_computes_at_least_its_last_token() -> None:
    r = rig()
    assert r.serve(PROMPT, 0) == 0
    assert r.memory.lookup(PROMPT).cached == 0  # the only snapshot lies at its very end
    assert r.memory.lookup((*PROMPT, 6)) == (12, 12, "all but the last of 13 tokens; one must be computed")
    assert r.serve((*PROMPT, 6), 0) == 12


def test_prompt_repeated_is_cut_where_it_can_be_reused_next_time() -> None:
    r = rig()
    prompt = (*PROMPT, 6, 6)
    cached = [r.serve(prompt) for _ in range(3)]
    assert cached == [0, 0, 12]  # 12: its last whole page, 13 at most


def test_prompt_repeated_after_an_answer_too_short_to_fill_a_page() -> None:
    r = rig()
    prompt = (*PROMPT, 6)
    assert [r.serve(prompt, 1) for _ in range(3)] == [0, 0, 12]


def test_prompt_of_exactly_one_page() -> None:
    r = rig()
    page = PROMPT[:4]
    assert [r.serve(page) for _ in range(3)] == [0, 0, 0]
    assert r.serve(PROMPT[:5]) == 4
    r.memory.check()


def test_prompt_of_one_token() -> None:
    r = rig()
    assert r.serve((1,), 2) == 0
    assert r.serve((1, 2)) == 1


def test_hit_ending_inside_a_page_copies_its_rows() -> None:
    r = rig()
    r.serve(PROMPT[:6], 0)
    opened = r.open(0, PROMPT)
    assert opened is not None and opened.cached == 6
    copy = [op for op in opened.ops if isinstance(op, CopyPage)]
    assert len(copy) == 1 and copy[0].rows == 2 and copy[0].dst == opened.pages[1]
    assert any(isinstance(op, CopyState) for op in opened.ops)
    assert r.compute(0, 12)


def test_two_hits_inside_one_page_write_on_in_pages_of_their_own() -> None:
    r = rig()
    r.serve(PROMPT[:6], 0)
    first, second = r.open(0, (*PROMPT[:6], 0, 0, 0)), r.open(1, (*PROMPT[:6], 6, 6, 6))
    assert first is not None and second is not None
    assert first.pages[0] == second.pages[0] and first.pages[1] != second.pages[1]
    assert r.compute(0, 9) and r.compute(1, 9)
    assert r.compute(0, 10) and r.compute(1, 10)


def test_rows_of_a_page_on_each_dcp_rank() -> None:
    r = Rig(pool(40, dcp=2), track_interval=4)
    r.serve(PROMPT[:11], 0)
    opened = r.open(0, PROMPT)
    assert opened is not None and opened.cached == 11
    assert [op.rows for op in opened.ops if isinstance(op, CopyPage)] == [2]  # 3 tokens on 2 ranks


def test_pages_without_a_snapshot_are_told_from_a_plain_miss() -> None:
    r = rig(decode_snapshots=False)
    r.open(0, PROMPT)
    r.compute(0, 12, snapshot=False)
    r.close(0, exact=False)
    looked = r.memory.lookup((*PROMPT, 1))
    assert (looked.cached, looked.pages_only) == (0, 12)
    assert "pages without a snapshot reach 12" in looked.reason
    assert "no page of 4 tokens" in r.memory.lookup((6, 6, 6, 6, 6)).reason
    r.serve((*PROMPT, 1), 0)
    r.serve((6, 6, 6, 6, 6), 0)
    stats = r.memory.stats()
    assert (stats.hits, stats.pages_without_snapshot, stats.misses, stats.opens) == (0, 1, 2, 3)
    assert stats.tokens_without_snapshot == 12


def test_eviction_is_named_as_the_reason() -> None:
    r = rig(blocks=7)
    r.serve(PROMPT, 0)
    for i in range(6):
        r.serve((i + 20, *FORTY[:30]), 0)
    assert "has been evicted" in r.memory.lookup((*PROMPT, 1)).reason
    r.serve((*PROMPT, 1), 0)
    assert r.memory.stats().evicted_misses == 1


def test_two_running_rows_with_the_same_prefix_share_it_once_it_exists() -> None:
    r = rig()
    r.open(0, (*PROMPT, 0))
    r.open(1, (*PROMPT, 1))
    before = r.memory.stats().pages_running
    r.compute(0, 13, advance=False)
    r.compute(1, 13, advance=False)
    r.apply(r.memory.advance(0, r.ids[0], 13))
    ops = r.memory.advance(1, r.ids[1], 13)
    assert [(op.row, op.index) for op in ops if isinstance(op, SetPage)] == [(1, 0), (1, 1), (1, 2)]
    r.apply(ops)
    stats = r.memory.stats()
    assert stats.duplicate_pages == 3 and stats.pages_running == before + 5
    assert r.compute(0, 14) and r.compute(1, 14)
    r.close(0)
    assert r.compute(1, 15)


def test_abort_with_a_step_in_flight_returns_everything() -> None:
    r = rig(prefix_cache=False)
    r.open(0, PROMPT)
    r.compute(0, 12)
    r.compute(0, 13, advance=False)
    r.close(0, exact=False)
    stats = r.memory.stats()
    assert (stats.blocks_free, stats.pages_running, stats.pages_cached) == (40, 0, 0)


def test_abort_with_a_step_in_flight_keeps_the_known_pages_and_snapshots() -> None:
    r = rig()
    r.open(0, PROMPT)
    r.compute(0, 12)
    r.compute(0, 13, advance=False)
    r.memory.close(0, r.ids[0][:12], state_at=None)
    assert r.memory.lookup((*PROMPT, 9)).cached == 12
    r.memory.check()


def test_preemption_followed_by_a_full_hit() -> None:
    r = rig(blocks=5)
    r.open(0, PROMPT)
    r.compute(0, 12)
    for _ in range(3):
        r.compute(0, r.at[0] + 1)
    ids = tuple(r.ids[0])
    r.close(0, resume=True)
    again = r.open(3, (*ids, 0))
    assert again is not None and again.cached == len(ids) == 15
    assert r.compute(3, 16) and r.compute(3, 17)


def test_a_promised_snapshot_outlives_others() -> None:
    r = rig(blocks=8)
    r.open(0, PROMPT)
    r.compute(0, 12)
    r.close(0, resume=True)
    for i in range(4):
        r.serve((i + 20, *FORTY[:11]), 0)
    assert r.memory.stats().evicted_snapshots > 0
    assert r.memory.lookup((*PROMPT, 1)).cached == 12


def test_keep_false_leaves_nothing_behind() -> None:
    r = rig()
    r.serve(PROMPT[:6], 0)
    r.open(0, PROMPT)
    r.compute(0, 8)
    r.compute(0, 12)
    r.close(0, keep=False)
    assert r.memory.lookup((*PROMPT, 1))[:2] == (6, 6)
    r.memory.flush()
    assert r.memory.stats().blocks_free == 40


def test_exhaustion_is_an_answer_and_changes_nothing() -> None:
    r = rig(blocks=3)
    r.open(0, PROMPT)
    assert r.compute(0, 12, snapshot=False)
    before = r.memory.stats()
    assert r.memory.extend(0, 40) is None
    assert r.memory.open(1, FORTY) is not None  # the last block
    assert r.memory.open(2, FORTY) is None
    r.memory.close(1, FORTY, state_at=None)
    after = r.memory.stats()
    assert (after.blocks_free, after.pages_running) == (before.blocks_free, before.pages_running) == (1, 3)
    assert (after.opens, after.refused) == (before.opens, before.refused + 2)


def test_could_open_says_what_waiting_cannot_mend() -> None:
    memory = Memory(pool(3))
    assert memory.could_open(32) and not memory.could_open(33)
    assert Memory(pool(3, max_states=1)).could_open(32)
    assert not Memory(pool(3, max_pages=4)).could_open(17)


def test_branch_point_is_learned_from_the_second_prompt() -> None:
    r = rig()
    system = FORTY[:20]
    cached = [r.serve((*system, 90 + i, 1, 2, 3, 4, 5), 0) for i in range(4)]
    assert cached == [0, 0, 20, 20]
    assert r.memory.stats().pages_without_snapshot == 1


def test_branch_point_inside_a_wide_page() -> None:
    r = Rig(pool(40, dcp=4), track_interval=4)  # pages of 16 tokens, branch points at multiples of 4
    system = FORTY[:27]
    cached = [r.serve((*system, 90 + i, *range(50, 70)), 0) for i in range(4)]
    assert cached == [0, 0, 24, 24]


def test_chunk_ends_leave_snapshots_at_least_the_interval_apart() -> None:
    r = rig(track_interval=8)
    r.serve(FORTY[:30], 0, chunk=4)
    assert sorted(s.position for s in r.memory._tree.snapshots) == [8, 16, 24, 30]


def test_decode_snapshot_takes_the_place_of_the_one_before() -> None:
    r = rig()
    r.open(0, PROMPT)
    r.compute(0, 12)
    for _ in range(13):
        r.compute(0, r.at[0] + 1, snapshot=r.memory.wants_decode_snapshot(0, r.at[0] + 1))
    assert sorted(s.position for s in r.memory._tree.snapshots) == [12, 24]
    assert r.memory.stats().snapshots_superseded == 2  # 16 and 20
    r.close(0)
    assert sorted(s.position for s in r.memory._tree.snapshots) == [12, 25]


def test_no_more_snapshots_on_a_path_than_allowed() -> None:
    r = rig(max_states_per_path=2)
    r.serve(FORTY, 2, chunk=8)
    assert sorted(s.position for s in r.memory._tree.snapshots) == [40, 42]


def test_a_snapshot_becomes_the_state_when_no_block_is_left() -> None:
    r = rig(blocks=4)
    r.serve(PROMPT[:10], 0)
    assert r.open(1, FORTY[20:21]) is not None and r.open(2, FORTY[30:31]) is not None
    opened = r.open(0, PROMPT)
    assert opened is not None and opened.cached == 10
    assert opened.ops == ()  # state and half-filled page are its own now
    assert r.memory.stats().snapshots_consumed == 1
    assert r.compute(0, 12)


def test_moves_free_a_block_and_tell_every_row() -> None:
    r = rig(blocks=20, prefix_cache=False)
    for row, length in {0: 13, 1: 9, 2: 5, 3: 9}.items():
        r.open(row, tuple((row + i) % 7 for i in range(length)))
        assert r.compute(row, length)
    slabs = r.memory.stats().blocks_slab
    r.close(1)
    r.close(3)
    ops = r.memory.compact()
    moves = [op for op in ops if isinstance(op, CopyPage)]
    assert len(moves) == sum(isinstance(op, SetPage) for op in ops) > 0
    r.apply(ops)
    stats = r.memory.stats()
    assert stats.moves == len(moves) and stats.blocks_slab == slabs - 1
    assert r.compute(0, 14) and r.compute(2, 6)


def test_move_of_a_shared_page_is_told_to_each_of_its_rows() -> None:
    r = rig(blocks=20)
    r.serve(PROMPT[:4], 0)
    for row in (0, 1):
        r.open(row, (*PROMPT[:4], row, row, row))
        assert r.compute(row, 7)
    page = r.memory._rows[0].pages[0]
    r.open(2, FORTY[:14])
    r.compute(2, 14)
    told: set[int] = set()
    while ops := r.memory.compact():
        r.apply(ops)
        told |= {op.row for op in ops if isinstance(op, SetPage) and op.index == 0}
    if r.memory._rows[0].pages[0] != page:
        assert {0, 1} <= told
    assert r.compute(0, 8) and r.compute(1, 8)


def test_row_closed_before_it_computes_does_not_count() -> None:
    r = rig()
    r.serve(PROMPT, 0)
    before = r.memory.stats()
    r.open(0, (*PROMPT, 1))
    r.close(0)
    after = r.memory.stats()
    assert (after.opens, after.hits, after.cached_tokens) == (before.opens, before.hits, before.cached_tokens)
    assert r.serve((*PROMPT, 1), 0) == 12


def test_model_without_states_reuses_pages_alone() -> None:
    r = Rig(pool(20, states=False))
    opened = r.open(0, PROMPT)
    assert opened is not None and opened.state_block == NO_BLOCK and opened.ops == ()
    r.compute(0, 12)
    r.close(0)
    assert r.memory.stats().pages_cached == 3
    assert r.serve(PROMPT) == 11  # its last page is copied but for a row
    assert r.serve((*PROMPT[:10], 6, 6, 6)) == 8


def test_model_without_pages_reuses_states_alone() -> None:
    r = Rig(pool(20, pages=False), track_interval=4)
    opened = r.open(0, PROMPT)
    assert opened is not None and opened.pages == ()
    r.compute(0, 12)
    assert r.memory.extend(0, 1000) == ((), ())
    r.close(0)
    assert r.serve((*PROMPT, 1, 1)) == 12
    r.memory.flush()
    assert r.memory.stats().nodes == 0


def test_pinned_row_keeps_its_pages_where_they_are() -> None:
    r = rig(blocks=3)
    r.open(0, PROMPT[:5])
    r.compute(0, 5)
    r.memory.pin(0)
    pages = list(r.memory._rows[0].pages)
    assert r.memory.compact() == () and r.memory._rows[0].pages == pages
    stats = r.memory.stats()
    assert stats.pins == 3 and stats.pages_pinned == 0
    r.close(0)
    assert r.memory.stats().pins == 0


def test_refused_open_teaches_nothing() -> None:
    r = rig(blocks=3)
    r.open(0, PROMPT[:5])
    assert r.compute(0, 5)
    assert r.memory.extend(0, 16) is not None
    (kept,) = r.memory._tree.snapshots
    before = (r.memory._retention.now, kept.last, kept.uses)
    assert r.open(1, (*PROMPT[:5], 1)) is None  # no page for its own copy of the second one
    assert (r.memory._retention.now, kept.last, kept.uses) == before
    assert r.memory.lookup((*PROMPT[:5], 1)).cached == 5


@pytest.mark.parametrize(("slots", "held"), [(5, 3), (4, 2), (3, 1), (1, 1)])
def test_sglang_reserves_slots(slots: int, held: int) -> None:
    plan = pool(30, engine="sglang", slots_per_request=slots, max_states=10, max_pages=40)
    memory = Memory(plan)
    count = 0
    while memory.open(count, PROMPT) is not None:
        count += 1
    assert count == 10 // slots == memory.max_running
    stats = memory.stats()
    assert stats.blocks_running == held * count and stats.blocks_reserved == 1
    memory.check()


def test_sglang_cache_is_capped_in_pages() -> None:
    plan = pool(30, engine="sglang", slots_per_request=5, max_states=10, max_pages=4)
    memory = Memory(plan)
    memory.open(0, FORTY)
    assert memory.extend(0, 16) is not None
    assert memory.extend(0, 17) is None
    assert memory.available_tokens == 0


def test_misuse_is_a_bug() -> None:
    memory = Memory(pool(4))
    memory.open(0, PROMPT)
    with pytest.raises(BugError, match="open already"):
        memory.open(0, PROMPT)
    with pytest.raises(BugError, match="empty"):
        memory.open(1, ())
    memory._arena.take_block()
    with pytest.raises(BugError, match="without an owner"):
        memory.check()
