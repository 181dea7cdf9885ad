"""Several deployments under the same load: one row each, and a sentence that says which serves most and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compare(summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the figures that decide, best first: by sustained rate where searched, else by share, then goodput."""
    rows = [
        {
            "scenario": name,
            "sustained_rate": s.get("sustained_rate"),
            "share_within_target": s["share_within_target"],
            "goodput_requests_per_s": s["goodput_requests_per_s"],
            "ttft_p50_s": s["ttft_s"]["p50"],
            "ttft_p99_s": s["ttft_s"]["p99"],
            "tpot_p50_ms": s["tpot_ms"]["p50"],
            "tpot_p99_ms": s["tpot_ms"]["p99"],
            "device_busy_share": s["device_busy_share"],
            "max_running": s["max_running"],
            "binding": s["binding"],
        }
        for name, s in summaries.items()
    ]
    return sorted(rows, key=_merit, reverse=True)


def _merit(row: Mapping[str, Any]) -> tuple[float, float, float]:
    return (row["sustained_rate"] or 0.0, row["share_within_target"] or 0.0, row["goodput_requests_per_s"])


def explain(rows: list[dict[str, Any]]) -> str:
    """The answer in words, from the figures alone."""
    best = rows[0]
    if best["sustained_rate"]:
        claim = f"{best['scenario']} sustains {best['sustained_rate']:.3g} requests/s within the target"
    else:
        claim = f"{best['scenario']} serves {100 * (best['share_within_target'] or 0):.1f} % within the target"
    reasons = []
    for row in rows[1:]:
        if row["sustained_rate"] is not None:
            gap = f"{row['sustained_rate']:.3g} requests/s"
        else:
            gap = f"{100 * (row['share_within_target'] or 0):.1f} %"
        late = (row["ttft_p99_s"] or 0) / max(best["ttft_p99_s"] or 0, 1e-9)
        slow = (row["tpot_p50_ms"] or 0) / max(best["tpot_p50_ms"] or 0, 1e-9)
        cause = "its first tokens come later" if late >= slow else "its tokens take longer"
        reasons.append(f"{row['scenario']}: {gap} ({cause}; binds: {row['binding']})")
    return claim + ("; " + "; ".join(reasons) if reasons else "") + "."
