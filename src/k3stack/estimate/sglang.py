"""SGLang's pools: the state pool is solved first, the cache gets what is left, and slots cap the requests.

The rule as read from SGLang 0.5.18 to 0.5.23; ``version`` selects between them where they differ. Three published
boots of 8 B300 come out to the slot, token and request (see the tests).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from k3stack.errors import DoesNotFit, UserError

Role = Literal["unified", "prefill", "decode"]
Strategy = Literal["auto", "extra_buffer", "extra_buffer_lazy", "no_buffer"]
DEFAULT_RATIO = 0.9
DEFAULT_VERSION = (0, 5, 23)
SPECULATIVE_RUNNING = 48
"""Running requests that SGLang sets under speculation when none are asked for."""


def parse_version(text: str) -> tuple[int, int, int]:
    """``0.5.18`` -> (0, 5, 18). Raises UserError."""
    parts = text.lstrip("v").split(".")
    try:
        major, minor, patch = (int(p) for p in parts)
    except ValueError:
        raise UserError(f"engine version {text!r}: write it as 0.5.23", param="engine-version") from None
    return major, minor, patch


class StageSizes(Protocol):
    """Sizes on one GPU of one pipeline stage (BlockLayout has them). Bytes."""

    @property
    def state_bytes(self) -> int: ...

    @property
    def cache_layers(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def page_rows(self) -> int: ...

    @property
    def dcp(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """The flags that SGLang's sizing reads."""

    ratio: float = DEFAULT_RATIO
    strategy: Strategy = "auto"
    overlap: bool = True
    radix_cache: bool = True
    decode_radix: bool = False
    skip_decode_lock: bool = False
    role: Role = "unified"
    max_mamba_cache_size: int | None = None
    max_running: int | None = None
    max_total_tokens: int | None = None
    context: int = 1_048_576
    attention_dp: int = 1
    draft_tokens: int = 0
    """Tokens that one verification handles (D); 0: no drafter."""
    replay: bool = False
    """``--enable-linear-replayssm-spec``."""
    ring_bytes: int = 0
    """Replay ring of one slot on the fullest stage; counted where ``replay``."""
    draft_row_bytes: int = 0
    extra_slots: int = 0
    version: tuple[int, int, int] = DEFAULT_VERSION

    @property
    def want(self) -> int | None:
        """Running requests asked for, whole server; speculation sets 48 when unset."""
        if self.max_running is None and self.draft_tokens:
            return SPECULATIVE_RUNNING
        return self.max_running


@dataclass(frozen=True, slots=True)
class SglangPools:
    """What SGLang would print at boot. Bytes per GPU; slots, tokens and requests per attention-DP worker."""

    slots: int
    """State slots without the dummy (K)."""
    slots_per_request: int
    slot_bytes: int
    state_bytes: int
    """One state without its ring."""
    scratch_bytes: int
    cell_bytes: int
    """Bytes that one row costs on the stage that decides."""
    rows: int
    tokens: int
    """Logical capacity: rows · dcp."""
    want: int
    max_running: int
    binding: str
    runner_up: str
    caps: dict[str, int]
    version: tuple[int, int, int]
    beyond_budget_bytes: int = 0
    """PD decode: what the enlarged state pool takes past the budget."""

    @property
    def logged_tokens(self) -> int:
        """The figure behind ``max_total_num_tokens``: rows of one rank through 0.5.20, tokens since."""
        return self.tokens if self.version >= (0, 5, 21) else self.rows

    @property
    def ratio_pool_bytes(self) -> int:
        """Bytes of the state pool with its dummy."""
        return (self.slots + 1) * self.slot_bytes


def slots_per_request(settings: SglangSettings, pp: int = 1) -> int:
    """State slots reserved for each running request (S)."""
    if not settings.radix_cache:
        return 1
    overlap = settings.overlap and pp == 1
    tracking = {"no_buffer": 0, "extra_buffer_lazy": 1}.get(settings.strategy, 2 if overlap else 1)
    if settings.role == "decode":
        return 1 + tracking if settings.decode_radix else 1
    locked = 1 if settings.skip_decode_lock and settings.strategy != "no_buffer" else 0
    return 3 + tracking - locked


