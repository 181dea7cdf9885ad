"""The commands on the planning pages run, and the figures quoted there are what they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from benchmarks.admission import BEGIN, END, cases, table

from k3stack.cli import main

DOCS = Path(__file__).parents[3] / "docs"
WALK = (DOCS / "planning-walkthrough.md").read_text()
PAGES = WALK + (DOCS / "plan.md").read_text()
COMMANDS = sorted(set(re.findall(r"^k3 (plan --hardware .*)$", PAGES, re.MULTILINE)))
ADMITTED = 49
"""Columns of a ranking's row up to the requests that are admitted."""
DO_NOT_FIT = ("--dp-size 8 --enable-dp-attention", "megamoe")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = 1 if any(part in command for part in DO_NOT_FIT) else 0
    assert main(shlex.split(command)) == expected
    assert capsys.readouterr().out


def test_quoted_output_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block of output on the walk follows the command that prints it, line by line."""
    blocks = re.findall(r"```\n(.*?)\n```", WALK, re.DOTALL)
    printed = ""
    checked = 0
    for block in blocks:
        if block.startswith("k3 plan"):
            main(shlex.split(block[3:]))
            printed = capsys.readouterr().out
            continue
        for line in block.splitlines():
            # Rows of the ranking end in times, which move with the step model: layout, GiB and admission are kept.
            assert line[: ADMITTED if " × " in line or line.startswith("  tp") else None] in printed, line
            checked += 1
    assert checked > 15


def test_pictures_are_there() -> None:
    for name in re.findall(r"\((pictures/[^)]+)\)", WALK):
        assert (DOCS / name).exists()


def test_admission_table_is_from_the_real_allocator() -> None:
    """Two lengths of each case again: allocator and closed form agree, and the page quotes them."""
    page = (DOCS / "admission.md").read_text()
    quoted = page[page.index(BEGIN) : page.index(END)]
    for case in cases():
        for line in table(case, (4_096, 16_384)):
            assert line in quoted, line
