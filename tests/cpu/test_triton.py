"""Triton kernels without a GPU: all compile for sm_90, and, under the interpreter, agree with their twins in fp32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.cpu import triton_cases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", triton_cases.CASES)
def test_kernels_compile_for_sm_90(case: str) -> None:
    done: list[str] = []

    def note(name: str, compiled: Any) -> None:
        assert compiled.asm["cubin"], name
        done.append(name)

    with triton_cases.compiling(note):
        triton_cases.CASES[case]()
    assert done


@pytest.mark.parametrize(
    "tests", ["test_twins.py", pytest.param("test_triton_network.py", marks=pytest.mark.slow, id="network")]
)
def test_kernels_agree_with_their_twins_under_the_interpreter(tests: str) -> None:
    # The interpreter replaces kernels where they are defined: it needs a process of its own.
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"tests/gpu/{tests}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    assert "passed" in found.stdout or "[100%]" in found.stdout
