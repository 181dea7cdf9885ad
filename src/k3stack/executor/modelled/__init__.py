"""An executor that runs nothing: it asks a cost function how long each step would take."""

from __future__ import annotations

from k3stack.executor.modelled.executor import ModelledExecutor, ModelledStep

__all__ = ["ModelledExecutor", "ModelledStep"]
