"""A run's summary as rows for a terminal table and the HTML report, and two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = tuple[str, str]


def summary_rows(s: Mapping[str, Any]) -> list[Row]:
    """Name and value with unit, for people."""
    low, high = s["share_within_target_ci"]
    target = s["target"]
    rows = [
        ("requests", f"{s['requests']} ({s['completed']} completed, {s['failed']} failed)"),
        (
            f"within {target['ttft_s']:.3g} s, then {target['tpot_ms']:.3g} ms a token",
            f"{_percent(s['share_within_target'])}   [{_percent(low)}, {_percent(high)}]",
        ),
    ]
    if s.get("sustained_rate") is not None:
        rows.append(("sustained rate", f"{s['sustained_rate']:.3g} requests/s"))
    rows += [
        ("time to first token, s", _spread(s["ttft_s"], 2)),
        ("time per token, ms", _spread(s["tpot_ms"], 1)),
        ("longest gap, s", f"{s['longest_gap_s']:.3f}"),
        ("goodput, requests/s", f"{s['goodput_requests_per_s']:.3f}"),
        ("output tokens/s", f"{s['output_tokens_per_s']:,.0f}"),
        ("tokens/s a GPU, prompt and output", f"{s['total_tokens_per_s_per_gpu']:,.0f}"),
        ("prompt tokens from cache", _percent(s["kv_hit_rate"])),
        ("most running at once", str(s["max_running"])),
    ]
    if s.get("stream_output_lost") is not None:
        rows.append(("stream output lost", _percent(s["stream_output_lost"])))
    if s.get("binding"):
        rows.append(("limited by", str(s["binding"])))
    rows += [(f"{count} failed", text) for text, count in s.get("errors", {}).items()]
    return rows


def comparison_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Figure, first, second, and the change in percent (share: in points)."""
    out = []
    for name, path, scale, digits in (
        ("within target, %", ("share_within_target",), 100, 1),
        ("first token p50, s", ("ttft_s", "p50"), 1, 3),
        ("first token p99, s", ("ttft_s", "p99"), 1, 3),
        ("per token p50, ms", ("tpot_ms", "p50"), 1, 2),
        ("per token p99, ms", ("tpot_ms", "p99"), 1, 2),
        ("longest gap, s", ("longest_gap_s",), 1, 3),
        ("output tokens/s", ("output_tokens_per_s",), 1, 0),
        ("cached, %", ("kv_hit_rate",), 100, 1),
    ):
        x, y = _at(a, path), _at(b, path)
        if x is None or y is None:
            continue
        if name.endswith("%"):
            change = f"{(y - x) * scale:+.1f} points"
        else:
            change = f"{(y / x - 1) * 100:+.1f} %" if x else "-"
        out.append((name, f"{x * scale:.{digits}f}", f"{y * scale:.{digits}f}", change))
    return out


def _at(s: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = s
    for key in path:
        value = value[key]
    return None if value is None else float(value)


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f} %"


def _spread(d: Mapping[str, Any], digits: int) -> str:
    if d["mean"] is None:
        return "-"
    return "  ".join(f"{k} {d[k]:.{digits}f}" for k in ("p50", "p90", "p99", "mean"))
