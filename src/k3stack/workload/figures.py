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
        ax.xaxis.label.set_size(9)
        ax.yaxis.label.set_size(9)
        ax.title.set_size(10)
    return figure, axes


def latency_figure(records: Sequence[Record], target: Target) -> Any:
    """First token over the run, and time per token against answer length, coloured by whether the target was met.

    Tool calls are triangles: they are judged when they are complete, so that one may be above either line and in time.
    """
    measured = [r for r in records if not r.stream and r.first_s is not None]
    timed = [r for r in measured if r.tpot_s is not None]
    figure, axes = _axes(9.6 if timed else 5.4, 3.4, 2 if timed else 1)
    first = axes[0] if timed else axes
    _points(first, [(r, r.arrival_s, r.ttft_s or 0.0) for r in measured], target, "time to first token, s")
    first.axhline(target.ttft_s, color=MUTED, linewidth=1, linestyle="--")
    first.set(xlabel="arrival, s", title="First token")
    if timed:
        _points(axes[1], [(r, r.output_tokens, 1000 * (r.tpot_s or 0.0)) for r in timed], target, "ms a token")
        axes[1].axhline(1000 * target.tpot_s, color=MUTED, linewidth=1, linestyle="--")
        axes[1].set(xlabel="answer, tokens", title="After the first token")
    if measured:
        figure.legend(
            *first.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=4
        )
    return figure


def _points(ax: Any, points: Sequence[tuple[Record, float, float]], target: Target, label: str) -> None:
    for call in (False, True):
        for met, colour in ((True, GOOD), (False, MISS)):
            these = [(x, y) for r, x, y in points if r.tool_call == call and target.met(r) == met]
            if these:
                name = ("tool call, " if call else "answer, ") + ("in time" if met else "missed")
                ax.scatter(
                    *zip(*these, strict=True), s=11, marker="^" if call else "o", color=colour, label=name, alpha=0.8
                )
    ax.set_ylabel(label)
    # Above the highest point by a marker: limits that are set leave no margin of their own.
    ax.set_ylim(0, 1.06 * max((y for _, _, y in points), default=0.0) or None)


def distribution_figure(records: Sequence[Record], target: Target) -> Any:
    """Cumulative shares of time to first token and time per token, as far as the slowest hundredth."""
    measured = [r for r in records if not r.stream]
    first = [r.ttft_s for r in measured if r.ttft_s is not None]
    token = [1000 * r.tpot_s for r in measured if r.tpot_s is not None]
    series = [(first, target.ttft_s, "time to first token, s"), (token, 1000 * target.tpot_s, "time per token, ms")]
    series = [s for s in series if s[0]] or series[:1]
    figure, axes = _axes(4.8 * len(series), 3.0, len(series))
    for ax, (values, limit, label) in zip(axes if len(series) > 1 else [axes], series, strict=True):
        ordered = sorted(values)
        ax.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], color=LINE, linewidth=1.6)
        ax.axvline(limit, color=MUTED, linewidth=1, linestyle="--", label=f"target {limit:g}")
        # One straggler must not squeeze all the others into a corner.
        widest = max(1.25 * limit, 1.1 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0)
        ax.set(xlabel=label, ylabel="% of requests", ylim=(0, 102), xlim=(0, widest))
        beyond = sum(v > widest for v in ordered)
        if beyond:
            ax.text(0.99, 0.14, f"{beyond} beyond", transform=ax.transAxes, ha="right", fontsize=8, color=MISS)
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
    right.set_yticks([1, 2, 3, 5, 10, 20, 30], labels=["1", "2", "3", "5", "10", "20", "30"])
    right.minorticks_off()
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
        # A second is the study's pace of prompts: shorter bins would show each prompt's stop, not what they cost.
        seconds = int(min(times[-1], window_s[1] + 15.0))
        bins = [0] * max(seconds, 1)
        for t in times:
            if t < len(bins):
                bins[int(t)] += 1
        ax.step(range(len(bins) + 1), [*bins, bins[-1]], where="post", color=LINE, linewidth=1.3)
    ax.axvspan(*window_s, color=MISS, alpha=0.10, label="prompts arrive")
    ax.set(xlabel="s", ylabel="tokens a second, all streams", title="Output of the running streams")
    ax.legend(fontsize=8, frameon=False, loc="lower right")
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
    "text-align:right;white-space:pre-wrap}td:first-child,th:first-child{text-align:left}"
    "img{max-width:100%;margin:.5rem 0}"
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
