"""Models whose official config is in the package, so that planning needs no download."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.errors import UserError

K3 = "moonshotai/Kimi-K3"
PACKAGED: dict[str, str] = {
    "moonshotai/kimi-k3": "k3_config.json",
    "kimi-k3": "k3_config.json",
    "k3": "k3_config.json",
    "moonshotai/kimi-linear-48b-a3b-instruct": "kimi_linear_48b_config.json",
    "moonshotai/kimi-linear-48b-a3b-base": "kimi_linear_48b_config.json",
    "kimi-linear-48b-a3b": "kimi_linear_48b_config.json",
}
"""Names (lower case) -> file under ``config/data``."""

OTHER_WEIGHTS: dict[str, str] = {
    "nvidia/kimi-k3-nvfp4": "NVFP4",
}
"""Published re-quantisations that share the model's name but not its bytes."""


@lru_cache(maxsize=16)
def model_geometry(path: str) -> ModelGeometry:
    """Geometry of a packaged model by name, or of a checkpoint folder or config file on disk. Raises UserError."""
    file = PACKAGED.get(path.lower())
    if file is not None:
        return load_geometry(Path(__file__).parent / "data" / file)
    if Path(path).exists():
        return load_geometry(path)
    raise UserError(
        f"model {path!r}: no such folder, and no packaged config of that name; packaged: "
        f"{K3}, moonshotai/Kimi-Linear-48B-A3B-Instruct. Give the folder of a checkpoint (its config.json is enough).",
        param="--model-path",
    )
