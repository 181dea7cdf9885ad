"""Rows, steps and executors that fail: every request ends once, the others go on with the right tokens."""

from __future__ import annotations

import pytest

from k3stack.executor.scripted import DeviceFault, Fault
from tests.unit.scheduler.rig import Rig, with_options


def rig_with(faults: dict[tuple[str, int], Fault], **kw: object) -> Rig:
    return Rig(faults=lambda boundary, step: faults.get((boundary, step)), options=with_options(chunk_tokens=8), **kw)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", range(10))
@pytest.mark.parametrize("overlap", [1, 2])
def test_a_failed_step_takes_its_rows_and_spares_the_others(step: int, overlap: int) -> None:
    rig = rig_with({("wait", step): Fault(step_error="out of memory")}, overlap=overlap)
    for i in range(5):
        rig.submit(f"r{i}", [i, *range(9)], max_tokens=5)
    rig.run()
    rig.check_tokens()
    lost = {rid for rid, end in rig.ends.items() if end.reason == "error"}
    plan = next(p for p in rig.plans if p.step == step)
    assert len(lost) == len(plan.groups[0].decode) + len(plan.groups[0].work)
    assert all(rig.ends[rid].message == "out of memory" for rid in lost)
    assert rig.scheduler.stats().failed_steps == 1
    assert sum(p.reset for p in rig.plans) <= 1


@pytest.mark.parametrize("step", range(8))
def test_a_failed_row_ends_alone(step: int) -> None:
    rig = rig_with({("wait", step): Fault(rows={1: "nan in row"})})
    for i in range(4):
        rig.submit(f"r{i}", [i, *range(5)], max_tokens=5)
    rig.run()
    rig.check_tokens()
    assert sum(end.reason == "error" for end in rig.ends.values()) <= 1


@pytest.mark.parametrize("boundary", ["submit", "wait"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_broken_executor_ends_everything_and_says_so(boundary: str, step: int) -> None:
    rig = rig_with({(boundary, step): Fault(raises=RuntimeError("device lost"))})
    for i in range(4):
        rig.submit(f"r{i}", [i, *range(9)], max_tokens=5)
    with pytest.raises(RuntimeError, match="device lost"):
        rig.run()
    rig.take()
    assert len(rig.ends) == 4
    assert all("device lost" in e.message for e in rig.ends.values() if e.reason == "error")
    assert any(e.reason == "error" for e in rig.ends.values())
    rig.scheduler.check()
    assert rig.scheduler.idle and rig.memory.stats().running == 0


def test_another_executor_takes_over_after_one_broke() -> None:
    rig = rig_with({("wait", 2): Fault(raises=RuntimeError("device lost"))})
    rig.submit("a", 9)
    with pytest.raises(RuntimeError):
        rig.run()
    rig.take()
    other = Rig()
    other.scheduler, other.loop.scheduler, other.memory = rig.scheduler, rig.scheduler, rig.memory
    other.submit("b", 9)
    other.run()
    other.check_tokens()


def test_executor_refuses_wrong_plans() -> None:
    rig = Rig()
    rig.submit("a", 9)
    plan = rig.scheduler.plan()
    assert plan is not None
    handle = rig.executor.submit(plan)
    with pytest.raises(DeviceFault, match="1 expected"):
        rig.executor.submit(plan)
    rig.executor.wait(handle)
    with pytest.raises(DeviceFault, match="out of order"):
        rig.executor.wait(handle)
