"""How long does a step take? The rank's work over the hardware's rates, with efficiencies that say where they are from.

A step's time is the sum of its parts, since a layer's parts follow one another: each part takes the longer of its
bytes over bandwidth and its operations over rate, divided by an efficiency; then come the sums over ranks, which pay a
latency each and their bytes over the slowest link, and a fixed time outside the GPU's work. ``Efficiency`` holds those
factors as data with provenance; ``floor`` is the same step with every efficiency 1 and no latency.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3stack.config.files import read_json
from k3stack.config.geometry import ModelGeometry
from k3stack.config.hardware import Hardware
from k3stack.config.layout import ParallelLayout, SizingEngine
from k3stack.errors import UserError
from k3stack.estimate.work import Precision, RankModel, RankWork, StepLoad


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Factors between work and time. Shares are of the catalogue's peak; times are seconds."""

    dense_read: float = 0.75
    """Bandwidth share reached by 16-bit weights, states and cache rows."""
    expert_read: float = 0.60
    """Bandwidth share reached by the routed experts' packed weights in small batches."""
    expert_reach: float = 1.0
    """Tokens choose experts as if uniformly among this share of them: routing is uneven, so that a batch touches fewer
    distinct experts than independent uniform choices would."""
    product: float = 0.45
    """Share of the 16-bit rate reached by prefill products."""
    expert_product: float = 0.35
    """Share of the experts' rate reached by prefill products of experts."""
    attention: float = 0.30
    """Share of the 16-bit rate reached by attention."""
    sum_s: float = 8e-6
    """Latency of one sum over the ranks."""
    decode_s: float = 5e-4
    """A decode step's time outside its parts (launches, sampling)."""
    chunk_s: float = 5e-3
    """A prefill step's time outside its parts."""
    host_s: float = 0.0
    """Time a request spends outside steps before its first token, whatever its length (HTTP, hand-over)."""
    host_token_s: float = 0.0
    """The same for each token of its prompt (templates, tokenizing, copies between processes)."""
    dcp_layer_s: float = 1.2e-5
    """Exchange of partial attention, one MLA layer of a decode step under DCP."""
    verify_spread: float = 1.0
    """How unrelated the experts of a verification's tokens are: 0, all choose alike; 1, as different requests do."""
    draft_s: float = 1e-3
    """One pass of the drafter and the longer verification's overhead."""
    error: float = 0.3
    """Relative error band of a predicted step time (stated beside every prediction)."""
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False)

    def before_s(self, prompt_tokens: int) -> float:
        """Seconds between a request's arrival and its place in the scheduler's queue."""
        return self.host_s + self.host_token_s * prompt_tokens

    def constants(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "provenance"}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step, and of its parts."""

    seconds: float
    parts: Mapping[str, float]
    floor_s: float


class StepModel:
    """Times of steps of one server: geometry, layout, hardware and efficiencies in, seconds out."""

    def __init__(
        self,
        geometry: ModelGeometry,
        layout: ParallelLayout,
        hardware: Hardware,
        efficiency: Efficiency,
        *,
        engine: SizingEngine = "k3",
        precision: Precision | None = None,
        slowest: bool = True,
        sharded_prefill: bool = False,
    ) -> None:
        self.layout, self.hardware, self.efficiency = layout, hardware, efficiency
        self._slowest = slowest
        self.stages = [
            RankModel(
                geometry,
                layout,
                engine=engine,
                precision=precision,
                stage=i,
                sharded_prefill=sharded_prefill,
            )
            for i in range(layout.pp)
        ]
        gpu = hardware.gpu
        bf16 = gpu.rates["bf16"]
        fp8 = precision.experts_fp8 if precision else False
        self._bandwidth, self._rate = gpu.bandwidth, bf16
        self._expert_rate = gpu.rates.get("fp8", bf16) if fp8 else bf16
        self._link = _slowest_link(hardware, layout)
        self._lines: dict[tuple[int, int, int], tuple[tuple[float, float], ...]] = {}

    def step(self, load: StepLoad, stage: int = 0) -> StepCost:
        """Seconds of ``load`` on pipeline stage ``stage``, its parts, and its floor."""
        e = self.efficiency
        work = self.stages[stage].work(load, slowest=self._slowest, verify_spread=e.verify_spread, reach=e.expert_reach)
        parts = self._parts(load, work, e)
        # Launches outside the parts go with the layers that a stage has.
        parts["fixed"] *= len(self.stages[stage].layers) / sum(len(m.layers) for m in self.stages)
        return StepCost(sum(parts.values()), parts, self.floor(work))

    def seconds(self, load: StepLoad) -> float:
        """Time of a step on the slowest stage (the only one without pipeline parallelism)."""
        if load.chunk_tokens:
            return max(self.step(load, i).seconds for i in range(len(self.stages)))
        lines = self.decode_lines(load.decode_rows, load.verify, load.samples)
        return max([rest + slope * load.decode_context for rest, slope in lines])

    def decode_lines(self, rows: int, verify: int = 1, samples: int | None = None) -> tuple[tuple[float, float], ...]:
        """A decode step's time is a line in its cached tokens: (seconds, seconds a token) of each stage."""
        key = (rows, verify, rows * verify if samples is None else samples)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = tuple([self._line(key, i) for i in range(len(self.stages))])
        return found

    def _line(self, key: tuple[int, int, int], stage: int) -> tuple[float, float]:
        rows, verify, samples = key
        far = 1 << 30
        near = self.step(StepLoad(decode_rows=rows, verify=verify, samples=samples), stage)
        off = self.step(StepLoad(decode_rows=rows, decode_context=far, verify=verify, samples=samples), stage)
        return near.seconds, off.parts["attention"] / far

    def floor(self, work: RankWork) -> float:
        """No step can be faster: all bytes at full bandwidth, or all operations at the full rate."""
        compute = (work.flops - work.expert_flops) / self._rate + work.expert_flops / self._expert_rate
        return max(work.bytes / self._bandwidth, compute)

    def _parts(self, load: StepLoad, work: RankWork, e: Efficiency) -> dict[str, float]:
        bw, rate = self._bandwidth, self._rate
        parts = {
            "dense": max(work.dense_bytes / (bw * e.dense_read), work.dense_flops / (rate * e.product)),
            "experts": max(
                work.expert_bytes / (bw * e.expert_read), work.expert_flops / (self._expert_rate * e.expert_product)
            ),
            "head": max(work.head_bytes / (bw * e.dense_read), work.head_flops / (rate * e.product)),
            "state": work.state_bytes / (bw * e.dense_read),
            "attention": max(work.cache_bytes / (bw * e.dense_read), work.attention_flops / (rate * e.attention)),
            "sums": self._sums(work, e),
            "fixed": (e.chunk_s if load.chunk_tokens else 0.0) + (e.decode_s if load.decode_rows else 0.0),
        }
        if self.layout.dcp > 1 and load.decode_rows:
            parts["dcp"] = e.dcp_layer_s * self.stages[0].block.cache_layers
        if load.verify > 1 and load.decode_rows:
            parts["draft"] = e.draft_s
        return parts

    def _sums(self, work: RankWork, e: Efficiency) -> float:
        if not work.sums:
            return 0.0
        n = self.layout.tp
        # Ring or two-shot: each rank sends and receives 2 (n − 1) / n of the buffer.
        return work.sums * e.sum_s + 2.0 * (n - 1) / n * work.sum_bytes / self._link

    def handon_s(self, tokens: int) -> float:
        """Hand-on between pipeline stages: the running prefix and all bank rows of every token, 16 bit."""
        geometry = self.stages[0].geometry
        rows = 1 + geometry.residual_rows
        return tokens * rows * geometry.hidden * 2 / self.layout.tp / self._link


