"""Imports every module of the torch-free packages in an environment that has no torch."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

import k3stack

PACKAGES = "config estimate memory scheduler chat workload simulator planner cli".split()
EXTRAS = frozenset({"fastapi", "starlette", "uvicorn", "zmq", "prometheus_client", "llguidance", "pyarrow"})
"""Packages of the extras; a module may need one, but never torch."""

if importlib.util.find_spec("torch"):
    sys.exit("torch is installed here: this check means nothing")
count = 0
for package in PACKAGES:
    if importlib.util.find_spec(f"k3stack.{package}") is None:
        continue
    found = importlib.import_module(f"k3stack.{package}")
    for module in pkgutil.walk_packages(found.__path__, f"k3stack.{package}."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] not in EXTRAS:
                raise
        count += 1
print(f"{count} modules of {k3stack.__name__} import without torch")
