"""The models that come with the package: ``nano``, small and trained, and ``random``, a tiny one that answers noise.

``random`` is for trying the machinery where a model's answers do not matter: it has single bytes for a vocabulary and
starts in no time. Whoever starts it is told what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NANO = "nano"
RANDOM = "random"
_DATA = Path(__file__).parent / "data"
RANDOM_NOTE = (
    "this model is RANDOM: the right shape and format, but its answers are noise. "
    "Give `nano` or a checkpoint's folder as --model-path for sense"
)


@dataclass(frozen=True, slots=True)
class Builtin:
    """Where a model path leads."""

    path: str
    load_format: Literal["auto", "dummy"] | None = None
    """What the model needs; None: whatever was asked for."""
    note: str | None = None
    """What whoever starts it must know."""


def resolve(model_path: str) -> Builtin:
    """The folder behind ``model_path``: a built-in model's by its name, anything else stands for itself."""
    if model_path == NANO:
        return Builtin(str(_DATA / NANO))
    if model_path == RANDOM:
        return Builtin(str(_DATA / RANDOM), load_format="dummy", note=RANDOM_NOTE)
    return Builtin(model_path)
