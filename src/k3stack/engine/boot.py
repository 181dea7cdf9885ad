"""From options to a running engine core: measure, plan the pools, load, assemble."""

from __future__ import annotations

from k3stack.config.options import EngineOptions
from k3stack.engine.process import Core
from k3stack.engine.scripted import Script, ScriptedCore


def build_core(options: EngineOptions, script: Script | None) -> Core:
    """The core that ``options`` describe; with ``script`` one that needs no network."""
    if script is None:
        raise NotImplementedError("the torch executor is being built")
    return ScriptedCore(options, script)
