"""A plan as one HTML file: figures, pictures and commands, no outside assets."""

from __future__ import annotations

from html import escape

from k3stack.planner.document import notes
from k3stack.planner.launch import commands
from k3stack.planner.pictures import panels, svg_text
from k3stack.planner.plan import Plan
from k3stack.planner.recommend import Recommendation
from k3stack.planner.report import plan_text

STYLE = """
:root { --ink:#1d2733; --quiet:#5b6773; --line:#dde3e9; --page:#fbfcfd; --card:#fff; --accent:#3a7d44; --bad:#c8553d; }
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width:1120px; margin:0 auto; padding:28px 20px 60px; }
h1 { font-size:24px; margin:0 0 2px; } h2 { font-size:17px; margin:0 0 2px; }
.sub { color:var(--quiet); margin:0 0 18px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(165px,1fr)); gap:12px; margin:18px 0; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:12px 14px; }
.tile b { display:block; font-size:22px; font-variant-numeric:tabular-nums; }
.tile span { color:var(--quiet); font-size:13px; }
section { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:16px 18px; margin:14px 0; }
section p { color:var(--quiet); margin:2px 0 8px; } svg { width:100%; height:auto; display:block; }
pre { overflow-x:auto; background:#f3f5f7; border-radius:6px; padding:12px; font-size:12.5px; line-height:1.45; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
td,th { text-align:right; padding:5px 8px; border-bottom:1px solid var(--line); }
td:first-child,th:first-child { text-align:left; }
.bad { color:var(--bad); } .sev { font-size:12px; border:1px solid var(--line); border-radius:4px; padding:1px 6px; }
li { margin:6px 0; }
"""


def page(plan: Plan, answer: Recommendation | None = None) -> str:
    """The whole page."""
    setup = plan.setup
    title = f"{setup.engine} {setup.layout.label} on {setup.hardware.name}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>k3 plan: {escape(title)}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1><p class='sub'>{escape(setup.model)}, requests of {plan.tokens:,} tokens</p>",
        _verdict(plan),
        _tiles(plan),
    ]
    if answer is not None:
        parts.append(_ranking(answer))
    for name, what, draw in panels(plan):
        parts.append(f"<section><h2>{escape(name)}</h2><p>{escape(what)}</p>{svg_text(draw, plan)}</section>")
    parts += [_findings(plan), _commands(plan)]
    parts.append(f"<section><h2>The whole report</h2><pre>{escape(plan_text(plan))}</pre></section>")
    parts.append("</main></body></html>")
    return "\n".join(p for p in parts if p)


def _verdict(plan: Plan) -> str:
    if plan.refused is not None:
        return f"<p class='bad'><b>Refused.</b> {escape(plan.refused.message)}</p>"
    if not plan.fits:
        return (
            f"<p class='bad'><b>Does not fit:</b> {escape(plan.reason)}; {plan.missing_gib:.2f} GiB per GPU short.</p>"
        )
    return ""


def _tiles(plan: Plan) -> str:
    memory = plan.setup.hardware.gpu.memory_gib
    tiles = [(f"{plan.weights.gib_per_gpu:.1f} GiB", f"weights per GPU, of {memory:.1f}")]
    if plan.fits:
        band = f" ± {plan.budget.band_gib:g}" if plan.budget.assumed else ""
        tiles += [
            (f"{plan.budget.gib:.1f} GiB", f"for states and cache{band}"),
            (f"{plan.state_slots:,}", "state slots" if plan.pools else "states, if nothing is cached"),
            (f"{plan.cache_tokens:,}", "cache tokens" if plan.pools else "cache tokens, if no state is held"),
            (f"{plan.admitted_total:,}", f"requests at once, bound by {plan.binding.replace('_', ' ')}"),
            (f"{plan.crossing:,.0f}", "tokens from which cache outweighs state"),
        ]
    return (
        "<div class='tiles'>"
        + "".join(f"<div class='tile'><b>{b}</b><span>{s}</span></div>" for b, s in tiles)
        + "</div>"
    )


def _ranking(answer: Recommendation, shown: int = 12) -> str:
    rows = "".join(
        f"<tr><td>{escape(c.plan.setup.layout.label)}</td><td>{c.plan.weights.gib_per_gpu:.1f}</td><td>{c.admitted:,}</td>"
        f"<td>{c.running:,}</td><td>{c.step_s * 1e3:.1f}</td><td>{c.prefill_s:.2f}</td><td>{c.rate:.2f}</td></tr>"
        for c in answer.layouts[:shown]
    )
    return (
        f"<section><h2>Layouts</h2><p>{len(answer.layouts)} of {answer.considered} fit; best first. "
        "Times are a roofline.</p><table><tr><th>layout</th><th>GiB per GPU</th><th>admitted</th><th>running</th>"
        f"<th>ms per token</th><th>prompt, s</th><th>requests/s</th></tr>{rows}</table></section>"
    )


def _findings(plan: Plan) -> str:
    items = "".join(
        f"<li><span class='sev'>{f.severity}</span> <b>{escape(f.id)}</b>: {escape(f.message)} "
        f"<i>({escape(f.source)})</i></li>"
        for f in plan.findings
    ) + "".join(f"<li>{escape(n)}</li>" for n in notes(plan))
    return f"<section><h2>Findings</h2><ul>{items}</ul></section>" if items else ""


def _commands(plan: Plan) -> str:
    if not plan.fits or plan.refused is not None:
        return ""
    blocks = "".join(f"<p>{e}</p><pre>{escape(chr(10).join(c))}</pre>" for e, c in commands(plan).items())
    return f"<section><h2>Commands</h2>{blocks}</section>"
