"""Pictures: one HTML file without outside assets, a PNG, and the curves behind the admission picture."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from k3stack.cli import main
from k3stack.config.hardware import load_catalogue
from k3stack.planner.command import read_command
from k3stack.planner.pictures import LENGTHS, admission_curves
from k3stack.planner.plan import make_plan
from k3stack.planner.setup import build_setup


def test_one_html_file_without_outside_assets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    words = f"plan --hardware 8xB300 --html {file} -- sglang serve --tp-size 8 --mamba-full-memory-ratio 1.1"
    assert main(words.split()) == 0
    assert f"wrote {file}" in capsys.readouterr().err
    text = file.read_text()
    assert text.count("<svg") == 5
    outside = re.findall(r"(?:src|href)\s*=\s*[\"']([^\"'#][^\"']*)", text)
    assert [x for x in outside if not x.startswith("#")] == []
    assert "@import" not in text and "url(http" not in text
    for part in ("191.8 GiB", "Where the bytes are", "Requests at once", "--mamba-full-memory-ratio"):
        assert part in text


def test_png_and_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    words = f"plan --hardware 8xB300 --png {file} -- sglang serve --tp-size 8 --dp-size 8 --enable-dp-attention"
    assert main(words.split()) == 1
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_curves_of_split_and_arena() -> None:
    words = "sglang serve --tp-size 8 --mamba-full-memory-ratio 1.1".split()
    plan = make_plan(build_setup(read_command(words), load_catalogue().parse("8xB300"), budget_gib=30.368), 9_216)
    curves = {name: counts for name, _, _, counts in admission_curves(plan)}
    arena = curves["arena"]
    split = next(v for k, v in curves.items() if k.startswith("split at ratio 1.1"))
    best = next(v for k, v in curves.items() if "best ratio" in k)
    assert all(a >= b for a, b in zip(arena, best, strict=True))
    assert all(a >= b for a, b in pairwise(arena))
    short = LENGTHS.index(1_024)
    assert split[short] == 60 and best[short] > 60 and arena[short] > 5 * 60


def test_unwritable_file_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --hardware 8xB300 --html /nowhere/x.html --tp-size 8".split()) == 2
    assert "/nowhere/x.html" in capsys.readouterr().err
