"""Triton kernels without a GPU: all compile for sm_90, and, under the interpreter, agree with their twins in fp32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.cpu import sass, triton_cases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", triton_cases.CASES)
def test_kernels_compile_for_sm_90(case: str) -> None:
    done: list[str] = []

    def note(name: str, compiled: Any) -> None:
        assert compiled.asm["cubin"], name
        if "wgmma" in compiled.asm["ptx"]:
            code = sass.listing(compiled.asm["cubin"])
            assert not sass.overwritten(code), name
            assert not sass.misaddressed(code), name
        done.append(name)

    with triton_cases.compiling(note):
        triton_cases.CASES[case]()
    assert done


def test_registers_of_products_under_way_are_seen() -> None:
    lines = [
        "/*0100*/ LOP3.LUT R8, R4, 0x81c081c0, RZ, 0xc0, !PT ;",
        "/*0110*/ HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0 ;",
        "/*0120*/ WARPGROUP.DEPBAR.LE gsb0, 0x7 ;",
        "/*0130*/ @P0 BRA 0x100 ;",
        "/*0140*/ LDS.128 R8, [R2] ;",
    ]
    assert [f[:5] for f in sass.overwritten("\n".join(lines))] == ["0x140", "0x100"]
    assert not sass.overwritten("\n".join(lines).replace("0x7", "0x0"))


def test_descriptors_made_of_other_registers_are_seen() -> None:
    lines = [
        "/*0100*/ USGXT.U32 UR22, UR22, 0xe ;",
        "/*0110*/ UMOV UR9, URZ ;",
        "/*0120*/ UIADD3 UR4, UP0, UR22, 0x40, URZ ;",
        "/*0130*/ UIADD3.X UR5, UR9, -0x7fffffe0, URZ, UP0, !UPT ;",
        "/*0140*/ UIADD3.X UR6, UR8, -0x1, URZ, UP0, !UPT ;",
    ]
    assert not sass.misaddressed("\n".join(lines))
    for wrong in ("UIMAD UR22, UR22, UR4, UR5", "UIMAD UR9, UR22, UR4, UR5"):
        changed = [*lines[:2], f"/*0118*/ {wrong} ;", *lines[2:]]
        assert [f[:5] for f in sass.misaddressed("\n".join(changed))] == ["0x130"]


@pytest.mark.parametrize(
    "tests", ["test_twins*.py", pytest.param("test_triton_network.py", marks=pytest.mark.slow, id="network")]
)
def test_kernels_agree_with_their_twins_under_the_interpreter(tests: str) -> None:
    # The interpreter replaces kernels where they are defined: it needs a process of its own.
    files = sorted(map(str, (ROOT / "tests/gpu").glob(tests)))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    assert "passed" in found.stdout or "[100%]" in found.stdout
