"""Moving weights to large pages: hints that change no value, in a thread that goes when the model goes."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from k3stack.config.geometry import load_geometry
from k3stack.kernels.memory import HUGE_PAGE
from k3stack.models import load, pages
from k3stack.models.checkpoint import find_tensors
from k3stack.models.landing import land
from k3stack.models.network import Model
from tests.cpu.harness import GOLDEN

K3 = GOLDEN / "k3_tiny_open"


def test_large_pages_lie_within_regions() -> None:
    start = 10 * HUGE_PAGE + 4096
    assert list(pages._large_pages([(start, 2 * HUGE_PAGE)])) == [11 * HUGE_PAGE]
    assert list(pages._large_pages([(10 * HUGE_PAGE, 2 * HUGE_PAGE)])) == [10 * HUGE_PAGE, 11 * HUGE_PAGE]
    assert list(pages._large_pages([(start, HUGE_PAGE)])) == []


def test_every_weight_is_in_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = load_geometry(K3)
    model = Model(geometry, dtype=torch.float32, device=torch.device("cpu"))
    landed = land(model, find_tensors(K3, geometry))
    monkeypatch.setattr(pages, "HUGE_PAGE", 1)
    monkeypatch.setattr(pages, "in_small_pages", lambda start, size: True)
    monkeypatch.setattr(pages, "huge_pages_granted", lambda: True)
    regions = pages.small_pages(landed)
    for x in landed.landings:
        begin = x.memory.data_ptr()
        assert any(a <= begin and begin + x.memory.numel() <= a + size for a, size in regions)
    assert all(a + size < b for (a, size), (b, _) in pairwise(regions))
    monkeypatch.setattr(pages, "huge_pages_granted", lambda: False)
    assert pages.small_pages(landed) == []


def test_the_thread_ends_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "small_pages", lambda landed: [])
    model = load.load_model(K3, dtype="float64", progress=False)
    moved: list[int] = []
    monkeypatch.setattr(pages, "gather_pages", lambda start, size: moved.append(start) is None)
    regions = [(0, 100 * HUGE_PAGE)]
    thread = pages.move_to_large_pages(model, regions)
    assert thread is not None
    thread.join(60)
    assert moved == [i * HUGE_PAGE for i in range(100)]
    monkeypatch.setattr(pages, "gather_pages", lambda start, size: False)
    refused = pages.move_to_large_pages(model, regions)
    assert refused is not None
    refused.join(60)
    assert not refused.is_alive()
    moved.clear()
    owner = [model]

    def last(start: int, size: int) -> bool:
        moved.append(start)
        owner.clear()
        return True

    monkeypatch.setattr(pages, "gather_pages", last)
    dying = pages.move_to_large_pages(model, regions)
    del model
    assert dying is not None
    dying.join(60)
    assert 1 <= len(moved) < 100


def test_a_process_ends_while_pages_are_moved(tmp_path: Path) -> None:
    """Without waiting for the rest, and without an abort."""
    script = tmp_path / "leave.py"
    script.write_text(
        "import torch\n"
        "from k3stack.kernels import memory\n"
        "from k3stack.models import pages\n"
        "class Model: pass\n"
        "kept = torch.ones(64 << 20, dtype=torch.uint8)\n"
        "model = Model()\n"
        "pages.move_to_large_pages(model, [(kept.data_ptr(), kept.numel())] * 10000)\n"
    )
    source = str(Path(pages.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, str(script)], env=environment, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
