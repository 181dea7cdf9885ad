"""From flags to a setup: layout, precisions, limits and the server's settings, with every default made explicit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3stack.config.drafter import Drafter, drafter
from k3stack.config.geometry import ModelGeometry
from k3stack.config.hardware import CPU, GIB, Hardware
from k3stack.config.layout import ParallelLayout, SizingEngine
from k3stack.config.models import K3, OTHER_WEIGHTS, model_geometry
from k3stack.errors import UserError
from k3stack.estimate.budget import K3_FRACTION, VLLM_UTILIZATION, default_chunk_and_graph, default_fraction
from k3stack.estimate.sglang import DEFAULT_RATIO, DEFAULT_VERSION, Role, SglangSettings
from k3stack.estimate.weights import weight_table
from k3stack.planner.command import Command
from k3stack.planner.own import OwnBoot, own_boot

ROW_ITEMSIZE: Mapping[str, float] = {
    "auto": 2, "bf16": 2, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "fp8_ds_mla": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "fp4_mx_block16": 0.5 + 1 / 16, "float32": 4,
}  # fmt: skip
"""Bytes of one value in the cache by ``--kv-cache-dtype``; block formats with their scales."""
STATE_ITEMSIZE: Mapping[str, int] = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of one value of the recurrent state by ``--mamba-ssm-dtype``."""
REPLAY_LENGTH = 16
FORCES_EP = ("megamoe", "flashinfer_megamoe")


@dataclass(frozen=True)
class Setup:
    """Everything a plan depends on."""

    engine: SizingEngine
    model: str
    geometry: ModelGeometry
    hardware: Hardware
    layout: ParallelLayout
    state_itemsize: int = 4
    row_itemsize: float = 2
    draft_itemsize: float = 2
    fraction: float = K3_FRACTION
    fraction_given: bool = False
    settings: SglangSettings = field(default_factory=SglangSettings)
    """Limits and roles; for engines other than SGLang only those that they share."""
    drafter: Drafter | None = None
    ring_length: int = REPLAY_LENGTH
    chunk: int = 2048
    graph_batch: int = 256
    max_running: int | None = None
    context: int = 1_048_576
    feature_buffer: bool = False
    own: OwnBoot | None = None
    """Our own server on one device: what its boot will compute."""
    behaviour: str = "k3"
    """For engine k3: ``sglang`` where ``--engine sglang`` asks for that server's split on our code."""
    budget_gib: float | None = None
    command: Command | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def role(self) -> Role:
        return self.settings.role

    @property
    def gpus_used(self) -> int:
        return self.layout.total_gpus


def refuse_other_weights(model: str, quantization: str | None, tp: int) -> None:
    """Raise UserError by name for re-quantised weights, with the figure that a plan of them would need."""
    kind = OTHER_WEIGHTS.get(model.lower())
    if kind is None and "nvfp4" not in model.lower() and str(quantization) not in ("modelopt_fp4", "nvfp4", "fp8"):
        return
    kind = kind or ("FP8" if str(quantization) == "fp8" else "NVFP4")
    routed = weight_table(model_geometry(K3)).totals()["routed_experts"] / GIB
    if kind == "NVFP4":
        scaled = routed * 4.5 / 4.25
        guess = (
            f" At 4.5 bits a weight (one scale byte for 16) the routed experts alone would be {scaled:,.0f} GiB "
            f"instead of {routed:,.0f}: {(scaled - routed) / tp:.1f} GiB more on each of {tp} GPUs; published "
            "boots of 8 B300 had 2.9 GiB less for their pools than with MXFP4."
        )
    else:
        guess = ""
    raise UserError(
        f"weights {model!r} are {kind}: not planned for, since the bytes of that checkpoint are not known here. What "
        "is needed: the bytes of each kind of tensor (metadata.total_size of its safetensors index, and its shapes)."
        f"{guess} With --budget-gib and --model-path {K3} the pools alone can be planned.",
        param="--model-path",
    )


