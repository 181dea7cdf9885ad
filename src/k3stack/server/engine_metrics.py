"""The engine's numbers as metrics: one table of names, units, sources and the question each answers.

``docs/metrics.md`` is made from it. A number of the engine that has no row here is not offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. ``sources``: label value -> path in the engine's stats; without ``label`` there is one, under ''."""

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    question: str
    sources: Mapping[str, str]
    label: str | None = None


def _one(path: str) -> dict[str, str]:
    return {"": path}


def _several(prefix: str, *names: str) -> dict[str, str]:
    return {name: f"{prefix}{name}" for name in names}


TABLE: tuple[Row, ...] = (
    Row(
        "k3_arena_blocks", "gauge", "blocks",
        "What does the arena hold? The kinds add up to k3_arena_blocks_capacity; free, snapshot and the unused pages "
        "of slabs are room for new requests.",
        _several("memory.blocks_", "free", "running", "snapshot", "slab", "reserved", "pinned"), "kind",
    ),
    Row("k3_arena_blocks_capacity", "gauge", "blocks", "How large is the arena?", _one("memory.blocks")),
    Row("k3_arena_block_bytes", "gauge", "bytes", "How large is a block?", _one("memory.block_bytes")),
    Row(
        "k3_arena_pages_per_block", "gauge", "pages", "How many cache pages does a block hold?",
        _one("memory.pages_per_block"),
    ),
    Row("k3_arena_page_tokens", "gauge", "tokens", "How many tokens does a page hold?", _one("memory.page_tokens")),
    Row(
        "k3_arena_pages", "gauge", "pages", "What do the slabs hold? Cached pages can be dropped for new requests.",
        {
            **_several("memory.pages_", "running", "cached", "pinned"),
            "free": "memory.pages_free_in_slabs",
        },
        "kind",
    ),
    Row("k3_arena_pins", "gauge", "runs", "How much must not move?", _one("memory.pins")),
    Row("k3_arena_moves", "counter", "pages", "How often were pages moved to free a block?", _one("memory.moves")),
    Row(
        "k3_arena_refused", "counter", "requests for room",
        "How often did something have to wait for memory? Rising steadily: more requests than the arena holds.",
        _one("memory.refused"),
    ),
    Row(
        "k3_prefix_opens", "counter", "requests",
        "Are prefixes reused? A miss found nothing; pages_without_snapshot found the cache rows but no state to go on "
        "from (more snapshots would have helped: --mamba-track-interval).",
        {"hit": "memory.hits", "miss": "memory.misses", "pages_without_snapshot": "memory.pages_without_snapshot"},
        "result",
    ),
    Row(
        "k3_prefix_evicted_misses", "counter", "requests",
        "Did requests come back to a prefix that had been dropped for want of room? A larger arena would have helped.",
        _one("memory.evicted_misses"),
    ),
    Row(
        "k3_prefix_tokens", "counter", "tokens",
        "How much of the prompts was reused, and how much would have been with more snapshots?",
        {
            "prompt": "memory.prompt_tokens",
            "cached": "memory.cached_tokens",
            "without_snapshot": "memory.tokens_without_snapshot",
        },
        "kind",
    ),
    Row("k3_prefix_pages", "gauge", "pages", "How large is the prefix tree?", _one("memory.nodes")),
    Row(
        "k3_prefix_evicted", "counter", "snapshots or pages", "How much was dropped for new requests?",
        {"snapshots": "memory.evicted_snapshots", "pages": "memory.evicted_pages"}, "kind",
    ),
    Row(
        "k3_snapshots", "counter", "snapshots", "What becomes of snapshots of the state?",
        _several("memory.snapshots_", "taken", "declined", "kept_at_close", "consumed", "superseded"), "what",
    ),
    Row(
        "k3_duplicate_pages", "counter", "pages", "How often did two running requests compute the same page?",
        _one("memory.duplicate_pages"),
    ),
    Row(
        "k3_queue", "gauge", "requests",
        "Who waits, and who runs? Waiting above 0 for long: the server is over its capacity.",
        _several("scheduler.", "waiting", "prefilling", "decoding", "finishing"), "state",
    ),
    Row("k3_rows", "gauge", "rows", "How many requests may run at once?", _one("scheduler.rows")),
    Row("k3_steps_in_flight", "gauge", "steps", "Does planning overlap the running step?", _one("scheduler.in_flight")),
    Row("k3_steps", "counter", "steps", "How many steps were planned?", _one("scheduler.steps")),
    Row("k3_submitted", "counter", "choices", "How many choices were asked for?", _one("scheduler.submitted")),
    Row(
        "k3_finished", "counter", "choices", "How did choices end in the engine?",
        _several("scheduler.finished.", "stop", "length", "abort", "rejected", "error"), "reason",
    ),
    Row(
        "k3_preempted", "counter", "requests", "How often was a running request put back for want of memory?",
        _one("scheduler.preempted"),
    ),
    Row(
        "k3_stalled_rows", "counter", "rows", "How often did a running request sit a step out for want of memory?",
        _one("scheduler.stalled"),
    ),
    Row(
        "k3_admission_waits", "counter", "attempts", "How often was there no room to start a waiting request?",
        _one("scheduler.admission_waits"),
    ),
    Row(
        "k3_computed_tokens", "counter", "tokens", "What does the engine spend its steps on?",
        {"prefill": "scheduler.prefill_tokens", "decode": "scheduler.decode_tokens"}, "kind",
    ),
    Row(
        "k3_reused_tokens", "counter", "tokens", "How many prompt tokens were not computed, preempted ones included?",
        _one("scheduler.cached_tokens"),
    ),
    Row("k3_failed_steps", "counter", "steps", "Did whole steps fail? Should stay 0.", _one("scheduler.failed_steps")),
    Row(
        "k3_rescues", "counter", "times", "Did everything stand still until the cache was dropped? Should stay 0.",
        _one("scheduler.rescued"),
    ),
    Row(
        "k3_step_seconds_sum", "counter", "seconds", "How much time went into steps?",
        {kind: f"steps.{kind}.seconds" for kind in ("prefill", "decode", "mixed")}, "kind",
    ),
    Row(
        "k3_step_seconds_count", "counter", "steps", "How many steps were run?",
        {kind: f"steps.{kind}.steps" for kind in ("prefill", "decode", "mixed")}, "kind",
    ),
    Row(
        "k3_step_rows", "counter", "rows", "How full are steps? Divide by k3_step_seconds_count.",
        {kind: f"steps.{kind}.rows" for kind in ("prefill", "decode", "mixed")}, "kind",
    ),
    Row(
        "k3_step_p50_seconds", "gauge", "seconds", "How long does a step take? Median of the last ones.",
        {kind: f"steps.{kind}.p50_s" for kind in ("prefill", "decode", "mixed")}, "kind",
    ),
    Row(
        "k3_step_p99_seconds", "gauge", "seconds", "And the slowest of them?",
        {kind: f"steps.{kind}.p99_s" for kind in ("prefill", "decode", "mixed")}, "kind",
    ),
)  # fmt: skip

