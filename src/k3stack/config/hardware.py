"""The hardware catalogue: what a GPU holds, how fast it is, and how it is linked; and the ``8xB300`` notation.

The figures are data (``data/hardware.json``), each with its unit and its source. A user's own file has the same
fields and is read beside it. Vendors other than NVIDIA are refused by name: nothing here has been checked on them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3stack.config.files import read_json
from k3stack.errors import UserError

CPU = "CPU"
"""Name of the hardware ``cpu``: this machine, for our own server."""
GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure with where it comes from. ``value`` is in ``unit``."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. Bytes, bytes per second and FLOP per second; links count one direction of one GPU."""

    name: str
    sm: int
    """Compute capability times ten (90: Hopper, 100 and 103: Blackwell)."""
    memory_bytes: int
    """As the driver shows it."""
    nominal_bytes: int
    """As the name plate says (decimal gigabytes)."""
    bandwidth: float
    rates: Mapping[str, float]
    """Dense FLOP/s by precision: bf16, fp8, and fp4 where the tensor cores have it."""
    node_link: float
    domain_link: float
    network_link: float
    gpus_per_node: int
    nvlink_domain: int
    """GPUs that reach one another over NVLink."""
    figures: Mapping[str, Figure] = field(default_factory=dict, compare=False, repr=False)
    note: str = ""

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB

    @property
    def blackwell(self) -> bool:
        return self.sm >= 100


