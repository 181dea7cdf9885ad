"""The memory budget of the pools on one GPU: measured at boot, assumed before it, with every term and its source.

SGLang (T): fraction · (memory before loading) − weights and load-time leftovers − multimodal buffers. k3: fraction ·
(free memory at start) − weights. vLLM: utilization · memory − weights − what its profiling run finds in use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3stack.config.hardware import GIB, MIB, Gpu
from k3stack.config.layout import SizingEngine

K3_FRACTION = 0.85
VLLM_UTILIZATION = 0.9
MM_EMBEDDING_MIB = 100
"""SGLang's cache of image embeddings (SGLANG_VLM_CACHE_SIZE_MB)."""
MM_FEATURE_MIB = 1024
"""SGLang's buffer of image features, only with a cuda_ipc or cuda_vmm transport."""


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a budget: GiB on one GPU, negative where it is taken away."""

    what: str
    gib: float
    band_gib: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What the pools may use on one GPU. ``assumed`` is False where the figure was given or measured."""

    gib: float
    terms: tuple[Term, ...]
    assumed: bool = True
    band_gib: float = 0.0

    @property
    def bytes(self) -> int:
        return int(self.gib * GIB)


def given_budget(gib: float) -> Budget:
    """A budget that the user or a boot states."""
    return Budget(gib, (Term("budget as given", gib),), assumed=False)


@lru_cache(maxsize=1)
def _data() -> Mapping[str, Any]:
    raw: Mapping[str, Any] = json.loads((Path(__file__).parent / "data" / "overheads.json").read_text())
    return raw


def total_band_gib() -> float:
    """How far an assumed budget may be off in all."""
    return float(_data()["total_band_gib"])


def overheads(
    engine: SizingEngine, *, sm: int, dcp: int = 1, drafter: bool = False, ranks: int = 1
) -> tuple[Term, ...]:
    """The overheads that apply, as positive GiB. Source: ``data/overheads.json``."""
    found: dict[str, Term] = {}
    for raw in _data()["overheads"]:
        when = raw.get("when", {})
        fits = (
            engine in raw["engines"]
            and sm >= when.get("sm_min", 0)
            and dcp >= when.get("dcp_min", 1)
            and ranks >= when.get("ranks_min", 1)
            and (drafter or not when.get("drafter", False))
        )
        if fits and raw["id"] not in found:
            found[raw["id"]] = Term(raw["what"], raw["gib"], raw["band_gib"], raw["source"])
            if raw["id"] == "before-load":
                # Kept first: the fraction applies to what is left after it.
                found = {"before-load": found["before-load"], **found}
    return tuple(found.values())


def default_fraction(
    gpu: Gpu, *, tp: int, pp: int, chunk: int, graph_batch: int, vision: bool = True, prefill_graph: bool = True
) -> float:
    """SGLang's ``--mem-fraction-static`` where none is given: (gpu − reserve) / gpu, times 0.95 for a vision model."""
    reserve_mib = 512 + 1.5 * max(chunk, 2048) + 1024 * tp * pp / 8 + 2 * graph_batch
    if prefill_graph:
        reserve_mib += 1.5 * 1024
    reserve = max(reserve_mib * MIB, 10 * GIB)
    return (gpu.memory_bytes - reserve) / gpu.memory_bytes * (0.95 if vision else 1.0)


def default_chunk_and_graph(gpu: Gpu, tp: int) -> tuple[int, int]:
    """SGLang's chunk of prompt tokens and largest captured decode batch by GPU memory."""
    gib = gpu.memory_gib
    for limit, chunk, graph, wide in (
        (20, 2048, 8, 8),
        (35, 4096, 48, 160),
        (60, 4096, 32, 160),
        (90, 8192, 256, 512),
        (160, 8192, 256, 512),
    ):
        if gib < limit:
            return chunk, wide if tp >= 4 else graph
    return 16384, 512


def assumed_budget(
    gpu: Gpu,
    engine: SizingEngine,
    *,
    weights_bytes: int,
    fraction: float,
    draft_bytes: int = 0,
    dcp: int = 1,
    drafter: bool = False,
    feature_buffer: bool = False,
    ranks: int = 1,
) -> Budget:
    """The budget from the catalogue's memory and the stated overheads. May come out negative: it does not fit then."""
    extra = overheads(engine, sm=gpu.sm, dcp=dcp, drafter=drafter, ranks=ranks)
    memory = gpu.memory_gib
    terms = [Term(f"{gpu.name} memory as the driver shows it", memory)]
    if engine == "vllm":
        held = memory * fraction
        terms.append(Term(f"kept outside by --gpu-memory-utilization {fraction:.3g}", held - memory))
    else:
        before, extra = extra[0], extra[1:]
        terms.append(Term(before.what, -before.gib, before.band_gib, before.source))
        terms.append(
            Term(f"kept outside by --mem-fraction-static {fraction:.3g}", (fraction - 1) * (memory - before.gib))
        )
    terms.append(Term("weights of the model", -weights_bytes / GIB))
    if draft_bytes:
        terms.append(Term("weights of the drafter", -draft_bytes / GIB))
    terms += [Term(t.what, -t.gib, t.band_gib, t.source) for t in extra]
    if engine == "sglang":
        mib = MM_EMBEDDING_MIB + (MM_FEATURE_MIB if feature_buffer else 0)
        terms.append(Term("multimodal buffers", -mib / 1024))
    return Budget(sum(t.gib for t in terms), tuple(terms), band_gib=total_band_gib())
