"""An executor for tests: a toy network whose every token depends on all the memory it should have read."""

from __future__ import annotations

from k3stack.executor.scripted.device import DeviceFault, ToyDevice
from k3stack.executor.scripted.executor import Fault, ScriptedExecutor
from k3stack.executor.scripted.toy import ToyModel

__all__ = ["DeviceFault", "Fault", "ScriptedExecutor", "ToyDevice", "ToyModel"]
