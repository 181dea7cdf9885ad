"""From options to a running engine core: measure, plan the pools, load, assemble, and say what came out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3stack.chat import Tokenizer, load_tokenizer
from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.config.layout import ParallelLayout
from k3stack.config.options import EngineOptions
from k3stack.engine.budget import (
    GIB,
    Cut,
    Precision,
    arena_budget,
    free_host_bytes,
    layout_of,
    pools_of,
    precision_of,
    predicted_weight_bytes,
)
from k3stack.engine.core import EngineCore, EngineSetup
from k3stack.engine.gap_check import check_gap
from k3stack.engine.process import Core
from k3stack.engine.scripted import Script, ScriptedCore
from k3stack.engine.step_log import StepLog
from k3stack.errors import CheckpointError, UserError
from k3stack.estimate.pools import PoolPlan
from k3stack.estimate.saved_plan import SavedPlan, figures, save_plan
from k3stack.estimate.work import RankModel, StepLoad
from k3stack.memory import Memory
from k3stack.scheduler import LearnedCost, PrefillFirst, SchedulerOptions, Slo, SloOptions, Target
from k3stack.scheduler.options import SglangEstimate
from k3stack.scheduler.policies.slo import LEAST_CHUNK
from k3stack.scheduler.policy import Policy

if TYPE_CHECKING:
    import torch

    from k3stack.executor.torch.executor import Network, TorchExecutor
    from k3stack.models.emulate import Emulation
    from k3stack.models.network import Model

log = logging.getLogger("k3stack.engine")

FreeMemory = Callable[[Memory], tuple[Iterable[int], Iterable[int]]]


@dataclass(slots=True)
class Engine:
    """A booted engine: the core, and what the offline API reaches past it for."""

    core: EngineCore
    model: Model
    plan: PoolPlan
    precision: Precision


def build_core(options: EngineOptions, script: Script | None) -> Core:
    """The core that ``options`` describe; with ``script`` one that needs no network."""
    if script is not None:
        return ScriptedCore(options, script)
    return boot(options).core


def boot(
    options: EngineOptions, *, progress: bool = True, poison: bool = False, free: FreeMemory | None = None
) -> Engine:
    """Load the model and assemble the engine around it, in this process.

    ``poison`` and ``free`` are for tests: see ``TorchExecutor``. Raises UserError (settings), CheckpointError
    (files) and DoesNotFit (memory).
    """
    policy = policy_of(options)
    device = resolve_device(options.device)
    options, path = _resolved(options)
    whole = load_geometry(path)
    emulation, geometry, cut = _emulated(options, whole)
    precision = _as_kernels_hold(precision_of(options, device.type), geometry, device)
    context = context_of(options, whole)
    layout = layout_of(geometry, precision)
    free_at_start = free_bytes(device)
    on_cpu = device.type == "cpu"
    guess = predicted_weight_bytes(geometry, precision, cut)
    budget, how = arena_budget(options, on_cpu=on_cpu, free_at_start=free_at_start, weight_bytes=guess)
    predicted = pools_of(options, layout, budget, context)
    model = _load(options, path, precision, device, progress, emulation)
    budget, how = arena_budget(options, on_cpu=on_cpu, free_at_start=free_at_start, weight_bytes=model.weight_bytes)
    plan = pools_of(options, layout, budget, context)
    memory = Memory(
        plan,
        prefix_cache=not options.disable_radix_cache,
        track_interval=options.mamba_track_interval,
        max_states_per_path=None if options.mamba_max_states_per_path < 0 else options.mamba_max_states_per_path,
    )
    network = _graphed(options, model, plan, context)
    asked = None if free is None else lambda: free(memory)
    executor = _executor(options, model, network, plan, precision, whole.vocab, poison, asked)
    executor.capture_graphs(progress)
    sizes = (guess, predicted), (model.weight_bytes, plan)
    setup = EngineSetup(
        vocab=whole.vocab,
        eos_ids=whole.eos_ids,
        tokenizer=tokenizer_of(options, path, whole),
        random_seed=options.random_seed,
        info=_info(options, whole, context, precision, device, emulation, sizes),
    )
    log.info("arena: %.2f GiB (%s)", budget / GIB, how)
    _report(setup.info["pools"], plan)
    if options.pool_plan_file is not None:
        saved = SavedPlan(
            options.model_path,
            str(device),
            plan,
            figures(predicted, guess, context),
            figures(plan, model.weight_bytes, context),
            how,
        )
        _save(options.pool_plan_file, saved)
    scheduling = _scheduler_options(options, plan, context)
    core = EngineCore(memory, policy, scheduling, executor, setup, _step_log(options, scheduling))
    if isinstance(policy, Slo) and (note := check_gap(core, policy, min(LEAST_CHUNK, context - 64))) is not None:
        log.warning("%s", note)
    return Engine(core, model, plan, precision)


def _resolved(options: EngineOptions) -> tuple[EngineOptions, Path]:
    """The options with the built-in model's needs, and the folder of the checkpoint."""
    from k3stack.models.builtin import resolve

    found = resolve(options.model_path)
    if found.note is not None:
        log.warning("%s", found.note)
    if found.load_format is not None:
        options = dataclasses.replace(options, load_format=found.load_format)
    return options, Path(found.path)


