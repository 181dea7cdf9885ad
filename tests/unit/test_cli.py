"""The `k3` command: dispatch, exit statuses, fast help."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import k3stack.cli as cli
from k3stack.cli.arguments import Parser
from k3stack.errors import BugError, DoesNotFit, NotNow, UserError


def test_every_verb_has_a_module_with_run() -> None:
    for verb in cli.VERBS:
        assert callable(importlib.import_module(f"k3stack.cli.{verb}").run)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UserError("wrong flag"), 2, "k3 serve: wrong flag"),
        (DoesNotFit("too small"), 1, "too small"),
        (NotNow("later"), 3, "later"),
        (BugError("broken"), 70, "broken"),
        (ZeroDivisionError("x"), 70, "this is a bug of k3stack"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_statuses(
    error: BaseException, status: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    def load(name: str) -> Any:
        assert name == "k3stack.cli.serve"
        return SimpleNamespace(run=run)

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=load))
    assert cli.main(["serve"]) == status
    out, err = capsys.readouterr()
    assert says in err and out == ""


def test_usage_and_unknown_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in cli.VERBS)
    assert cli.main(["sevre"]) == 2
    assert "did you mean serve" in capsys.readouterr().err
    assert cli.main(["--version"]) == 0


def test_an_unknown_option_of_a_verb_gets_a_suggestion() -> None:
    parser = Parser("x", "y", json_output=True)
    assert parser.read(["--json"]).json
    with pytest.raises(UserError, match="did you mean --json"):
        parser.read(["--jsn"])
    with pytest.raises(UserError):
        parser.read(["--json=5"])


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["serve", "--model-path", "x", "--tp", "8"]])
def test_help_and_refusals_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from k3stack.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'fastapi', 'numpy', 'zmq', 'rich'} & set(sys.modules)))"
    )
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[-1] == "[]"
    # 0.07 s on an idle machine; the bound leaves room for a loaded one.
    assert time.monotonic() - began < 3.0