MAX_RATIO = 1_000_000
"""State bytes to cache bytes, at most."""


def _check(settings: SglangSettings) -> None:
    if not 0 < settings.ratio <= MAX_RATIO:
        raise UserError(
            f"--mamba-full-memory-ratio is {settings.ratio:g}; it must be above 0 and at most {MAX_RATIO:,}",
            param="--mamba-full-memory-ratio",
        )
    if settings.attention_dp < 1:
        raise UserError(f"attention-DP is {settings.attention_dp}; it must be at least 1")


def sglang_pools(stages: Sequence[StageSizes], budget: int, settings: SglangSettings) -> SglangPools:
    """Solve both pools for ``budget`` bytes on each GPU (T), over the stages of a pipeline.

    Raises DoesNotFit, with the bytes that are missing, where the server would abort its boot.
    """
    _check(settings)
    pp = len(stages)
    per_request = slots_per_request(settings, pp)
    if settings.version < (0, 5, 17) and pp > 1:
        # Before 0.5.17 the whole model's state was charged to each stage.
        state = sum(s.state_bytes for s in stages)
    else:
        state = max(s.state_bytes for s in stages)
    ring = settings.ring_bytes if settings.replay else 0
    slot = state + ring
    slots, scratch = _solve_states(budget, settings, state, ring, per_request)
    if slots <= 0:
        need = _least_state_bytes(settings, state, ring, per_request) * (1 + settings.ratio) / settings.ratio
        raise DoesNotFit(
            f"the state pool would have no slot: of the budget of {budget / 2**30:.2f} GiB a share of "
            f"{settings.ratio / (1 + settings.ratio):.0%} goes to states of {slot / 2**20:.1f} MiB; "
            f"{max(0.0, need - budget) / 2**30:.2f} GiB short. Raise --mamba-full-memory-ratio or "
            "--mem-fraction-static, or use more GPUs."
        )
    rows, cell = _rows(stages, budget - (slots + 1) * slot - scratch, settings)
    if rows <= 0:
        raise DoesNotFit(
            f"the states leave nothing for the cache: {slots + 1} slots take {(slots + 1) * slot / 2**30:.2f} GiB of "
            f"{budget / 2**30:.2f} GiB. Lower --mamba-full-memory-ratio or --max-mamba-cache-size."
        )
    beyond = 0
    if settings.role == "decode" and settings.max_running is not None:
        held = (settings.max_running // settings.attention_dp + settings.extra_slots) * per_request
        if held > slots:
            beyond, slots = (held - slots) * slot, held
    return _capped(stages, settings, slots, per_request, slot, state, scratch, cell, rows, beyond)


def _solve_states(budget: int, s: SglangSettings, state: int, ring: int, per_request: int) -> tuple[int, int]:
    """(usable slots K, scratch bytes of speculation without replay)."""
    drafts = s.draft_tokens
    prefill_plain = s.role == "prefill" and s.version >= (0, 5, 22)
    plain = drafts == 0 or s.replay or prefill_plain
    want = None if s.want is None else s.want // s.attention_dp
    share = budget * s.ratio / (1 + s.ratio)
    if s.max_mamba_cache_size is not None:
        slots = s.max_mamba_cache_size // s.attention_dp
    elif not s.radix_cache and s.max_running is not None:
        slots = s.max_running // s.attention_dp
    elif plain:
        slots = math.floor((share - state - ring) / (state + ring))
    else:
        slots = math.floor((share - state * (1 + drafts) - ring) / (state * (1 + drafts / per_request) + ring))
    if plain or slots <= 0:
        return slots, 0
    running = slots // per_request if want is None else min(want, slots // per_request)
    return slots, state * drafts * (running + 1)


def _least_state_bytes(s: SglangSettings, state: int, ring: int, per_request: int) -> float:
    """State share needed for one slot."""
    slot = state + ring
    if s.draft_tokens and not s.replay:
        return state * (1 + s.draft_tokens) + ring + state * (1 + s.draft_tokens / per_request) + ring
    return 2 * slot


def _rows(stages: Sequence[StageSizes], rest: int, s: SglangSettings) -> tuple[int, int]:
    """(rows of one rank, cell bytes of the stage that decides): the least over stages, whole pages."""
    best: tuple[int, int] | None = None
    for stage in stages:
        cell = stage.cache_layers * stage.row_bytes + stage.dcp * s.draft_row_bytes
        if cell == 0:
            continue
        rows = rest // cell // stage.page_rows * stage.page_rows
        if best is None or rows < best[0]:
            best = rows, cell
    if best is None:
        raise DoesNotFit("no stage holds a cache row: the layout has no MLA layer")
    rows, cell = best
    if s.max_total_tokens is not None:
        rows = min(rows, s.max_total_tokens // stages[0].page_rows * stages[0].page_rows)
    return rows, cell


def _capped(
    stages: Sequence[StageSizes], s: SglangSettings, slots: int, per_request: int, slot: int, state: int,
    scratch: int, cell: int, rows: int, beyond: int,
) -> SglangPools:  # fmt: skip
    want = s.want
    if want is None:
        mine = min(max(int(rows / s.context * 512), 2048), 4096)
    else:
        mine = want // s.attention_dp
    caps = {"max_running_requests": mine, "cache": rows // 2, "state": slots // per_request}
    order = sorted(caps, key=lambda name: caps[name])
    cap = caps[order[0]]
    if cap <= 0:
        raise DoesNotFit(
            f"no request could run: {slots} state slots / {per_request} reserved for each, {rows} cache rows, "
            f"{mine} asked for. Raise --mamba-full-memory-ratio, --mem-fraction-static or --max-running-requests."
        )
    return SglangPools(
        slots=slots,
        slots_per_request=per_request,
        slot_bytes=slot,
        state_bytes=state,
        scratch_bytes=scratch,
        cell_bytes=cell,
        rows=rows,
        tokens=rows * stages[0].dcp,
        want=mine,
        max_running=cap,
        binding=order[0],
        runner_up=order[1],
        caps=caps,
        version=s.version,
        beyond_budget_bytes=beyond,
    )


CALCULATOR_DRAFT_ROW = 1400
"""Draft bytes a token that the published calculator adds when a drafter is on."""


def calculator_ratio(
    *, slots: int, state_bytes: int, row_bytes: int, dcp: int, tokens: float, drafter: bool, draft_states: int = 0
) -> float:
    """The published ratio calculator: (S + D) · state / (L · (row / dcp + 1400 if a drafter is on)).

    An approximation: it leaves out the replay ring and prices the draft cache at a flat 1,400 B. ``draft_states``
    is D where states are kept for every draft (no replay, not a prefill worker). Unrounded.
    """
    price = row_bytes / dcp + (CALCULATOR_DRAFT_ROW if drafter else 0)
    return (slots + draft_states) * state_bytes / (tokens * price)


def balanced_ratio(*, slots: int, slot_bytes: int, cell_bytes: int, dcp: int, tokens: float) -> float:
    """The ratio at which both pools admit equally many requests of ``tokens``: S · slot · dcp / (L · cell)."""
    return slots * slot_bytes * dcp / (tokens * cell_bytes)


def crossing_tokens(*, slots: int, slot_bytes: int, cell_bytes: int, dcp: int) -> float:
    """Length at which a request's cache outweighs the slots reserved for it."""
    return slots * slot_bytes * dcp / cell_bytes


def calculator_text(ratio: float) -> str:
    """As the calculator shows it: one decimal from 10 up, two from 1 up, two significant digits below 1."""
    if ratio >= 10:
        return f"{ratio:.1f}"
    if ratio >= 1:
        return f"{ratio:.2f}"
    return f"{ratio:.2g}"
