"""Scenarios: which servers, on which hardware, with which pools and costs. Shipped ones are data; users add files."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec

from k3stack.config.files import read_json
from k3stack.errors import UserError
from k3stack.estimate.measured import MeasuredCost

MAX_BUDGET_GIB = 10_000
"""Of one GPU's memory for states and cache."""
Role = Literal["unified", "prefill", "decode"]


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallel sizes of one server."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    dcp: int = 1
    a2a: str = "none"


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory for states and cache on one GPU, and how behaviour ``sglang`` splits it."""

    budget_gib: float = 0.0
    budget_source: str = ""
    ratio: float = 0.9
    strategy: str = "auto"
    max_running: int | None = None
    extra_slots: int = 0
    saved_plan: str | None = None
    """The pools that a real server saved at its boot (``pool_plan.json``), instead of a budget; a path beside the
    scenario's file."""


class DrafterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drafter as its mean accept length."""

    accept_length: float
    block: int = 7
    source: str = ""


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``servers`` equal servers of one role."""

    role: Role = "unified"
    servers: int = 1
    layout: LayoutSpec
    pools: PoolSpec
    chunk_tokens: int = 16384
    row_bytes: int = 2
    state_bytes: int = 4
    experts_fp8: bool = True
    sharded_prefill: bool = False
    drafter: DrafterSpec | None = None
    efficiency: str | None = None
    """Constants of the step model: a shipped set or a file."""
    cost: MeasuredCost | None = None
    """Step times measured on a server (``k3 simulate --fit-steps``), instead of ``efficiency``."""
    context: int | None = None
    """Longest prompt and output; default: the model's."""
    starts_s: float = 0.0
    """Seconds until these servers are up (scaling questions); 0: from the start."""

    @property
    def gpus(self) -> int:
        return self.layout.tp * self.layout.pp


class TransferSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between prefill and decode servers."""

    link_gbps: float
    latency_ms: float = 5.0
    source: str = ""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment to simulate."""

    name: str
    about: str
    hardware: str
    model: str = "kimi-k3"
    servers: list[ServerSpec]
    router: str = "cache_aware"
    transfer: TransferSpec | None = None

    @property
    def gpus(self) -> int:
        return sum(s.servers * s.gpus for s in self.servers)

    def validate(self) -> Scenario:
        """Refuse what cannot be built; returns self."""
        roles = {s.role for s in self.servers}
        if roles not in ({"unified"}, {"prefill", "decode"}):
            raise UserError(
                f"scenario {self.name}: servers are {sorted(roles)}; either all unified, or prefill and decode together"
            )
        for s in self.servers:
            for name in ("tp", "pp", "ep", "dp", "dcp"):
                if getattr(s.layout, name) < 1:
                    raise UserError(f"scenario {self.name}: {name} is {getattr(s.layout, name)}; it must be from 1")
            if not 0 <= s.pools.budget_gib <= MAX_BUDGET_GIB:
                raise UserError(
                    f"scenario {self.name}: budget_gib is {s.pools.budget_gib:g}; "
                    f"it must be from 0 to {MAX_BUDGET_GIB:,}"
                )
            if (s.efficiency is None) == (s.cost is None):
                raise UserError(f"scenario {self.name}: a server needs either 'efficiency' or 'cost'")
            if s.cost is not None and s.drafter is not None:
                raise UserError(f"scenario {self.name}: a measured 'cost' does not know a 'drafter'")
            if (s.pools.budget_gib > 0) == (s.pools.saved_plan is not None):
                raise UserError(f"scenario {self.name}: pools need either 'budget_gib' or 'saved_plan'")
        if "prefill" in roles and self.transfer is None:
            raise UserError(f"scenario {self.name}: prefill and decode servers need a 'transfer'")
        return self


def load_scenario(name: str) -> Scenario:
    """A shipped scenario by name, or a file (JSON, one object)."""
    shipped = _shipped()
    if name in shipped:
        return _parse(shipped[name], name)
    path = Path(name)
    if path.suffix == ".json" or path.is_file():
        return _beside(_parse(read_json(path, param="scenario"), str(path)), path.parent)
    raise UserError(
        f"no scenario named {name!r}; shipped: {', '.join(shipped)}; or give a .json file", param="scenario"
    )


def _beside(scenario: Scenario, folder: Path) -> Scenario:
    """``scenario`` with its files' paths made those of ``folder``."""
    servers = []
    for server in scenario.servers:
        if server.pools.saved_plan is not None:
            pools = msgspec.structs.replace(server.pools, saved_plan=str(folder / server.pools.saved_plan))
            server = msgspec.structs.replace(server, pools=pools)
        servers.append(server)
    return msgspec.structs.replace(scenario, servers=servers)


def scenario_names() -> list[str]:
    return list(_shipped())


def _shipped() -> dict[str, Any]:
    text = files("k3stack.simulator").joinpath("data/scenarios.json").read_text()
    return {s["name"]: s for s in json.loads(text)["scenarios"]}


def _parse(raw: Any, where: str) -> Scenario:
    try:
        return msgspec.convert(raw, Scenario).validate()
    except msgspec.ValidationError as e:
        raise UserError(f"scenario {where}: {e}", param="scenario") from None
