"""Sixteen streams while one prompt of 8,400 tokens a second comes for 24 s: what prompts cost the streams.

Simulated 8 B300 (b300x8-low-latency, engine k3, fitted step times). Inside the window: ``gaps`` are those between two
tokens of a stream; ``steps`` the times between two steps in which streams decode, one each however many streams there
are; ``left`` the tokens a second a stream that the prompts leave, the window less the time of their chunks (as they
were cut, computed alone) over the decode step.

    python benchmarks/interference.py [--bound 150]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from k3stack.estimate.work import StepLoad
from k3stack.scheduler.clock import VirtualClock
from k3stack.simulator.build import Builder, SimSettings
from k3stack.simulator.events import EventQueue
from k3stack.simulator.pricing import StepPrice
from k3stack.simulator.run import SimResult, simulate
from k3stack.simulator.scenario import load_scenario
from k3stack.workload import synthetic

SCENARIO = "b300x8-low-latency"


@contextmanager
def recorded() -> Iterator[list[StepLoad]]:
    """The loads of all steps with chunks that are priced inside."""
    loads: list[StepLoad] = []
    price = StepPrice.__call__

    def recording(self: StepPrice, load: StepLoad) -> float:
        if load.chunk_tokens:
            loads.append(load)
        return price(self, load)

    StepPrice.__call__ = recording  # type: ignore[method-assign]
    try:
        yield loads
    finally:
        StepPrice.__call__ = price  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bound", type=float, default=150.0, help="on the gap, ms")
    bound = parser.parse_args().bound / 1000
    cases = {
        "prefill-first": SimSettings(policy="prefill-first"),
        "slo": SimSettings(policy="slo", mixed=True),
        f"slo, gap bound {1000 * bound:.0f} ms": SimSettings(policy="slo", mixed=True, max_gap_s=bound),
    }
    scenario, workload = load_scenario(SCENARIO), synthetic.interference()
    assert workload.window_s is not None
    begin, end = workload.window_s
    price = Builder(scenario, SimSettings(), EventQueue(VirtualClock())).price(scenario.servers[0])
    n = synthetic.PROMPT_MEAN
    prompt = price(StepLoad(chunk_rows=1, chunk_tokens=n, chunk_pairs=n * n / 2, samples=1))
    # At the middle of the window a stream has about as many tokens as its prompt and 1,500 answers.
    step = price(StepLoad(decode_rows=16, decode_context=16 * (synthetic.STREAM_PROMPT + 1_500), samples=16))
    print(f"prompt alone {1000 * prompt:.0f} ms, decode step {1000 * step:.1f} ms")
    print(
        "| policy | output lost | tokens/s a stream | left by the prompts | chunks | longest gap, ms | steps in bound "
        "| gaps in bound | prompts: p50, p99 s |"
    )
    print("|---" * 9 + "|")
    for name, settings in cases.items():
        with recorded() as loads:
            run = simulate(scenario, workload, settings, token_times=True)
        chunks = in_prompts(loads)
        spent = sum(price(replace(c, decode_rows=0, decode_context=0, samples=c.chunk_rows)) for c in chunks)
        left = (1 - spent / (end - begin)) / step
        gaps, steps, tokens = in_window(run, begin, end)
        rate = tokens / synthetic.STREAMS / (end - begin)
        first = run.summary["ttft_s"]
        print(
            f"| {name} | {100 * run.summary['stream_output_lost']:.1f} % | {rate:.1f} | "
            f"{left:.1f} ({100 * (rate / left - 1):+.1f} %) | {len(chunks)} | {1000 * max(gaps):.0f} | "
            f"{100 * share(steps, bound):.2f} % of {len(steps)} | {100 * share(gaps, bound):.2f} % | "
            f"{first['p50']:.2f}, {first['p99']:.2f} |",
            flush=True,
        )


def in_prompts(loads: list[StepLoad]) -> list[StepLoad]:
    """The chunks that come after those of the streams' own prompts."""
    before, streams = 0, synthetic.STREAMS * synthetic.STREAM_PROMPT
    for i, load in enumerate(loads):
        if before >= streams:
            return loads[i:]
        before += load.chunk_tokens
    return []


def share(values: list[float], bound: float) -> float:
    return sum(v <= bound + 1e-9 for v in values) / len(values)


def in_window(run: SimResult, begin: float, end: float) -> tuple[list[float], list[float], int]:
    """Gaps between two tokens of a stream, times between two steps that give tokens, and tokens."""
    gaps: list[float] = []
    ends: set[float] = set()
    tokens = 0
    for r in run.records:
        if r.stream and r.token_s:
            times = [t for t in r.token_s if begin <= t < end]
            tokens += len(times)
            ends.update(times)
            gaps += [b - a for a, b in pairwise(times)]
    return gaps, [b - a for a, b in pairwise(sorted(ends))], tokens


if __name__ == "__main__":
    main()
