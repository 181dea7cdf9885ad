"""The package order of the architecture, sizes of files and functions, and which half may import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "k3stack"
ORDER = (
    "config estimate memory scheduler chat workload parallel kernels models executor engine server simulator "
    "verify planner cli"
).split()
TORCH = ("parallel", "kernels", "models", "executor/torch")
TORCH_LAZILY = ("engine", "verify")
FILE_LINES, FUNCTION_LINES = 500, 80
FILES = sorted(SRC.rglob("*.py"))


def imports(tree: ast.AST, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """Imported module names with their lines; ``if TYPE_CHECKING`` blocks are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            base = node.module or ""
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif not (top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))):
            yield from imports(node, top_level_only=top_level_only)


def late_imports(source: str, package: str) -> list[str]:
    """Imports in ``source`` of a package that stands below ``package`` in the order."""
    found = []
    for name, line in imports(ast.parse(source)):
        parts = name.split(".")
        if parts[0] != "k3stack" or len(parts) < 2 or parts[1] not in ORDER:
            continue
        if ORDER.index(parts[1]) > ORDER.index(package):
            found.append(f"line {line}: {package} imports {name}")
    return found


def package_of(file: Path) -> str | None:
    parts = file.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_imports_only_from_packages_above(file: Path) -> None:
    package = package_of(file)
    if package is None:
        return
    assert package in ORDER, f"{package} is not in the order of packages"
    assert late_imports(file.read_text(), package) == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_torch_only_where_it_belongs(file: Path) -> None:
    path = str(file.relative_to(SRC))
    if path.startswith(TORCH):
        return
    names = imports(ast.parse(file.read_text()), top_level_only=path.startswith(TORCH_LAZILY))
    assert [n for n, _ in names if n.split(".")[0] in ("torch", "triton", "fla", "safetensors")] == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_sizes(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_the_checker_sees_late_and_hidden_imports() -> None:
    assert late_imports("from k3stack.scheduler.plan import StepPlan", "memory")
    assert late_imports("def f():\n    import k3stack.server.app", "engine")
    assert late_imports("from k3stack import planner", "server")
    assert not late_imports("from k3stack.config.geometry import ModelGeometry", "memory")
    assert not late_imports("if TYPE_CHECKING:\n    from k3stack.cli import main", "config")


def test_the_checker_sees_torch() -> None:
    assert "torch" in [n for n, _ in imports(ast.parse("def f():\n    import torch"))]
    assert "torch" not in [n for n, _ in imports(ast.parse("def f():\n    import torch"), top_level_only=True)]


def test_the_structure_page_names_what_exists() -> None:
    """docs/structure.md: every package has its row, and every file it names is there."""
    text = (SRC.parents[1] / "docs" / "structure.md").read_text()
    packages = [p for p in ORDER if (SRC / p / "__init__.py").exists()]
    assert [p for p in packages if f"| `{p}/` |" not in text] == []
    named = set(re.findall(r"`((?:{})/[a-z_/]+\.py)`".format("|".join(ORDER)), text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (SRC / name).exists()] == []
