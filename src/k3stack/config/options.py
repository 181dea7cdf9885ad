"""The one table of engine and server options: each field below is one row of it.

A field's annotation, default and ``option(...)`` give the Python argument, the command-line flag, its help, its
place in the documentation and its validation. ``config.flags`` reads the same rows from a command line;
``config.flag_names`` holds the flags of other servers that are aliases here or that are refused by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from k3stack.errors import UserError

DEFAULT_MEM_FRACTION = 0.85
"""Share of a GPU's memory for weights and arena when neither --mem-fraction-static nor --arena-gib is given."""
ONE_GPU = (
    "this version serves on one GPU or CPU; `k3 plan` and `k3 simulate` take larger layouts, "
    "and several servers can stand behind a router"
)
DEFAULT_CPU_ARENA_GIB = 1.0
"""Size of the arena on a CPU when --arena-gib is not given."""


@dataclass(frozen=True, slots=True)
class OptionRow:
    """What the table knows of an option besides its name, type and default."""

    doc: str
    group: str
    flag: str | None = None
    """Where the flag is not the field's name with dashes."""
    short: tuple[str, ...] = ()
    """Further spellings of the same flag (SGLang's own short forms)."""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    also: tuple[float, ...] = ()
    """Values allowed outside the bounds, such as -1 for 'off'."""
    env: str | None = None
    """Environment variable that is read where the flag is absent (secrets only: they must not show in `ps`)."""


