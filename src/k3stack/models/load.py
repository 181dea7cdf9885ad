"""``load_model``: from a folder (or a geometry) to a model ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.errors import UserError
from k3stack.kernels.memory import keep_freed_memory
from k3stack.models import dummy
from k3stack.models.checkpoint import find_tensors
from k3stack.models.emulate import EmulatedRank, Emulation
from k3stack.models.landing import Landed, land
from k3stack.models.network import Model
from k3stack.models.pages import move_to_large_pages, small_pages
from k3stack.models.prepare import prepare
from k3stack.models.stream_in import stream_in
from k3stack.models.views import STORED

log = logging.getLogger(__name__)
LoadFormat = Literal["auto", "dummy"]
DTYPES = {name: STORED[name] for name in ("float64", "float32", "bfloat16")}


@torch.inference_mode(False)  # weights made in a caller's inference mode could not be written by the reader's threads
def load_model(
    source: str | Path | ModelGeometry,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device = "cpu",
    load_format: LoadFormat = "auto",
    latent_norm_eps: float = 1e-6,
    progress: bool = True,
    threads: int = 4,
    seed: int = 0,
    emulation: Emulation | None = None,
) -> Model:
    """Build the network and fill its weights.

    ``source``: a checkpoint folder, or for ``load_format="dummy"`` a folder or file with a config.json, or a geometry.
    ``dtype``: 'float64', 'float32' or 'bfloat16', in which everything computes. ``latent_norm_eps``: epsilon of the
    two latent norms of MLA (1e-6 as the reference implementations; 1e-5 as SGLang). ``progress``: show a bar of
    bytes and rate on standard error. ``seed``: of dummy weights. ``emulation``: one rank of a layout alone, with dummy
    weights.
    Raises CheckpointError (file, tensor, expected, found) and UserError.
    """
    compute = parse_dtype(dtype)
    if load_format not in ("auto", "dummy"):
        raise UserError(f"load format is {load_format!r}; known: 'auto', 'dummy'", param="--load-format")
    if isinstance(source, ModelGeometry):
        if load_format != "dummy":
            raise UserError("a geometry without files needs load_format 'dummy'", param="--load-format")
        geometry = source
    else:
        geometry = load_geometry(source)
    if torch.device(device).type == "cpu":
        keep_freed_memory()
    if emulation is not None and load_format != "dummy":
        raise UserError("one rank alone has dummy weights: load_format 'dummy'", param="--load-format")
    make = partial(Model, geometry, dtype=compute, device=torch.device(device), latent_norm_eps=latent_norm_eps)
    if load_format == "dummy":
        model = make() if emulation is None else EmulatedRank(geometry, emulation, **make.keywords)
        dummy.fill(model, seed)
    else:
        model = _load(Path(source), geometry, make, threads, progress)  # type: ignore[arg-type]
    model.finish()
    return model


def _load(folder: Path, geometry: ModelGeometry, make: Callable[[], Model], threads: int, progress: bool) -> Model:
    found = find_tensors(folder, geometry)
    if found.skipped:
        log.info("skipped %d tensors (%.2f GB) of the vision part", found.skipped, found.skipped_bytes / 1e9)
    model = make()
    landed = land(model, found)
    regions = small_pages(landed)
    read_and_prepare(landed, threads=threads, progress=progress)
    move_to_large_pages(model, regions)
    return model


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """'float64', 'float32' or 'bfloat16' (or torch's own) as torch dtype; UserError for any other."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise UserError(f"dtype is {str(dtype)!r}; implemented: {', '.join(DTYPES)}", param="--dtype")
    return found


def read_and_prepare(landed: Landed, *, threads: int, progress: bool) -> None:
    """Fill the weights; each of the two has a bar."""
    with Bar("reading weights", landed.stored, progress) as bar:
        stream_in(landed, threads=threads, on_bytes=bar.advance)
    todo = landed.unfinished
    with Bar("preparing weights", sum(x.memory.numel() for x in todo), progress and bool(todo)) as bar:
        prepare(todo, threads=threads, on_bytes=bar.advance)


class Bar:
    """A bar of bytes and their rate on standard error, if ``shown``."""

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self.what, self.total, self.shown = what, total, shown
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if not self.shown:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (TextColumn(self.what), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("", total=self.total)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """From any thread."""
        if self._bar is not None:
            self._bar.advance(self._task, count)