def _emulated(options: EngineOptions, whole: ModelGeometry) -> tuple[Emulation | None, ModelGeometry, Cut | None]:
    """What of the model lies here where one rank of a layout runs alone."""
    if options.emulate_rank is None:
        return None, whole, None
    from k3stack.models.emulate import Emulation
    from k3stack.models.share import rank_share

    layout = ParallelLayout(tp=options.tp_size, ep=options.ep_size)
    geometry, share = rank_share(whole, layout, options.emulate_rank)
    log.warning(
        "rank %d of %s runs alone with random weights: answers mean nothing, exchanges are left out and counted",
        options.emulate_rank,
        layout.label,
    )
    emulation = Emulation(layout, options.emulate_rank, options.emulate_routing, options.max_running_requests)
    return emulation, geometry, Cut(len(share.experts(whole.moe.experts)), share.tp)


def _save(path: str, saved: SavedPlan) -> None:
    try:
        save_plan(path, saved)
    except OSError as e:
        # A server is worth more than its record: a folder that cannot be written does not end a boot.
        log.warning("the pool plan could not be written to %s: %s", path, e.strerror or e)
    else:
        log.info("pool plan saved to %s (k3 plan --from %s)", path, path)


def _step_log(options: EngineOptions, scheduling: SchedulerOptions) -> StepLog | None:
    if options.step_log is None:
        return None
    about = {"model": options.model_path, "context": scheduling.context, "chunk_tokens": scheduling.chunk_tokens}
    return StepLog(options.step_log, scheduling.max_running, about)


def policy_of(options: EngineOptions) -> Policy:
    """The step policy by its name."""
    if options.policy == "slo":
        # No figures of this machine are assumed: the cost of steps is learned from the first ones on.
        gap = None if options.max_gap_ms is None else options.max_gap_ms / 1000
        return Slo(LearnedCost(), SloOptions(max_gap_s=gap))
    return PrefillFirst(mixed=options.enable_mixed_chunk)


