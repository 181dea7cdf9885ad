"""`k3 plan --from`: a plan that a boot saved, predicted against actual."""

from __future__ import annotations

import json

from k3stack.config.hardware import MIB
from k3stack.estimate.saved_plan import comparison_lines, load_plan, plan_json


def saved_text(path: str, *, as_json: bool = False) -> str:
    """The report of the saved plan at ``path``, as text or as the JSON it holds. Raises UserError."""
    saved = load_plan(path)
    if as_json:
        return json.dumps(plan_json(saved), indent=1)
    layout = saved.plan.layout
    lines = [
        f"{saved.plan.engine} · {saved.model} on {saved.device}",
        f"budget: {saved.reason}" if saved.reason else "",
        "",
        *comparison_lines(saved),
        "",
        f"block {layout.block_bytes / MIB:.2f} MiB = {layout.pages_per_block} pages of {layout.page_rows} rows "
        f"({layout.padding_share:.1%} padding); state {layout.state_bytes / MIB:.2f} MiB",
    ]
    if saved.plan.max_states is not None:
        lines.append(f"at most {saved.plan.max_states:,} states")
    if saved.plan.max_pages is not None:
        lines.append(f"at most {saved.plan.max_pages * layout.page_tokens:,} cache tokens")
    lines += list(saved.plan.notes)
    return "\n".join(line for i, line in enumerate(lines) if line or i == 2)