def build_setup(
    command: Command,
    hardware: Hardware,
    *,
    model: str | None = None,
    budget_gib: float | None = None,
    version: tuple[int, int, int] = DEFAULT_VERSION,
) -> Setup:
    """The setup that ``command`` asks for on ``hardware``. Raises UserError for what is no legal combination."""
    flags = command.flags
    name = str(flags.get("model") or model or K3)
    if command.engine == "k3" and (hardware.gpu.name == CPU or hardware.count == 1):
        return _own_setup(command, hardware, name, budget_gib)
    if hardware.gpu.name == CPU:
        raise UserError(f"--hardware cpu is for k3 serve; {command.engine} is planned on GPUs", param="--hardware")
    layout = _vllm_layout(flags) if command.engine == "vllm" else _sglang_layout(flags)
    refuse_other_weights(name, flags.get("quantization"), layout.tp)
    geometry = model_geometry(name)
    common: dict[str, Any] = {
        "engine": command.engine,
        "model": name,
        "geometry": geometry,
        "hardware": hardware,
        "layout": layout,
        "row_itemsize": _lookup(ROW_ITEMSIZE, flags.get("kv_dtype", "auto"), "--kv-cache-dtype"),
        "state_itemsize": _lookup(STATE_ITEMSIZE, flags.get("ssm_dtype", "auto"), "--mamba-ssm-dtype"),
        "budget_gib": flags.get("arena_gib", budget_gib) if budget_gib is None else budget_gib,
        "command": command,
        "flags": flags,
        "env": command.env,
        "context": flags.get("context_length") or geometry.context,
        "max_running": flags.get("max_running"),
    }
    chunk, graph = default_chunk_and_graph(hardware.gpu, layout.tp)
    chunk = flags.get("chunk") or (chunk // layout.dp if command.engine == "sglang" else chunk)
    common["chunk"] = chunk
    common["graph_batch"] = flags.get("graph_max_bs") or max(flags.get("graph_bs") or [graph])
    if command.engine == "vllm":
        return _vllm_setup(common, flags)
    return _sglang_setup(common, flags, command, version)


def _own_setup(command: Command, hardware: Hardware, name: str, budget_gib: float | None) -> Setup:
    """k3 serve on one device: its own options, and the functions of its boot."""
    own = own_boot(command.serve_words, name, hardware, budget_gib)
    options = own.options
    split = options.engine == "sglang"
    settings = SglangSettings(
        overlap=not options.disable_overlap_schedule,
        radix_cache=not options.disable_radix_cache,
        max_running=options.max_running_requests,
        context=own.context,
    )
    return Setup(
        engine="k3",
        model=options.model_path,
        geometry=own.geometry,
        hardware=hardware,
        layout=ParallelLayout(),
        row_itemsize=own.layout.row_bytes / own.geometry.mla.row_width,
        fraction=options.mem_fraction_static or K3_FRACTION,
        settings=settings,
        chunk=options.chunked_prefill_size,
        max_running=options.max_running_requests,
        context=own.context,
        own=own,
        behaviour="sglang" if split else "k3",
        command=command,
        flags=command.flags,
        env=command.env,
    )


def _lookup(table: Mapping[str, Any], value: Any, flag: str) -> Any:
    if str(value) not in table:
        raise UserError(f"{flag} is {value!r}; known: {', '.join(table)}", param=flag)
    return table[str(value)]


def _sglang_layout(flags: Mapping[str, Any]) -> ParallelLayout:
    tp, a2a = flags.get("tp", 1), str(flags.get("a2a", "none"))
    dp = flags.get("dp", 1)
    attention = flags.get("attn_dp", dp if flags.get("dp_attention") else 1)
    ep = tp if a2a in FORCES_EP else flags.get("ep", 1)
    return ParallelLayout(
        tp=tp,
        pp=flags.get("pp", 1),
        ep=ep,
        dp=attention,
        dcp=flags.get("dcp", 1),
        dp_lm_head=bool(flags.get("dp_lm_head")),
        a2a=a2a,
        dense_attn_tp=bool(flags.get("dense_attn_tp")),
        shared_attn_tp=bool(flags.get("shared_attn_tp")),
        shared_tp=flags.get("shared_tp"),
        replicas=dp if not flags.get("dp_attention") and "attn_dp" not in flags else 1,
    )


def _vllm_layout(flags: Mapping[str, Any]) -> ParallelLayout:
    """vLLM's data parallelism inside one copy: attention on ``tp`` ranks, experts over all ``tp · dp``."""
    tp, dp = flags.get("tp", 1), flags.get("dp", 1)
    return ParallelLayout(
        tp=tp * dp,
        pp=flags.get("pp", 1),
        ep=tp * dp if flags.get("expert_parallel") else 1,
        dp=dp,
        dcp=flags.get("dcp", 1),
        dp_lm_head=True,
        a2a="none",
        dense_attn_tp=True,
        shared_attn_tp=True,
    )


def _vllm_setup(common: dict[str, Any], flags: Mapping[str, Any]) -> Setup:
    fraction = flags.get("fraction", VLLM_UTILIZATION)
    _check_fraction(fraction, "--gpu-memory-utilization")
    spec = flags.get("speculative") or {}
    if not isinstance(spec, Mapping):
        raise UserError("--speculative-config must be a JSON object", param="--speculative-config")
    draft = None
    if spec:
        # vLLM's own DSPARK checkpoints are MLA drafters; their cache rows are sized by the same public shape.
        method = str(spec.get("method", "dspark"))
        draft = drafter(
            "DFLASH" if method.lower() == "dflash" else "DSPARK",
            block=spec.get("num_speculative_tokens"),
            path=spec.get("model"),
        )
    settings = SglangSettings(
        radix_cache=not flags.get("no_prefix_cache", False),
        max_running=common["max_running"],
        context=common["context"],
        attention_dp=common["layout"].dp,
        draft_tokens=draft.verify_width if draft else 0,
    )
    return Setup(
        **common, fraction=fraction, fraction_given="fraction" in flags, settings=settings, drafter=draft,
    )  # fmt: skip


def _check_fraction(value: float, flag: str) -> None:
    if not 0 < value <= 1:
        raise UserError(f"{flag} is {value}; it must be above 0 and at most 1", param=flag)


def _sglang_setup(
    common: dict[str, Any], flags: Mapping[str, Any], command: Command, version: tuple[int, int, int]
) -> Setup:
    layout, hardware = common["layout"], common["hardware"]
    draft = _drafter(flags)
    role = _role(flags)
    if "fraction" in flags:
        fraction = flags["fraction"]
        _check_fraction(fraction, "--mem-fraction-static")
    elif command.engine == "k3":
        fraction = K3_FRACTION
    else:
        fraction = default_fraction(
            hardware.gpu, tp=layout.tp, pp=layout.pp, chunk=common["chunk"], graph_batch=common["graph_batch"]
        )
    ring_length = flags.get("ring_length", REPLAY_LENGTH)
    if draft and flags.get("replay") and (ring_length & (ring_length - 1) or ring_length < 2 * draft.verify_width):
        raise UserError(
            f"--linear-replayssm-cache-len is {ring_length}; it must be a power of two and at least "
            f"{2 * draft.verify_width} (twice the {draft.verify_width} tokens of a verification)",
            param="--linear-replayssm-cache-len",
        )
    settings = _settings(common, flags, command.env, draft, role, version)
    draft_itemsize = _lookup(ROW_ITEMSIZE, flags.get("draft_kv_dtype", "auto"), "--speculative-draft-kv-cache-dtype")
    return Setup(
        **common,
        fraction=fraction,
        fraction_given="fraction" in flags,
        settings=settings,
        drafter=draft,
        draft_itemsize=draft_itemsize,
        ring_length=ring_length,
        feature_buffer=_feature_buffer(flags, hardware, layout),
        behaviour=str(flags.get("engine_behaviour", "k3")),
    )


def _settings(
    common: Mapping[str, Any],
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    draft: Drafter | None,
    role: Role,
    version: tuple[int, int, int],
) -> SglangSettings:
    strategy = str(flags.get("strategy", "auto"))
    if strategy not in ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"):
        raise UserError(
            f"--mamba-radix-cache-strategy is {strategy!r}; known: auto, no_buffer, extra_buffer, extra_buffer_lazy",
            param="--mamba-radix-cache-strategy",
        )
    return SglangSettings(
        ratio=flags.get("ratio", DEFAULT_RATIO),
        strategy=strategy,  # type: ignore[arg-type]
        overlap=not flags.get("no_overlap", False),
        radix_cache=not flags.get("no_radix", False),
        decode_radix=bool(flags.get("decode_radix", False)),
        skip_decode_lock=env.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "0").lower() in ("1", "true", "yes"),
        role=role,
        max_mamba_cache_size=flags.get("max_mamba_cache_size"),
        max_running=common["max_running"],
        max_total_tokens=flags.get("max_total_tokens"),
        context=common["context"],
        attention_dp=common["layout"].dp,
        draft_tokens=draft.verify_width if draft else 0,
        replay=bool(flags.get("replay", False)),
        extra_slots=flags.get("extra_slots", 0) or 0,
        version=version,
    )


