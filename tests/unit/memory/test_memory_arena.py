"""The arena alone: slabs, order of filling, runs, pins, moves, books."""

from __future__ import annotations

import random

import pytest

from k3stack.errors import BugError
from k3stack.memory.arena import Arena


def test_slab_returns_to_the_arena_with_its_last_page() -> None:
    arena = Arena(2, 4)
    pages = arena.take_pages(4)
    assert pages is not None
    assert (arena.free_blocks, arena.slabs) == (1, 1)
    for page in pages[:3]:
        arena.release_page(page)
    assert (arena.free_blocks, arena.slabs, arena.free_in_slabs) == (1, 1, 3)
    arena.release_page(pages[3])
    assert (arena.free_blocks, arena.slabs, arena.free_in_slabs) == (2, 0, 0)
    arena.check()


def test_fullest_slab_fills_first() -> None:
    arena = Arena(3, 4)
    pages = arena.take_pages(12)
    assert pages is not None
    by_block = {block: [p for p in pages if p // 4 == block] for block in range(3)}
    for block, release in ((0, 3), (1, 1), (2, 2)):
        for page in by_block[block][:release]:
            arena.release_page(page)
    order = [arena.take_pages(1) for _ in range(6)]
    assert [page[0] // 4 for page in order if page] == [1, 2, 2, 0, 0, 0]
    arena.check()


def test_all_or_nothing() -> None:
    arena = Arena(2, 4)
    block = arena.take_block()
    assert arena.take_pages(5) is None
    assert arena.free_blocks == 1 and arena.slabs == 0
    assert arena.take_pages(4) is not None
    assert arena.take_block() is None and arena.take_pages(1) is None
    assert block is not None
    arena.release_block(block)
    assert arena.take_block() == block
    arena.check()


def test_evacuate_moves_the_sparsest_slab_and_frees_it() -> None:
    arena = Arena(2, 4)
    pages = arena.take_pages(8)
    assert pages is not None
    first, second = pages[:4], pages[4:]
    for page in first[:3] + second[:2]:
        arena.release_page(page)
    assert arena.free_blocks == 0
    slab = arena.sparsest_slab()
    assert slab == first[0] // 4
    moves = arena.evacuate(slab)
    assert moves is not None and [m[0] for m in moves] == [first[3]]
    assert moves[0][1] // 4 == second[0] // 4 and arena.free_blocks == 1
    arena.check()


def test_pinned_runs_never_move_and_are_not_reused_while_pinned() -> None:
    arena = Arena(2, 4)
    pages = arena.take_pages(8)
    assert pages is not None
    for page in pages[1:6]:
        arena.release_page(page)
    arena.pin(pages[0])
    assert arena.sparsest_slab() == pages[6] // 4
    arena.release_page(pages[0])
    assert arena.pinned_pages == 1
    arena.check()
    taken = arena.take_pages(5)
    assert taken is not None and pages[0] not in taken
    arena.unpin(pages[0])
    assert arena.take_pages(1) == [pages[0]]
    arena.check()


def test_pinned_state_waits_for_its_pin() -> None:
    arena = Arena(1, 4)
    block = arena.take_block()
    assert block is not None
    arena.pin(block * 4)
    arena.release_block(block)
    assert arena.take_block() is None
    arena.check()
    arena.unpin(block * 4)
    assert arena.take_block() == block


def test_runs_lie_inside_one_block_and_move_whole() -> None:
    arena = Arena(3, 4)
    run = arena.take_run(3)
    assert run is not None and run % 4 == 0
    single = arena.take_pages(1)
    assert single is not None and single[0] // 4 == run // 4
    other = arena.take_run(2)
    assert other is not None and other // 4 != run // 4
    arena.release_run(run, 3)
    slab = arena.sparsest_slab()
    assert slab == single[0] // 4
    assert arena.evacuate(slab) == [(single[0], other + 2, 1)]
    arena.check()
    arena.release_run(other, 2)
    arena.release_page(other + 2)
    assert arena.free_blocks == 3
    arena.check()


def test_evacuate_that_finds_no_gap_changes_nothing() -> None:
    arena = Arena(3, 4)
    runs = [arena.take_run(3), arena.take_run(3), arena.take_run(2)]
    before = (arena.free_blocks, arena.free_in_slabs, arena.pages_in_slabs)
    assert arena.evacuate(runs[2] // 4) is None  # type: ignore[operator]
    assert (arena.free_blocks, arena.free_in_slabs, arena.pages_in_slabs) == before
    arena.check()


def test_reserved_blocks_are_never_handed_out() -> None:
    arena = Arena(3, 2, reserved=1)
    assert {arena.take_block(), arena.take_block()} == {1, 2}
    assert arena.take_block() is None
    arena.check()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda a: a.release_page(0),
        lambda a: a.release_block(0),
        lambda a: a.unpin(0),
        lambda a: a.pin(0),
        lambda a: a.take_run(5),
        lambda a: a.release_run(1, 2),
    ],
)
def test_misuse_is_a_bug(misuse: object) -> None:
    with pytest.raises(BugError):
        misuse(Arena(2, 4))  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_keep_the_books(seed: int) -> None:
    rng = random.Random(seed)
    per_block = rng.choice([1, 2, 5, 8, 32])
    arena = Arena(rng.randint(1, 9), per_block, reserved=rng.randint(0, 1))
    pages: set[int] = set()
    blocks: set[int] = set()
    runs: dict[int, int] = {}
    pins: list[int] = []
    for _ in range(400):
        match rng.randrange(8):
            case 0 | 1:
                taken = arena.take_pages(rng.randint(1, per_block + 2))
                assert not pages & set(taken or ())
                pages |= set(taken or ())
            case 2 if pages:
                page = rng.choice(sorted(pages))
                arena.release_page(page)
                pages.discard(page)
            case 3:
                block = arena.take_block()
                if block is not None:
                    assert block not in blocks
                    blocks.add(block)
            case 4 if blocks:
                block = blocks.pop()
                arena.release_block(block)
            case 5 if (slab := arena.sparsest_slab()) is not None:
                for src, dst, n in arena.evacuate(slab) or ():
                    if src in runs:
                        assert runs.pop(src) == n
                        runs[dst] = n
                    else:
                        pages.remove(src)
                        pages.add(dst)
            case 6:
                if pins and rng.random() < 0.5:
                    arena.unpin(pins.pop())
                elif pages:
                    pins.append(rng.choice(sorted(pages)))
                    arena.pin(pins[-1])
            case 7 if per_block > 2:
                length = rng.randint(2, per_block - 1)
                first = arena.take_run(length)
                if first is not None:
                    assert not any(p in pages for p in range(first, first + length))
                    runs[first] = length
                elif runs:
                    first, length = runs.popitem()
                    arena.release_run(first, length)
        arena.check()
    owned = pages | {p for first, n in runs.items() for p in range(first, first + n)}
    assert owned <= set(arena.pages_in_use())
    assert len(list(arena.pages_in_use())) == len(owned) + arena.pinned_pages
