"""pytest plugin that makes torch and its kin impossible to import: ``pytest -p tests.torch_free tests/unit``.

It shows on any machine what holds on one without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

BLOCKED = frozenset({"torch", "triton", "fla", "safetensors", "einops"})


class Blocker(MetaPathFinder):
    """Stands first among the finders and refuses the blocked names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked: this run is torch-free", name=name)
        return None


sys.meta_path.insert(0, Blocker())