def _slowest_link(hardware: Hardware, layout: ParallelLayout) -> float:
    """Bytes a second, one direction, of the slowest link that a sum over the tp ranks crosses, a GPU.

    Between servers a sum runs as one ring a network port, each over all ranks with its share of the bytes, so that
    the ports of a server add up.
    """
    gpu = hardware.gpu
    if layout.tp <= hardware.gpus_per_node:
        return gpu.node_link
    if layout.tp <= gpu.nvlink_domain:
        return gpu.domain_link
    return min(gpu.node_link, gpu.network_link * hardware.gpus_per_node)


@lru_cache(maxsize=1)
def _efficiencies() -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "efficiency.json").read_text())
    return data


def load_efficiency(name: str) -> Efficiency:
    """The shipped set ``name`` (see ``data/efficiency.json``), or a file that a fit wrote; each constant with its
    provenance."""
    sets = _efficiencies()["sets"]
    if name in sets:
        return parse_efficiency(sets[name], name)
    path = Path(name)
    if path.suffix != ".json":
        raise UserError(
            f"no efficiencies named {name!r}; known: {', '.join(sorted(sets))}; or give a .json file",
            param="efficiency",
        )
    return parse_efficiency(read_json(path, param="efficiency"), name)


def parse_efficiency(raw: Mapping[str, Any], where: str) -> Efficiency:
    """Build from ``{constant: {value, source}}``; unknown constants are refused by name."""
    known = {f.name for f in fields(Efficiency)} - {"provenance"}
    unknown = set(raw) - known - {"about"}
    if unknown:
        raise UserError(f"efficiencies {where}: unknown constants {sorted(unknown)}; known: {sorted(known)}")
    if not set(raw) - {"about"}:
        raise UserError(f"efficiencies {where}: no constants; known: {sorted(known)}", param="efficiency")
    try:
        values = {k: float(v["value"]) for k, v in raw.items() if k != "about"}
        sources = {k: str(v["source"]) for k, v in raw.items() if k != "about"}
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"efficiencies {where}: each constant needs 'value' and 'source' ({e!r})") from None
    return replace(Efficiency(), **values, provenance=sources)


def write_efficiency(efficiency: Efficiency, path: str | Path, about: str) -> None:
    """Write a set that ``load_efficiency`` reads. A constant without a source is a default and says so."""
    body: dict[str, Any] = {"about": about}
    for name, value in efficiency.constants().items():
        body[name] = {"value": value, "source": efficiency.provenance.get(name, "default of the step model")}
    Path(path).write_text(json.dumps(body, indent=1) + "\n")
