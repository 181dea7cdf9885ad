"""Compiled kernels are started again for exactly the arguments that Triton would start them for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.runtime.driver import driver

from k3stack.kernels import restart

FLOATS, HALVES = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
POOL: list[Any] = [
    *(0, 1, 2, 15, 16, 17, 32, 33, -1, -15, -16, (1 << 31) - 16, (1 << 31) - 1, -(1 << 31)),
    *(True, False, None, 0.0, 1.0, 16.0),
    *(FLOATS, FLOATS[4:], FLOATS[1:], FLOATS[2:], FLOATS[:0], HALVES, HALVES[8:], HALVES[1:], HALVES[4:]),
]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "HERE", "is_cpu")


def told(*args: Any) -> tuple[Any, Any]:
    """Types and what is read of arguments."""
    types = [type(a) for a in args]
    read = restart.reader([f"x{i}" for i in range(len(args))], types, [])
    assert read is not None
    return types, read(*args)[0]


def test_arguments_that_look_alike_are_alike_to_triton() -> None:
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    seen = [(told(FLOATS, a), native(backend, a, False, True, True)) for a in POOL]
    different = 0
    for (mine, theirs), (my_other, their_other) in itertools.combinations(seen, 2):
        assert mine != my_other or theirs == their_other
        different += mine != my_other
    assert different < len(POOL) * (len(POOL) - 1) / 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((FLOATS, 16), (FLOATS, 32), True),
        ((FLOATS, 16), (FLOATS, 24), False),
        ((FLOATS, 1), (FLOATS, 17), False),
        ((FLOATS, 1), (FLOATS, True), False),
        ((FLOATS, 2.0), (FLOATS, 1.0), True),
        ((FLOATS, 5), (FLOATS[4:], 7), True),
        ((FLOATS, 5), (FLOATS[2:], 5), False),
        ((FLOATS[2:], FLOATS), (FLOATS, FLOATS[2:]), False),
        ((FLOATS, HALVES), (HALVES, FLOATS), False),
    ],
)
def test_what_a_kernel_is_compiled_for(one: tuple[Any, ...], other: tuple[Any, ...], same: bool) -> None:
    assert (told(*one) == told(*other)) is same


def test_what_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(FLOATS, 1 << 31)[1] is None
    assert told(FLOATS, -(1 << 31) - 1)[1] is None
    assert restart.reader(["x"], [str], []) is None
    assert restart.reader(["x", "y"], [Tensor, torch.nn.Parameter], []) is None
    monkeypatch.setattr(restart, "HERE", "is_cuda")
    assert told(FLOATS, 1)[1] is None


class Driver:
    """On one of two devices."""

    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 70 + device


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.started.append(args)


class Kernel:
    arg_names = ("x", "n", "eps", "BLOCK", "FAST", "PDL")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[restart.Starts]:
    monkeypatch.setattr(restart, "DIRECT", False)
    monkeypatch.setattr(driver, "_active", Driver())
    return restart.Starts()


def test_a_known_kernel_is_started_with_addresses(starts: restart.Starts) -> None:
    kernel, compiled = Kernel(), Compiled()
    options = {"BLOCK": 64, "FAST": True, "num_warps": 4}
    assert not starts.again(kernel, (3,), (FLOATS, 16, 0.5), options)
    starts.remember(kernel, (FLOATS, 16, 0.5), options, compiled)
    assert starts.again(kernel, (3,), (FLOATS, 16, 0.5), options)
    assert starts.again(kernel, (5, 6, 7), (FLOATS[8:], 48, 0.25), options)
    common = ("function", "metadata", None, None, None)
    assert compiled.started == [
        (3, 1, 1, 70, *common, FLOATS.data_ptr(), 16, 0.5, 64, True, None),
        (5, 6, 7, 70, *common, FLOATS.data_ptr() + 32, 48, 0.25, 64, True, None),
    ]


class Launcher:
    """As a compiled kernel's ``run`` is in Triton 3.6, with the C part as ``launch``."""

    launch_cooperative_grid, launch_pdl, profile_scratch_size = False, True, 0

    def __init__(self, scratch: int) -> None:
        self.global_scratch_size = scratch
        self.called: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.called.append(args)

    def launch(self, *args: Any) -> None:
        self.launched.append(args)


@pytest.mark.parametrize("scratch", [0, 128])
def test_only_a_kernel_without_scratch_memory_is_started_past_its_launcher(
    starts: restart.Starts, monkeypatch: pytest.MonkeyPatch, scratch: int
) -> None:
    monkeypatch.setattr(restart, "DIRECT", True)
    kernel, compiled, run = Kernel(), Compiled(), Launcher(scratch)
    monkeypatch.setattr(compiled, "run", run)
    starts.remember(kernel, (FLOATS, 16, 0.5), {"BLOCK": 64}, compiled)
    assert starts.again(kernel, (3, 2), (FLOATS, 16, 0.5), {"BLOCK": 64})
    values = (FLOATS.data_ptr(), 16, 0.5, 64, None, None)
    unheard = (None, None, None)
    direct = (3, 2, 1, 70, "function", False, True, None, None, "metadata", *unheard, *values)
    assert run.launched == ([] if scratch else [direct])
    assert run.called == ([(3, 2, 1, 70, "function", "metadata", *unheard, *values)] if scratch else [])


def test_another_case_goes_the_usual_way(starts: restart.Starts) -> None:
    kernel, compiled = Kernel(), Compiled()
    args, options = (FLOATS, 16, 0.5), {"BLOCK": 64, "FAST": True, "num_warps": 4}
    starts.remember(kernel, args, options, compiled)
    for other in ((FLOATS[1:], 16, 0.5), (FLOATS, 17, 0.5), (HALVES, 16, 0.5), (FLOATS, 16, 1), (FLOATS, None, 0.5)):
        assert not starts.again(kernel, (1,), other, options)
    for more in ({"BLOCK": 32}, {"FAST": 1}, {"FAST": False}, {"num_warps": 8}, {"num_stages": 2}):
        assert not starts.again(kernel, (1,), args, options | more)
    assert not starts.again(Kernel(), (1,), args, options)
    driver.active.device = 1
    assert not starts.again(kernel, (1,), args, options)
    assert not compiled.started


def test_two_cases_are_kept_apart(starts: restart.Starts) -> None:
    kernel, cases = Kernel(), {(FLOATS, 16): Compiled(), (FLOATS, 17): Compiled(), (FLOATS[1:], 16): Compiled()}
    for (x, n), compiled in cases.items():
        starts.remember(kernel, (x, n, 0.5), {"BLOCK": 64}, compiled)
    for (x, n), compiled in cases.items():
        assert starts.again(kernel, (1,), (x, n, 0.5), {"BLOCK": 64})
        assert [s[9:11] for s in compiled.started] == [(x.data_ptr(), n)]


def test_who_listens_to_starts_hears_of_them(starts: restart.Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, compiled = Kernel(), Compiled()
    starts.remember(kernel, (FLOATS, 16, 0.5), {"BLOCK": 64}, compiled)
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
    assert not starts.again(kernel, (1,), (FLOATS, 16, 0.5), {"BLOCK": 64})
    assert not compiled.started


def test_other_versions_of_triton_start_kernels_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert restart.starts_if_known() is not None
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    assert restart.starts_if_known() is None
