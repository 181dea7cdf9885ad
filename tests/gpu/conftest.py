"""Tests that need a CUDA device; skipped where there is none. The harness then puts its models there.

The kernels' twins run without one too, under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.cpu import harness

INTERPRETABLE = ("test_twins", "test_triton_network")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and item.path.name.startswith(INTERPRETABLE)
        if not torch.cuda.is_available() and not interpreted:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "DEVICE", "cuda")