def _role(flags: Mapping[str, Any]) -> Role:
    role = str(flags.get("role", "null"))
    roles: Mapping[str, Role] = {"null": "unified", "prefill": "prefill", "decode": "decode"}
    if role not in roles:
        raise UserError(
            f"--disaggregation-mode is {role!r}; known: null, prefill, decode", param="--disaggregation-mode"
        )
    return roles[role]


def _drafter(flags: Mapping[str, Any]) -> Drafter | None:
    algorithm = flags.get("algorithm")
    if algorithm is None:
        return None
    block = flags.get("block_dspark") if str(algorithm).upper() == "DSPARK" else flags.get("block_dflash")
    return drafter(str(algorithm), block=block, path=flags.get("draft_model"))


def _feature_buffer(flags: Mapping[str, Any], hardware: Hardware, layout: ParallelLayout) -> bool:
    """Whether image features get a buffer on the GPU: asked for, or several GB200 or GB300 nodes (cuda_vmm there)."""
    transport = flags.get("mm_transport")
    if transport is not None:
        return str(transport) in ("cuda_ipc", "cuda_vmm")
    return hardware.gpu.nvlink_domain > hardware.gpu.gpus_per_node and layout.gpus > hardware.gpu.gpus_per_node


def budget_floor_bytes(setup: Setup, slot: int, cell: int, per_request: int, page_rows: int) -> float:
    """The least budget under which one request would run, for messages and ``missing_gib``."""
    if setup.engine == "sglang":
        ratio = setup.settings.ratio
        return max((per_request + 1) * slot * (1 + ratio) / ratio, (per_request + 1) * slot + page_rows * cell)
    return slot + page_rows * cell


__all__ = ["Setup", "budget_floor_bytes", "build_setup", "refuse_other_weights"]
