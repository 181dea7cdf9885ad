"""The model that comes with the package, under the name ``nano``: what to run before there is a checkpoint.

Until the trained one is here it is a tiny network of Kimi-K3's layout with random weights, which answers noise; whoever
starts it is told so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NANO = "nano"
_DATA = Path(__file__).parent / "data"
RANDOM_NOTE = (
    "the built-in model is RANDOM: the right shape and format, but its answers are noise. "
    "Give a checkpoint's folder as --model-path for sense"
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
    """The folder behind ``model_path``; ``nano`` is the built-in model, anything else stands for itself."""
    if model_path != NANO:
        return Builtin(model_path)
    trained = _DATA / NANO
    if (trained / "model.safetensors.index.json").exists():
        return Builtin(str(trained))
    return Builtin(str(_DATA / "random"), load_format="dummy", note=RANDOM_NOTE)