def resolve_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one. UserError when a GPU is asked for and there is none."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UserError(f"--device is {name}, but torch finds no GPU here; use cpu", param="--device")
        index = int(name.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise UserError(f"--device is {name}; GPUs here: {torch.cuda.device_count()}", param="--device")
        return torch.device("cuda", index)
    return torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    """Free memory of the device now."""
    if device.type == "cpu":
        return free_host_bytes()
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _as_kernels_hold(precision: Precision, geometry: ModelGeometry, device: torch.device) -> Precision:
    """The precision with what the kernels that will be chosen keep as stored; says which they are."""
    from k3stack.kernels.select import select_kernels
    from k3stack.models.load import parse_dtype

    kernels = select_kernels(device, parse_dtype(precision.compute), geometry)
    log.info("kernels: %s (%s)", kernels.name, kernels.why)
    return dataclasses.replace(precision, as_stored=kernels.stacked_experts)


def context_of(options: EngineOptions, geometry: ModelGeometry) -> int:
    """Longest prompt and output of a request. More than the model's is allowed, and said: nothing here has positions
    that could run out, but the model was not trained for it."""
    context = options.context_length or geometry.context
    if context > geometry.context:
        log.warning("--context-length %s is more than the %s of the model's config", context, geometry.context)
    return context


def tokenizer_of(options: EngineOptions, path: Path, geometry: ModelGeometry) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where its vocabulary has no place for one (it works on ids alone)."""
    if options.tokenizer_path is not None:
        return load_tokenizer(options.tokenizer_path, geometry)
    if not (path / "tiktoken.model").exists():
        try:
            return load_tokenizer(path, geometry)
        except CheckpointError as error:
            log.info("no tokenizer, ids only: %s", error)
            return None
    return load_tokenizer(path, geometry)


def _load(
    options: EngineOptions,
    path: Path,
    precision: Precision,
    device: torch.device,
    progress: bool,
    emulation: Emulation | None,
) -> Model:
    from k3stack.models.load import load_model

    return load_model(
        path,
        dtype=precision.compute,
        device=device,
        load_format=options.load_format if emulation is None else "dummy",
        emulation=emulation,
        latent_norm_eps=options.latent_norm_eps,
        progress=progress,
    )


def _graphed(options: EngineOptions, model: Model, plan: PoolPlan, context: int) -> Network:
    """The model, behind CUDA graphs where they serve it."""
    if model.device.type != "cuda" and options.cuda_graph_max_bs is not None:
        raise UserError(f"--cuda-graph-max-bs is for GPUs; the model is on {model.device}", param="--cuda-graph-max-bs")
    if model.device.type != "cuda" or options.disable_cuda_graph or not model.kernels.device_tables:
        return model
    from k3stack.executor.torch.graphs import GraphedModel

    most = min(plan.max_running, options.cuda_graph_max_bs or plan.max_running)
    return GraphedModel(model, max(most, 1), context, plan.layout.page_tokens)


def _executor(
    options: EngineOptions,
    model: Model,
    network: Network,
    plan: PoolPlan,
    precision: Precision,
    vocab: int,
    poison: bool,
    free: Callable[[], tuple[Iterable[int], Iterable[int]]] | None,
) -> TorchExecutor:
    from k3stack.executor.torch.executor import TorchExecutor
    from k3stack.models.views import ArenaViews, cache_dtypes

    state, window, row = cache_dtypes(model.dtype, precision.state, precision.row)

    def views_of(buffer: torch.Tensor) -> ArenaViews:
        return ArenaViews(buffer, plan.layout, model.geometry, state_dtype=state, window_dtype=window, row_dtype=row)

    return TorchExecutor(
        network,
        plan,
        views_of,
        vocab=vocab,
        device=model.device,
        max_in_flight=1 if options.disable_overlap_schedule else 2,
        poison=poison,
        free=free,
    )


def _scheduler_options(options: EngineOptions, plan: PoolPlan, context: int) -> SchedulerOptions:
    chunk = options.chunked_prefill_size
    fields: dict[str, Any] = {
        "context": context,
        "max_running": plan.max_running,
        "chunk_tokens": context if chunk < 0 else chunk,
        "max_queued": max(options.max_queued_requests, 1),
        "target": Target(options.target_ttft_s, options.target_tpot_ms / 1000) if options.policy == "slo" else None,
    }
    if options.engine != "sglang":
        return SchedulerOptions(**fields)
    estimate = SglangEstimate(finish_order=options.disable_radix_cache)
    return SchedulerOptions.for_sglang(estimate=estimate, **fields)


def _info(
    options: EngineOptions,
    geometry: ModelGeometry,
    context: int,
    precision: Precision,
    device: torch.device,
    emulation: Emulation | None,
    sizes: tuple[tuple[int, PoolPlan], tuple[int, PoolPlan]],
) -> dict[str, Any]:
    predicted, actual = sizes
    return {
        "executor": "torch",
        "engine": options.engine,
        "policy": options.policy,
        "family": geometry.family,
        "vocab": geometry.vocab,
        "eos_ids": list(geometry.eos_ids),
        "layers": geometry.layers,
        "context": context,
        "device": str(device),
        "dtype": precision.compute,
        "state_dtype": precision.state,
        "kv_cache_dtype": precision.row,
        "chunk_tokens": options.chunked_prefill_size,
        "max_running": actual[1].max_running,
        "max_queued": options.max_queued_requests,
        "pools": {"predicted": _pools(*predicted), "actual": _pools(*actual)},
        "emulated": None if emulation is None else _exchanges(emulation, geometry),
    }


def _exchanges(emulation: Emulation, geometry: ModelGeometry) -> dict[str, Any]:
    """What an emulated rank would exchange: sums a step, and their bytes a token."""
    work = RankModel(geometry, emulation.layout).work(StepLoad(decode_rows=1, decode_context=1, samples=1))
    return {
        "rank": emulation.rank,
        "layout": emulation.layout.label,
        "sums": work.sums,
        "bytes_a_token": work.sum_bytes,
    }


def _pools(weight_bytes: int, plan: PoolPlan) -> dict[str, int]:
    return {
        "weight_bytes": weight_bytes,
        "arena_bytes": plan.arena_bytes,
        "blocks": plan.blocks,
        "block_bytes": plan.layout.block_bytes,
        "states_alone": plan.states_alone,
        "tokens_alone": plan.tokens_alone,
    }


def _report(pools: dict[str, dict[str, int]], plan: PoolPlan) -> None:
    """Predicted beside actual, and what the plan has to say."""
    before, after = pools["predicted"], pools["actual"]
    for name in ("weight_bytes", "arena_bytes", "blocks", "states_alone", "tokens_alone"):
        log.info("%-14s predicted %16s   actual %16s", name, f"{before[name]:,}", f"{after[name]:,}")
    for note in plan.notes:
        log.info("pools: %s", note)
