"""The torch executor against plans written by hand, on a network that notices every mistake of the device half."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from k3stack.config.sampling import SamplingParams
from k3stack.errors import BugError
from k3stack.executor.torch.executor import TorchExecutor
from k3stack.memory.ops import ClearState, CopyPage, CopyState, SetPage, SetState
from k3stack.scheduler.plan import GroupPlan, PagesAppend, RowAdd, RowWork, StepPlan, StepResult
from tests.cpu.fake_network import VOCAB, FakeNetwork, lone_greedy, lone_logits, pool_plan, views_of

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


class Driver:
    """Numbers plans and runs them one at a time."""

    def __init__(self, network: FakeNetwork | None = None) -> None:
        self.network = network or FakeNetwork()
        self.executor = TorchExecutor(self.network, pool_plan(), views_of, vocab=VOCAB, device=CPU, poison=True)
        self.step = 0

    def plan(self, *, reset: bool = False, **group: Any) -> StepPlan:
        plan = StepPlan(step=self.step, groups=(GroupPlan(**group),), reset=reset)
        self.step += 1
        return plan

    def run(self, *, reset: bool = False, **group: Any) -> StepResult:
        return self.executor.wait(self.executor.submit(self.plan(reset=reset, **group)))

    def start(self, row: int, block: int, pages: tuple[int, ...], ids: list[int], **sampling: Any) -> StepResult:
        """A fresh row computes its whole prompt and samples."""
        params = SamplingParams(**sampling) if sampling else GREEDY
        return self.run(
            added=(RowAdd(row=row, state_block=block, pages=pages, length=0, sampling=params),),
            before=(ClearState(block),),
            work=(RowWork(row=row, start=0, ids=tuple(ids), sample=True),),
        )


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.executor.close()


def token_of(result: StepResult) -> int:
    assert result.error is None and result.groups[0].rows[0].error is None, result
    return result.groups[0].rows[0].tokens[0]


def pages(block: int, count: int = 3) -> tuple[int, ...]:
    return tuple(range(block * 3, block * 3 + count))


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks_and_decode_follow_the_lone_run(driver: Driver, chunk: int) -> None:
    prompt = [(i * 7) % 101 for i in range(100)]
    add = RowAdd(row=3, state_block=0, pages=pages(1), length=0, sampling=GREEDY)
    for start in range(0, 100, chunk):
        ids = tuple(prompt[start : start + chunk])
        first = {"added": (add,), "before": (ClearState(0),)} if start == 0 else {}
        result = driver.run(work=(RowWork(row=3, start=start, ids=ids, sample=start + chunk >= 100),), **first)
    found = [token_of(result)]
    found += [driver.run(decode=(3,)).groups[0].tokens[0] for _ in range(10)]
    assert found == lone_greedy(prompt, 11)


def test_mixed_step_of_chunk_and_decode_rows(driver: Driver) -> None:
    a, b, c = [1, 2, 3], [4, 5], [9, 8, 7, 6]
    found_a = [token_of(driver.start(0, 0, pages(1, 1), a))]
    found_b = [token_of(driver.start(5, 2, pages(3, 1), b))]
    result = driver.run(
        added=(RowAdd(row=1, state_block=4, pages=pages(5, 1), length=0, sampling=GREEDY),),
        before=(ClearState(4),),
        decode=(5,),
        work=(
            RowWork(row=1, start=0, ids=tuple(c), sample=True),
            RowWork(row=0, start=3, ids=None, sample=True),
        ),
    )
    found_b.append(result.groups[0].tokens[0])
    assert [r.row for r in result.groups[0].rows] == [1, 0]
    found_c = [result.groups[0].rows[0].tokens[0]]
    found_a.append(result.groups[0].rows[1].tokens[0])
    last = driver.run(decode=(0, 1, 5)).groups[0].tokens
    assert [*found_a, last[0]] == lone_greedy(a, 3)
    assert [*found_c, last[1]] == lone_greedy(c, 2)
    assert [*found_b, last[2]] == lone_greedy(b, 3)


def test_pages_join_and_two_plans_fly(driver: Driver) -> None:
    prompt = list(range(63))
    found = [token_of(driver.start(0, 0, pages(1, 1), prompt))]
    first = driver.executor.submit(driver.plan(decode=(0,)))
    second = driver.executor.submit(driver.plan(decode=(0,), pages=(PagesAppend(0, (20,)),)))
    with pytest.raises(BugError, match="flight"):
        driver.executor.submit(StepPlan(step=driver.step, groups=(GroupPlan(),)))
    with pytest.raises(BugError, match="out of turn"):
        driver.executor.wait(second)
    found += [driver.executor.wait(h).groups[0].tokens[0] for h in (first, second)]
    assert found == lone_greedy(prompt, 3)


def test_snapshot_restore_and_partial_page_copy(driver: Driver) -> None:
    prompt = [i % 50 for i in range(70)]
    driver.run(
        added=(RowAdd(row=0, state_block=0, pages=pages(1, 2), length=0, sampling=GREEDY),),
        before=(ClearState(0),),
        work=(RowWork(row=0, start=0, ids=tuple(prompt), sample=True),),
        after=(CopyState(0, 4),),
    )
    driver.run(decode=(0,))
    other = [*prompt, 77, 78]
    result = driver.run(
        ended=(0,),
        added=(RowAdd(row=0, state_block=5, pages=(3, 20), length=70, sampling=GREEDY),),
        before=(CopyState(4, 5), CopyPage(4, 20, 6)),
        work=(RowWork(row=0, start=70, ids=(77, 78), sample=True),),
    )
    assert token_of(result) == lone_greedy(other, 1)[0]


def test_moves_of_page_and_state(driver: Driver) -> None:
    prompt = list(range(40))
    found = [token_of(driver.start(2, 0, pages(1, 1), prompt))]
    result = driver.run(
        before=(CopyPage(3, 30, 40), SetPage(2, 0, 30), CopyState(0, 7), SetState(2, 7), ClearState(0)), decode=(2,)
    )
    found.append(result.groups[0].tokens[0])
    found.append(driver.run(decode=(2,), after=(CopyState(7, 8), SetState(2, 8), ClearState(7))).groups[0].tokens[0])
    found.append(driver.run(decode=(2,)).groups[0].tokens[0])
    assert found == lone_greedy(prompt, 4)


def test_a_forgotten_state_copy_shows(driver: Driver) -> None:
    driver.start(0, 0, pages(1, 1), [1, 2, 3])
    result = driver.run(
        ended=(0,),
        added=(RowAdd(row=1, state_block=5, pages=(3,), length=3, sampling=GREEDY),),
        work=(RowWork(row=1, start=3, ids=(4,), sample=True),),
    )
    assert "not finite" in (result.groups[0].rows[0].error or "")


def test_poison_makes_unwritten_rows_show(driver: Driver) -> None:
    driver.start(0, 0, pages(1, 1), [1, 2, 3])
    result = driver.run(
        added=(RowAdd(row=1, state_block=5, pages=(20,), length=3, sampling=GREEDY),),
        before=(CopyState(0, 5), CopyPage(3, 20, 2)),  # three rows are claimed, two copied
        work=(RowWork(row=1, start=3, ids=(4,), sample=True),),
    )
    assert "not finite" in (result.groups[0].rows[0].error or "")


def test_plans_that_may_not_come_are_refused(driver: Driver) -> None:
    submit = driver.executor.submit
    with pytest.raises(BugError, match="step 0 comes next"):
        submit(StepPlan(step=1, groups=(GroupPlan(),)))
    with pytest.raises(BugError, match="version 99"):
        submit(StepPlan(step=0, groups=(GroupPlan(),), version=99))
    with pytest.raises(BugError, match="2 groups"):
        submit(StepPlan(step=0, groups=(GroupPlan(), GroupPlan())))
    assert driver.run().error is None
    assert driver.network.steps == 0


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"decode": (6,)}, "row 6"),
        ({"ended": (6,)}, "row 6"),
        ({"added": (RowAdd(row=0, state_block=0, pages=(), length=0, sampling=GREEDY),)}, "has not ended"),
        ({"work": (RowWork(row=0, start=5, ids=(1,), sample=True),)}, "begins at 5"),
        ({"work": (RowWork(row=0, start=3, ids=(1,) * 62, sample=True),)}, "65 tokens with 1 pages"),
        ({"pages": (PagesAppend(0, (36,)),)}, "page 36"),
        ({"before": (CopyState(0, 12),)}, "block 12"),
        ({"before": (SetPage(0, 1, 2),)}, "page 1 of row 0"),
    ],
)
def test_a_contradictory_plan_fails_as_a_step(driver: Driver, group: dict[str, Any], message: str) -> None:
    driver.start(0, 0, pages(1, 1), [1, 2, 3])
    assert message in (driver.run(**group).error or "")


def test_a_failed_step_takes_the_next_with_it_and_reset_goes_on() -> None:
    driver = Driver(FakeNetwork(fail_on=66))
    add = RowAdd(row=0, state_block=0, pages=pages(1, 1), length=0, sampling=GREEDY)
    bad = driver.executor.submit(
        driver.plan(added=(add,), before=(ClearState(0),), work=(RowWork(row=0, start=0, ids=(66,), sample=True),))
    )
    behind = driver.executor.submit(driver.plan(decode=(0,)))
    assert "poisonous" in (driver.executor.wait(bad).error or "")
    assert "step 0 failed" in (driver.executor.wait(behind).error or "")
    assert "step 0 failed" in (driver.run().error or "")
    result = driver.run(
        reset=True,
        added=(add,),
        before=(ClearState(0),),
        work=(RowWork(row=0, start=0, ids=(1, 2), sample=True),),
    )
    assert token_of(result) == lone_greedy([1, 2], 1)[0]
    driver.executor.close()


def test_a_row_with_nan_fails_alone() -> None:
    driver = Driver(FakeNetwork(nan_on=66))
    good, bad = [1, 2], [3, 66]
    result = driver.run(
        added=(
            RowAdd(row=0, state_block=0, pages=pages(1, 1), length=0, sampling=GREEDY),
            RowAdd(row=1, state_block=2, pages=pages(3, 1), length=0, sampling=SamplingParams(seed=1)),
        ),
        before=(ClearState(0), ClearState(2)),
        work=(
            RowWork(row=1, start=0, ids=tuple(bad), sample=True),
            RowWork(row=0, start=0, ids=tuple(good), sample=True),
        ),
    )
    rows = result.groups[0].rows
    assert rows[0].error and not rows[0].tokens
    assert rows[1].tokens == (lone_greedy(good, 1)[0],)
    driver.network.nan_on = rows[1].tokens[0]
    decoded = driver.run(decode=(0,)).groups[0]
    assert decoded.tokens == (-1,) and decoded.rows[0].row == 0 and decoded.rows[0].error
    driver.executor.close()


@pytest.mark.parametrize("cuts", [(0, 10), (0, 3, 10), (0, 1, 2, 7, 10)])
@pytest.mark.parametrize("score_from", [0, 1, 3, 7, 9])
def test_scores_of_prompt_tokens(driver: Driver, cuts: tuple[int, ...], score_from: int) -> None:
    prompt = [5, 9, 2, 77, 31, 8, 64, 12, 3, 50]
    scored: list[Any] = []
    params = SamplingParams(temperature=0.0, top_logprobs=2)
    add = RowAdd(row=0, state_block=0, pages=pages(1, 1), length=0, sampling=params)
    for start, end in itertools.pairwise(cuts):
        first = {"added": (add,), "before": (ClearState(0),)} if start == 0 else {}
        wants = score_from if score_from - 1 < end else None
        work = RowWork(row=0, start=start, ids=tuple(prompt[start:end]), sample=end == 10, score_from=wants)
        result = driver.run(work=(work,), **first)
        scored += result.groups[0].rows[0].scored
    assert token_of(result) == lone_greedy(prompt, 1)[0]
    logprobs = torch.log_softmax(lone_logits(prompt), dim=-1)
    assert len(scored) == 10 - score_from
    for position, entry in enumerate(scored, score_from):
        if position == 0:
            assert entry is None
            continue
        assert entry.token == prompt[position]
        assert entry.logprob == pytest.approx(float(logprobs[position - 1, prompt[position]]), abs=1e-12)
        best = logprobs[position - 1].topk(2)
        assert entry.top_ids == tuple(best.indices.tolist())
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-12)


def test_scoring_behind_a_reused_prefix_is_an_error_of_the_row(driver: Driver) -> None:
    driver.start(0, 0, pages(1, 1), [1, 2, 3])
    result = driver.run(
        added=(RowAdd(row=1, state_block=5, pages=(3,), length=3, sampling=GREEDY),),
        before=(CopyState(0, 5),),
        work=(RowWork(row=1, start=3, ids=(4, 5), sample=True, score_from=3),),
    )
    assert "cannot be scored" in (result.groups[0].rows[0].error or "")


def test_logprobs_of_sampled_tokens(driver: Driver) -> None:
    first = driver.start(0, 0, pages(1, 1), [1, 2, 3], temperature=0.0, logprobs=True, top_logprobs=3)
    entry = first.groups[0].rows[0].logprobs[0]
    logprobs = torch.log_softmax(lone_logits([1, 2, 3])[-1], dim=-1)
    assert entry.token == token_of(first) == entry.top_ids[0]
    assert entry.logprob == entry.top_logprobs[0] == pytest.approx(float(logprobs.max()), abs=1e-12)
    assert entry.top_logprobs == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-12)


def test_a_mask_is_waited_for_and_obeyed(driver: Driver) -> None:
    add = RowAdd(row=4, state_block=0, pages=pages(1, 1), length=0, sampling=GREEDY)
    work = RowWork(row=4, start=0, ids=(1, 2), sample=True, masked=True)
    handle = driver.executor.submit(driver.plan(added=(add,), before=(ClearState(0),), work=(work,)))
    with pytest.raises(BugError, match="before its masks"):
        driver.executor.wait(handle)
    assert not driver.executor.ready(handle)
    mask = bytearray(13)
    for allowed in (17, 90):
        mask[allowed // 8] |= 1 << allowed % 8
    threading.Timer(0.05, driver.executor.masks, (0, {4: bytes(mask)})).start()
    while not driver.executor.ready(handle):
        pass
    token = token_of(driver.executor.wait(handle))
    logits = lone_logits([1, 2])[-1]
    assert token == (17 if logits[17] >= logits[90] else 90)


def test_a_mask_that_allows_nothing_fails_the_row(driver: Driver) -> None:
    add = RowAdd(row=4, state_block=0, pages=pages(1, 1), length=0, sampling=GREEDY)
    work = RowWork(row=4, start=0, ids=(1, 2), sample=True, masked=True)
    handle = driver.executor.submit(driver.plan(added=(add,), before=(ClearState(0),), work=(work,)))
    driver.executor.masks(0, {4: bytes(13)})
    assert driver.executor.wait(handle).groups[0].rows[0].error