NOT_OFFERED: Mapping[str, str] = {
    "memory.version": "the version of the snapshot's form",
    "memory.running": "k3_queue has it by state",
    "memory.opens": "the sum of k3_prefix_opens",
    "steps.failed": "k3_failed_steps counts them where they are decided on",
}
"""Numbers of the engine that are no metric, and why."""


def lookup(stats: Mapping[str, Any], path: str) -> float | None:
    """A number by its dotted path; None where there is none (yet)."""
    value: Any = stats
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None


def families(stats: Mapping[str, Any]) -> Iterable[Metric]:
    """The table with the engine's present numbers; rows without any are left out."""
    for row in TABLE:
        found = {key: value for key, path in row.sources.items() if (value := lookup(stats, path)) is not None}
        if not found:
            continue
        make = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
        family = make(row.name, row.question.split("? ")[0].rstrip("?") + "?", labels=[row.label] if row.label else [])
        for key, value in found.items():
            family.add_metric([key] if row.label else [], value)
        yield family


def markdown_metrics() -> str:
    """The table as docs/metrics.md shows it."""
    lines = ["| metric | kind, unit | source | question |", "|---|---|---|---|"]
    for row in TABLE:
        suffix = "_total" if row.kind == "counter" else ""
        label = f"{{{row.label}}}" if row.label else ""
        paths = ", ".join(f"`{key}`: `{path}`" if key else f"`{path}`" for key, path in row.sources.items())
        lines.append(f"| `{row.name}{suffix}{label}` | {row.kind}, {row.unit} | {paths} | {row.question} |")
    return "\n".join(lines)


def markdown_not_offered() -> str:
    """Numbers that are no metric, as docs/metrics.md shows them."""
    lines = ["| number | why not |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{path}` | {why} |" for path, why in NOT_OFFERED.items())])
