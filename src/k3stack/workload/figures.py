"""Figures of a load run: what a person looks at first. PNG, and one HTML file with no outside assets."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3stack.workload.records import Record
from k3stack.workload.sustained import Point
from k3stack.workload.target import Target

GOOD, MISS, LINE, MUTED = "#2a7f62", "#c8553d", "#1f4e79", "#8a8f98"
COLOURS = (LINE, GOOD, MISS, "#7a5195", "#ef9b20", "#4d4d4d")


def _axes(width: float = 7.2, height: float = 3.4, columns: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, height), dpi=130, layout="constrained")
    for ax in axes if columns > 1 else [axes]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.tick_params(labelsize=8)
    return figure, axes


def latency_figure(records: Sequence[Record], target: Target) -> Any:
    """First token over the run, and time per token against answer length, coloured by whether the target was met."""
    figure, (left, right) = _axes(9.6, 3.4, 2)
    measured = [r for r in records if not r.stream and r.first_s is not None]
    for met, colour, label in ((True, GOOD, "target met"), (False, MISS, "missed")):
        rows = [r for r in measured if target.met(r) == met]
        if not rows:
            continue
        left.scatter([r.arrival_s for r in rows], [r.ttft_s for r in rows], s=9, color=colour, label=label, alpha=0.8)
        timed = [r for r in rows if r.tpot_s is not None]
        right.scatter(
            [r.output_tokens for r in timed],
            [1000 * (r.tpot_s or 0.0) for r in timed],
            s=9,
            color=colour,
            alpha=0.8,
        )
    left.axhline(target.ttft_s, color=MUTED, linewidth=1, linestyle="--")
    right.axhline(1000 * target.tpot_s, color=MUTED, linewidth=1, linestyle="--")
    left.set(xlabel="arrival, s", ylabel="time to first token, s", title="First token")
    right.set(xlabel="answer, tokens", ylabel="time per token, ms", title="After the first token")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    if measured:
        left.legend(fontsize=8, frameon=False)
    return figure


def distribution_figure(records: Sequence[Record], target: Target) -> Any:
    """Cumulative shares of time to first token and time per token."""
    figure, (left, right) = _axes(9.6, 3.0, 2)
    measured = [r for r in records if not r.stream]
    series = (
        (left, [r.ttft_s for r in measured if r.ttft_s is not None], target.ttft_s, "time to first token, s"),
        (
            right,
            [1000 * r.tpot_s for r in measured if r.tpot_s is not None],
            1000 * target.tpot_s,
            "time per token, ms",
        ),
    )
    for ax, values, limit, label in series:
        ordered = sorted(values)
        share = [(i + 1) / len(ordered) for i in range(len(ordered))]
        ax.plot(ordered, share, color=LINE, linewidth=1.6)
        ax.axvline(limit, color=MUTED, linewidth=1, linestyle="--", label=f"target {limit:g}")
        ax.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02))
        ax.legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def sustained_figure(curves: Mapping[str, Sequence[Point]], target: Target) -> Any:
    """Share within the target against the rate, one curve a configuration, with the spread of repeated runs."""
    figure, ax = _axes()
    _share_curves(ax, curves, target)
    ax.set(ylabel="% within target", title="Share within the target")
    ax.legend(fontsize=8, frameon=False)
    return figure


def share_panels(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], target: Target, *, label: str = "% within target"
) -> Any:
    """The same side by side, one panel a title, with one legend: the same configurations in all."""
    figure, axes = _axes(3.4 * len(panels) + 0.4, 3.3, len(panels))
    for ax, (title, curves) in zip(axes if len(panels) > 1 else [axes], panels.items(), strict=True):
        _share_curves(ax, curves, target)
        ax.set_title(title, fontsize=10)
    first = axes[0] if len(panels) > 1 else axes
    first.set_ylabel(label)
    first.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def share_and_first(
    shares: Mapping[str, Sequence[Point]], firsts: Mapping[str, Sequence[tuple[float, float]]], target: Target
) -> Any:
    """Share within the target, and the 99th percentile of first tokens (rate, seconds), both against the rate."""
    figure, (left, right) = _axes(9.6, 3.8, 2)
    _share_curves(left, shares, target)
    left.set(ylabel="% within target", title="Share within the target")
    left.legend(fontsize=7, frameon=False, loc="lower left")
    for i, (name, points) in enumerate(firsts.items()):
        right.plot(*zip(*points, strict=True), "o-", color=COLOURS[i % 6], linewidth=1.5, markersize=4, label=name)
    right.axhline(target.ttft_s, color=MUTED, linewidth=1, linestyle="--")
    right.set(xlabel="requests a second", ylabel="s", title="First token, p99", yscale="log")
    return figure


def _share_curves(ax: Any, curves: Mapping[str, Sequence[Point]], target: Target) -> None:
    for i, (name, points) in enumerate(curves.items()):
        colour = COLOURS[i % 6]
        rates = [p.rate for p in points]
        ax.plot(rates, [100 * p.share for p in points], "o-", color=colour, linewidth=1.5, markersize=4, label=name)
        for p in points:
            ax.plot([p.rate, p.rate], [100 * min(p.shares), 100 * max(p.shares)], color=colour, alpha=0.35, linewidth=3)
    ax.axhline(100 * target.share, color=MUTED, linewidth=1, linestyle="--")
    ax.set(xlabel="requests a second", ylim=(0, 102))


def streams_figure(records: Sequence[Record], window_s: tuple[float, float]) -> Any:
    """Tokens a second of the watched streams over time, with the window of prompts shaded."""
    figure, ax = _axes()
    times = sorted(t for r in records if r.stream and r.token_s for t in r.token_s)
    if times:
        end = min(times[-1], window_s[1] + 15.0)
        step = 0.5
        bins = [0] * (int(end / step) + 1)
        for t in times:
            if t < end:
                bins[int(t / step)] += 1
        ax.step([i * step for i in range(len(bins))], [b / step for b in bins], where="post", color=LINE, linewidth=1.3)
    ax.axvspan(*window_s, color=MISS, alpha=0.10, label="prompts arrive")
    ax.set(xlabel="s", ylabel="tokens a second, all streams", title="Output of the running streams")
    ax.legend(fontsize=8, frameon=False)
    ax.set_ylim(bottom=0)
    return figure


def save_png(figure: Any, path: str | Path) -> None:
    figure.savefig(path)
    _close(figure)


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)


def embed(figure: Any) -> str:
    """The figure as an HTML ``img`` with its bytes inside."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    _close(figure)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;color:#1d232a;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #dde1e6;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%;margin:.5rem 0}"
    "h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}small{color:#667}"
)


def html_report(title: str, rows: Sequence[tuple[str, str]], figures: Sequence[tuple[str, Any]], note: str = "") -> str:
    """One page: a table of name and value, then the figures, nothing loaded from outside."""
    table = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in rows)
    pictures = "".join(f"<h2>{html.escape(name)}</h2>{embed(figure)}" for name, figure in figures)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><table>{table}</table>"
        f"<small>{html.escape(note)}</small>{pictures}</html>"
    )
