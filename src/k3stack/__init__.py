"""k3stack: plan, serve, simulate and verify Kimi-K3 and its small relatives.

``LLM`` and ``SamplingParams`` are imported on first use, so that planning and simulating need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from k3stack.config.sampling import SamplingParams
    from k3stack.engine.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from k3stack.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from k3stack.config.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'k3stack' has no attribute {name!r}")
