"""What README.md and docs/serve.md tell people to type works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from k3stack.cli import VERBS
from k3stack.config.flags import parse_serve
from tests.cpu.served import ROOT, served

README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README, **{f"docs/{p.name}": p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))}}


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Lines of shell blocks and of indented blocks that call make or k3, without their comments."""
    shell = "\n".join(blocks("sh", text)) + "\n" + "\n".join(re.findall(r"^    (\S.*)$", text, re.MULTILINE))
    lines = [re.split(r"\s{2,}|\s#", line.strip())[0] for line in shell.splitlines()]
    return [line.split() for line in lines if re.match(r"(make|k3) ", line)]


def test_the_python_of_the_readme_runs(capfd: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    with served("--model-path", "nano", "--arena-gib", "0.1", "--random-seed", "2") as server:
        assert "http://127.0.0.1:30000" in code
        done = subprocess.run(
            [sys.executable, "-c", code.replace("http://127.0.0.1:30000", server.url)],
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode()
        asked = subprocess.run(
            [sys.executable, "-m", "k3stack", "chat", "--base-url", server.url, "--max-tokens", "20", "Hello"],
            env={"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            timeout=120,
        )
        assert asked.returncode == 0, asked.stderr.decode()


def test_the_weather_example_prints_what_the_readme_shows() -> None:
    (shown,) = blocks("text")
    with served("--model-path", "nano", "--arena-gib", "0.1") as server:
        words = [sys.executable, "examples/weather.py", f"{server.url}/v1"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    found = commands(PAGES[page])
    assert found or page != "README.md"
    for words in found:
        if words[0] == "make":
            if shutil.which("make") is None:
                pytest.skip("make is not installed")
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        else:
            assert words[1] in VERBS, words
            if words[1] == "serve":
                parse_serve(words[2:])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]) if not link.startswith("http")]
    assert [link for link in links if not (folder / link).exists()] == []
