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
            "missed_first_token": s["missed"]["first_token"],
            "missed_pace": s["missed"]["pace"],
            "missed_whole": s["missed"]["whole"],
            "busy_share": s["busy_share_by_role"],
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
    reasons = [_what(best)]
    for row in rows[1:]:
        if row["sustained_rate"] is not None:
            gap = f"{row['sustained_rate']:.3g} requests/s"
        else:
            gap = f"{100 * (row['share_within_target'] or 0):.1f} %"
        reasons.append(f"{row['scenario']}: {gap}; {_what(row)}")
    return f"{claim} ({reasons[0]})" + "".join(f". {r}" for r in reasons[1:]) + "."


def _what(row: Mapping[str, Any]) -> str:
    """What misses the target there, how busy its servers are, and what binds."""
    kinds = {
        "missed_first_token": "first tokens",
        "missed_pace": "tokens after the first",
        "missed_whole": "tool calls",
    }
    worst = max(kinds, key=lambda k: row[k])
    missed = f"what is late are mostly {kinds[worst]}" if row[worst] else "nothing is late"
    busy = ", ".join(f"{role} {100 * share:.0f} %" for role, share in row["busy_share"].items())
    return f"{missed}; busy: {busy}; binds: {row['binding']}"
