"""Tests that need a CUDA device; skipped where there is none. The harness then puts its models there."""

from __future__ import annotations

import pytest
import torch

from tests.cpu import harness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "DEVICE", "cuda")
