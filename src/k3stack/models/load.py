"""``load_model``: from a folder (or a geometry) to a model ready to run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.errors import UserError
from k3stack.kernels.memory import keep_freed_memory
from k3stack.models import dummy
from k3stack.models.checkpoint import Found, find_tensors
from k3stack.models.network import Model
from k3stack.models.stream_in import read_ahead, stream_in

log = logging.getLogger(__name__)
LoadFormat = Literal["auto", "dummy"]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


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
) -> Model:
    """Build the network and fill its weights.

    ``source``: a checkpoint folder, or for ``load_format="dummy"`` a folder or file with a config.json, or a geometry.
    ``dtype``: 'float64', 'float32' or 'bfloat16', in which everything computes. ``latent_norm_eps``: epsilon of the
    two latent norms of MLA (1e-6 as the reference implementations; 1e-5 as SGLang). ``progress``: show a bar of
    bytes and rate on standard error. ``seed``: of dummy weights.
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
    found = None if load_format == "dummy" else find_tensors(Path(source), geometry)  # type: ignore[arg-type]
    if found is not None:
        read_ahead(found)
    if torch.device(device).type == "cpu":
        keep_freed_memory()
    model = Model(geometry, dtype=compute, device=torch.device(device), latent_norm_eps=latent_norm_eps)
    if found is None:
        dummy.fill(model, seed)
    else:
        if found.skipped:
            log.info("skipped %d tensors (%.2f GB) of the vision part", found.skipped, found.skipped_bytes / 1e9)
        _read(model, found, threads, progress)
    model.finish()
    return model


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """'float64', 'float32' or 'bfloat16' (or torch's own) as torch dtype; UserError for any other."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise UserError(f"dtype is {str(dtype)!r}; implemented: {', '.join(DTYPES)}", param="--dtype")
    return found


def _read(model: Model, found: Found, threads: int, progress: bool) -> None:
    if not progress:
        stream_in(model, found, threads=threads)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("reading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=found.nbytes)
        stream_in(model, found, threads=threads, on_bytes=lambda n: bar.advance(task, n))