def option(default: Any, doc: str, group: str, **row: Any) -> Any:
    """A dataclass field that is a row of the table; ``default`` may be ``dataclasses.MISSING`` for a required one."""
    return dataclasses.field(default=default, metadata={"option": OptionRow(doc, group, **row)})


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table, resolved: what flags, help and documentation are made from."""

    name: str
    kind: type
    optional: bool
    repeated: bool
    default: Any
    row: OptionRow

    @property
    def flag(self) -> str:
        return self.row.flag or "--" + self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        row = self.row
        if row.choices:
            return ", ".join(row.choices)
        bounds = []
        if row.above is not None:
            bounds.append(f"above {row.above:g}")
        if row.low is not None:
            bounds.append(f"from {row.low:g}")
        if row.high is not None:
            bounds.append(f"to {row.high:g}")
        text = " ".join(bounds)
        return text + (" or " + ", ".join(f"{v:g}" for v in row.also) if row.also and text else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the engine runs and how. Frozen; an impossible value or combination raises UserError naming the flag."""

    model_path: str = option(
        dataclasses.MISSING,
        "Folder of a checkpoint in Kimi-K3's or Kimi-Linear's official layout, or `nano`, the built-in model. "
        "With `--load-format dummy` a folder with a config.json is enough.",
        "Model",
        short=("--model",),
    )
    tokenizer_path: str | None = option(
        None, "Folder with the tokenizer's tiktoken.model, where it is not the checkpoint's.", "Model"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "`dummy` fills the weights with small random values instead of reading them.", "Model"
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = option(
        "auto", "Compute precision; `auto`: bfloat16 on a GPU, float32 on a CPU.", "Model"
    )
    device: str = option("auto", "`cpu`, `cuda` or `cuda:N`; `auto`: a GPU if there is one.", "Model")
    disable_cuda_graph: bool = option(
        False, "Launch every kernel of a decode step by itself instead of replaying a captured graph (GPUs).", "Model"
    )
    cuda_graph_max_bs: int | None = option(
        None, "Largest decode batch that is captured as a CUDA graph; default: all up to 256 rows.", "Model", low=1
    )
    emulate_rank: int | None = option(
        None,
        "Run this rank of the layout --tp-size, --ep-size alone, to measure it: its share of the model with random "
        "weights, real kernels, exchanges left out and counted. Answers mean nothing, durations do.",
        "Model",
        low=0,
    )
    tp_size: int = option(1, "Ranks of the layout; other than 1 only with --emulate-rank.", "Model", low=1)
    ep_size: int = option(1, "Ranks that share out the experts; as --tp-size.", "Model", low=1)
    emulate_routing: Literal["mean", "slowest"] = option(
        "mean",
        "Experts chosen for an emulated rank: drawn uniformly, or so that of a full batch's it has most.",
        "Model",
    )
    latent_norm_eps: float = option(
        1e-6, "Epsilon of the norm on MLA's latents. SGLang reads it as 1e-5.", "Model", above=0.0, high=1.0
    )
    context_length: int | None = option(
        None, "Longest prompt and output of a request, in tokens; default: the model's.", "Model", low=1
    )

    mem_fraction_static: float | None = option(
        None,
        f"Share of the GPU's free memory at start for weights and arena together; default {DEFAULT_MEM_FRACTION}.",
        "Memory",
        above=0.0,
        high=1.0,
    )
    arena_gib: float | None = option(
        None,
        "Size of the arena (states and cache) in GiB, instead of a fraction; "
        f"on a CPU {DEFAULT_CPU_ARENA_GIB:g} if not given.",
        "Memory",
        above=0.0,
    )
    max_total_tokens: int | None = option(None, "Upper bound on tokens in the cache.", "Memory", low=64)
    engine: Literal["k3", "sglang"] = option(
        "k3",
        "`k3`: one arena whose blocks serve states and cache alike. `sglang`: that server's fixed split, reserved "
        "slots and admission rules, on the same code.",
        "Memory",
    )
    mamba_full_memory_ratio: float | None = option(
        None,
        "State bytes to cache bytes, as a fixed split. Default: none with engine k3, 0.9 with engine sglang.",
        "Memory",
        above=0.0,
    )
    max_mamba_cache_size: int | None = option(
        None, "At most this many states (running and snapshots), instead of the ratio.", "Memory", low=1
    )
    mamba_ssm_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Precision of the recurrent state; `auto`: float32 (float64 where everything is computed so).",
        "Memory",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3"] = option(
        "auto",
        "Precision of the cache rows; `auto`: the compute precision. fp8_e4m3 (scale 1) has half of bfloat16's bytes.",
        "Memory",
    )
    pool_plan_file: str | None = option(
        None,
        "Write the pools of the boot, predicted and actual, to this file (JSON) for `k3 plan --from`. "
        "`k3 serve` without it: k3stack/pool_plan.json in the cache folder.",
        "Memory",
    )
    disable_radix_cache: bool = option(False, "Keep nothing of a request for later ones.", "Memory")
    mamba_track_interval: int = option(
        256, "While a request decodes, keep a snapshot of its state every so many tokens.", "Memory", low=64
    )
    mamba_max_states_per_path: int = option(
        -1, "At most so many snapshots along one path of the prefix tree; -1: no limit.", "Memory", low=1, also=(-1,)
    )

    policy: Literal["prefill-first", "slo"] = option(
        "prefill-first", "How a step is planned: waiting prompts first, or by targets.", "Scheduling"
    )
    target_ttft_s: float = option(
        2.0, "Policy slo: seconds from arrival within which a first token is due.", "Scheduling", above=0.0
    )
    target_tpot_ms: float = option(
        25.0, "Policy slo: milliseconds a token may take on average after the first.", "Scheduling", above=0.0
    )
    max_gap_ms: float | None = option(
        None,
        "Policy slo: bound on the time between two tokens of a stream that a prompt's chunk may cause; chunks are cut "
        "to keep it. Default: none.",
        "Scheduling",
        above=0.0,
    )
    max_running_requests: int = option(
        256, "At most so many requests computed at the same time.", "Scheduling", low=1, high=65_536
    )
    max_queued_requests: int = option(
        1024, "A request that finds so many waiting is answered 429 and told when to retry.", "Scheduling", low=0
    )
    chunked_prefill_size: int = option(
        2048, "Prompt tokens computed in one step; -1: the whole prompt.", "Scheduling", low=1, also=(-1,)
    )
    enable_mixed_chunk: bool = option(
        False, "Let streams decode in the same step as a chunk of prompts (policy prefill-first).", "Scheduling"
    )
    disable_overlap_schedule: bool = option(
        False, "Plan a step only when the one before has returned (slower; for debugging).", "Scheduling"
    )
    step_log: str | None = option(
        None,
        "Write one line of JSON for every step to this file: what it computed and how long it took. "
        "`k3 simulate --fit-steps` makes a scenario of it.",
        "Scheduling",
    )
    random_seed: int | None = option(
        None, "Seed of sampling for requests that bring none; default: a fresh one.", "Scheduling", low=0
    )

    def __post_init__(self) -> None:
        check_rows(self)
        if self.emulate_rank is None:
            for flag, value in (("--tp-size", self.tp_size), ("--ep-size", self.ep_size)):
                if value > 1:
                    raise UserError(f"{flag} {value} is not taken: {ONE_GPU}; --emulate-rank runs one rank", param=flag)
            if self.emulate_routing != "mean":
                raise UserError("--emulate-routing is for --emulate-rank", param="--emulate-routing")
        if self.mem_fraction_static is not None and self.arena_gib is not None:
            raise UserError(
                "--mem-fraction-static and --arena-gib both fix the size of the arena; give one of them",
                param="--arena-gib",
            )
        if self.mamba_full_memory_ratio is not None and self.max_mamba_cache_size is not None:
            raise UserError(
                "--mamba-full-memory-ratio and --max-mamba-cache-size both cap the states; give one of them",
                param="--max-mamba-cache-size",
            )
        if self.max_gap_ms is not None and self.policy != "slo":
            raise UserError(
                "--max-gap-ms is for --policy slo; prefill-first knows no bound on a gap", param="--max-gap-ms"
            )
        if self.enable_mixed_chunk and self.policy == "slo":
            raise UserError(
                "--enable-mixed-chunk is for --policy prefill-first; slo decides it for every step",
                param="--enable-mixed-chunk",
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(
                f"--device is {self.device!r}; it must be auto, cpu, cuda or cuda:N (a number)", param="--device"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How the server listens, whom it lets in and how it ends."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.", "Server")
    port: int = option(30000, "Port to listen on; 0 takes a free one and prints it.", "Server", low=0, high=65535)
    served_model_name: str | None = option(
        None, "Name of the model in answers and in /v1/models; default: the model path.", "Server"
    )
    api_key: tuple[str, ...] = option(
        (),
        "A key that clients must send as `Authorization: Bearer KEY`; may be given several times.",
        "Server",
        env="K3_API_KEYS",
    )
    api_key_file: str | None = option(
        None, "File with one key a line, so that keys do not show in the list of processes.", "Server"
    )
    cors_origin: tuple[str, ...] = option(
        (), "Origin whose web pages may call this server; may be given several times. Default: none.", "Server"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "What goes to the log.", "Server")
    disable_request_log: bool = option(False, "Do not write a line of JSON for each finished request.", "Server")
    otlp_traces_endpoint: str | None = option(
        None, "OTLP address for traces, such as http://localhost:4318/v1/traces; needs the extra `trace`.", "Server"
    )
    max_body_mib: float = option(32.0, "Largest request body in MiB; larger ones are answered 413.", "Limits", above=0)
    max_choices: int = option(16, "Largest `n` of a request.", "Limits", low=1, high=128)
    max_stop_strings: int = option(16, "Most `stop` strings of a request.", "Limits", low=0)
    client_timeout: float = option(
        60.0, "Seconds after which a client is given up that sends no more of its request or takes nothing of its "
        "answer.", "Limits", above=0, high=86_400,
    )  # fmt: skip
    drain_timeout: float = option(
        60.0, "Seconds that running requests get to finish after SIGTERM before they are ended.", "Limits", low=0
    )
    watchdog_timeout: float = option(
        300.0, "A step that takes longer than so many seconds ends the engine process, which is started anew.",
        "Limits", above=0,
    )  # fmt: skip
    max_restarts: int = option(
        3, "How often within ten minutes a dead engine process is started anew; then the server exits.", "Limits", low=0
    )

    def __post_init__(self) -> None:
        check_rows(self)


MOST_WHOLE = 2**63 - 1
MOST_FLOAT = 1e15
"""Of every number above, whatever its own bounds: beyond it arithmetic with bytes and seconds breaks."""


class DataclassInstance(typing.Protocol):
    """Any dataclass; EngineOptions and ServeOptions here."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]


@functools.cache
def rows(cls: type[DataclassInstance]) -> tuple[Option, ...]:
    """The table of one of the option classes, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    return tuple(_resolve(field, hints[field.name]) for field in dataclasses.fields(cls) if "option" in field.metadata)


def _resolve(field: dataclasses.Field[Any], hint: Any) -> Option:
    row: OptionRow = field.metadata["option"]
    optional = False
    if isinstance(hint, types.UnionType):
        optional = type(None) in typing.get_args(hint)
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    repeated = typing.get_origin(hint) is tuple
    if repeated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        row = dataclasses.replace(row, choices=typing.get_args(hint))
        hint = str
    return Option(field.name, hint, optional, repeated, field.default, row)


def check_rows(options: DataclassInstance) -> None:
    """Check every field's type, choices and bounds; raises UserError with the flag as ``param``."""
    for opt in rows(type(options)):
        value = getattr(options, opt.name)
        if value is None and opt.optional:
            continue
        for one in value if opt.repeated else (value,):
            _check_value(opt, one)


def _check_value(opt: Option, value: object) -> None:
    right_type = isinstance(value, opt.kind) or (opt.kind is float and isinstance(value, int))
    if not right_type or (isinstance(value, bool) and opt.kind is not bool):
        raise UserError(f"{opt.flag} is {value!r}; it must be of type {opt.kind.__name__}", param=opt.flag)
    row = opt.row
    if value == "":
        raise UserError(f"{opt.flag} is empty; give a value or leave it out", param=opt.flag)
    if row.choices and value not in row.choices:
        raise UserError(f"{opt.flag} is {value!r}; it must be one of {opt.allowed}", param=opt.flag)
    if isinstance(value, (int, float)) and value not in row.also:
        low_ok = (row.low is None or value >= row.low) and (row.above is None or value > row.above)
        if not (low_ok and (row.high is None or value <= row.high)):
            raise UserError(f"{opt.flag} is {value!r}; it must be {opt.allowed}", param=opt.flag)
        if not abs(value) <= (MOST_FLOAT if isinstance(value, float) else MOST_WHOLE):
            raise UserError(f"{opt.flag} is {value!r}; it must be a finite number below 1e15", param=opt.flag)


def make_engine_options(model_path: str, options: Mapping[str, Any]) -> EngineOptions:
    """EngineOptions from keyword arguments (the offline API). An unknown name raises UserError with a suggestion."""
    known = [opt.name for opt in rows(EngineOptions)]
    for name in options:
        if name not in known:
            raise UserError(f"there is no engine option {name!r}{did_you_mean(name, known)}", param=name)
    return EngineOptions(model_path=model_path, **options)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the closest of ``known``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
