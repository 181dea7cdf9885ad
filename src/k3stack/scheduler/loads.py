"""What a step computes, as ``estimate`` counts it."""

from __future__ import annotations

from collections.abc import Iterable

from k3stack.estimate.work import StepLoad
from k3stack.scheduler.plan import RowWork


def step_load(decode_rows: int, decode_context: int, work: Iterable[RowWork]) -> StepLoad:
    """``decode_rows`` rows of ``GroupPlan.decode`` with ``decode_context`` tokens behind them, and ``work``."""
    samples = decode_rows
    chunks = tokens = prefix = 0
    pairs = 0.0
    for item in work:
        samples += item.sample
        if item.ids is None:
            decode_rows += 1
            decode_context += item.start
            continue
        count = len(item.ids)
        chunks += 1
        tokens += count
        prefix += item.start
        pairs += count * (item.start + count / 2)
    return StepLoad(
        decode_rows=decode_rows,
        decode_context=decode_context,
        chunk_rows=chunks,
        chunk_tokens=tokens,
        chunk_prefix=prefix,
        chunk_pairs=pairs,
        samples=samples,
    )