@dataclass(frozen=True, slots=True)
class Hardware:
    """``count`` GPUs of one kind, in nodes of ``gpu.gpus_per_node`` (one smaller node when there are fewer)."""

    gpu: Gpu
    count: int

    @property
    def gpus_per_node(self) -> int:
        return min(self.gpu.gpus_per_node, self.count)

    @property
    def nodes(self) -> int:
        return -(-self.count // self.gpu.gpus_per_node)

    @property
    def name(self) -> str:
        return f"{self.count}x{self.gpu.name}"

    def with_count(self, count: int) -> Hardware:
        return Hardware(self.gpu, count)


@dataclass(frozen=True, slots=True)
class Catalogue:
    gpus: Mapping[str, Gpu]
    systems: Mapping[str, tuple[str, int]]
    refused: Mapping[str, str]

    def parse(self, text: str) -> Hardware:
        """Read ``8xB300``, ``32xH200``, or a system's name such as ``gb300-nvl72``. Raises UserError."""
        key = text.strip()
        if key.lower() == "cpu":
            return Hardware(_this_machine(), 1)
        system = self.systems.get(key.lower())
        if system is not None:
            return Hardware(self.gpus[system[0]], system[1])
        match = re.fullmatch(r"(?:(\d+)\s*[xX×*]\s*)?([A-Za-z][\w.+-]*)", key)
        if match is None:
            raise UserError(
                f"--hardware {text!r} is not understood; write a count and a GPU (8xB300, 32xH200) or one of: "
                + ", ".join(sorted(self.systems)),
                param="hardware",
            )
        count, name = int(match.group(1) or 1), match.group(2).upper()
        self._refuse(name)
        gpu = self.gpus.get(name)
        if gpu is None:
            raise UserError(
                f"--hardware {text!r}: no GPU {match.group(2)!r} in the catalogue; known: "
                f"{', '.join(sorted(self.gpus))}, and the systems {', '.join(sorted(self.systems))}. "
                "Add your own with --hardware-file.",
                param="hardware",
            )
        if count < 1:
            raise UserError(f"--hardware {text!r}: the count must be at least 1", param="hardware")
        return _checked(Hardware(gpu, count))

    def _refuse(self, name: str) -> None:
        for known, family in self.refused.items():
            if name == known or (len(known) > 2 and name.startswith(known)):
                raise UserError(
                    f"--hardware {name}: {family} hardware is not planned for here. Its kernels, page sizes and "
                    "overheads differ and nothing has been checked on it; known GPUs: " + ", ".join(sorted(self.gpus)),
                    param="hardware",
                )


def _this_machine() -> Gpu:
    """The machine that this runs on, as a place for our own server; its rates are only an order of magnitude."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpu(CPU, 0, memory, memory, 3e10, {"bf16": 2e11}, 1e9, 1e9, 1e9, 1, 1, note="this machine")


def _checked(hardware: Hardware) -> Hardware:
    gpu = hardware.gpu
    if hardware.count > gpu.gpus_per_node and hardware.count % gpu.gpus_per_node:
        raise UserError(
            f"{hardware.name}: {gpu.name} comes in nodes of {gpu.gpus_per_node}; {hardware.count} is no multiple of it",
            param="hardware",
        )
    return hardware


MOST = 1_000_000
"""Of any figure of a GPU in its own unit."""
_SCALE = {"MiB": MIB, "GiB": GIB, "GB": 10**9, "TB/s": 10**12, "GB/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}


@lru_cache(maxsize=8)
def load_catalogue(extra: str | None = None) -> Catalogue:
    """The shipped catalogue, with the GPUs and systems of the user's file ``extra`` added or replaced."""
    data = json.loads((Path(__file__).parent / "data" / "hardware.json").read_text())
    catalogue = _catalogue(data, "hardware.json")
    if extra is None:
        return catalogue
    more = _catalogue(read_json(extra, param="hardware-file"), extra)
    gpus = {**catalogue.gpus, **more.gpus}
    systems = {**catalogue.systems, **more.systems}
    for name, (gpu, _) in systems.items():
        if gpu not in gpus:
            raise UserError(f"{extra}: system {name!r} names the unknown GPU {gpu!r}", param="hardware-file")
    refused = {k: v for k, v in catalogue.refused.items() if k not in more.gpus}
    return Catalogue(gpus, systems, refused)


def _catalogue(data: Mapping[str, Any], where: str) -> Catalogue:
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: expected a JSON object with 'gpus'", param="hardware-file")
    gpus = {name.upper(): _gpu(name.upper(), raw, where) for name, raw in _map(data, "gpus", where).items()}
    systems: dict[str, tuple[str, int]] = {}
    for name, raw in _map(data, "systems", where).items():
        try:
            systems[name.lower()] = (str(raw["gpu"]).upper(), int(raw["count"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(f"{where}: system {name!r} needs 'gpu' and 'count'", param="hardware-file") from None
    return Catalogue(gpus, systems, dict(data.get("refused", {})))


def _map(data: Any, key: str, where: str) -> Mapping[str, Any]:
    """The JSON object ``key`` of ``data``, empty where there is none."""
    found = data.get(key, {}) if isinstance(data, Mapping) else None
    if not isinstance(found, Mapping):
        raise UserError(f"{where}: {key!r} must be a JSON object", param="hardware-file")
    return found


def _gpu(name: str, raw: Mapping[str, Any], where: str) -> Gpu:
    figures: dict[str, Figure] = {}

    def read(path: str, node: Any) -> float:
        try:
            figure = Figure(float(node["value"]), str(node["unit"]), str(node["source"]))
            scale = _SCALE[figure.unit]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{where}: GPU {name!r}: {path} needs 'value' (a number), 'unit' (one of {', '.join(_SCALE)}) "
                "and 'source'",
                param="hardware-file",
            ) from None
        if not 0 < figure.value <= MOST:
            raise UserError(
                f"{where}: GPU {name!r}: {path} is {figure.value}; it must be above 0 and at most {MOST:,}", param=path
            )
        figures[path] = figure
        return figure.value * scale

    rates = {k: read(f"rates.{k}", v) for k, v in _map(raw, "rates", f"{where}: GPU {name!r}").items()}
    if "bf16" not in rates:
        raise UserError(f"{where}: GPU {name!r} needs rates.bf16", param="hardware-file")
    links = _map(raw, "links", f"{where}: GPU {name!r}")
    memory = int(read("memory", raw.get("memory")))
    nominal = raw.get("nominal_memory")
    node_link = read("links.node", links.get("node"))
    try:
        sm, per_node = int(raw["sm"]), int(raw["gpus_per_node"])
        domain = int(raw.get("nvlink_domain", per_node))
        if not all(1 <= n <= MOST for n in (sm, per_node, domain)):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"{where}: GPU {name!r} needs 'sm' and 'gpus_per_node', whole numbers from 1", param="hardware-file"
        ) from None
    return Gpu(
        name=name,
        sm=sm,
        memory_bytes=memory,
        nominal_bytes=memory if nominal is None else int(read("nominal_memory", nominal)),
        bandwidth=read("bandwidth", raw.get("bandwidth")),
        rates=rates,
        node_link=node_link,
        domain_link=read("links.domain", links["domain"]) if "domain" in links else node_link,
        network_link=read("links.network", links.get("network")),
        gpus_per_node=per_node,
        nvlink_domain=domain,
        figures=figures,
        note=str(raw.get("note", "")),
    )
