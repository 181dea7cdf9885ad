"""Sixteen streams while one prompt of 8,400 tokens a second comes for 24 s: what prompts cost the streams.

Simulated 8 B300 (b300x8-low-latency, engine k3, fitted step times). Gaps are those between two tokens of a stream
inside the window. ``left``: tokens a second a stream that the prompts leave at best, the window less the prompts'
computing, over the decode step.

    python benchmarks/interference.py
"""

from __future__ import annotations

from itertools import pairwise

from k3stack.estimate.work import StepLoad
from k3stack.scheduler.clock import VirtualClock
from k3stack.simulator.build import Builder, SimSettings
from k3stack.simulator.events import EventQueue
from k3stack.simulator.run import SimResult, simulate
from k3stack.simulator.scenario import load_scenario
from k3stack.workload import synthetic

SCENARIO = "b300x8-low-latency"
BOUND_S = 0.150
CASES = {
    "prefill-first": SimSettings(policy="prefill-first"),
    "slo": SimSettings(policy="slo", mixed=True),
    "slo, gap bound 150 ms": SimSettings(policy="slo", mixed=True, max_gap_s=BOUND_S),
}


def main() -> None:
    scenario, workload = load_scenario(SCENARIO), synthetic.interference()
    assert workload.window_s is not None
    begin, end = workload.window_s
    price = Builder(scenario, SimSettings(), EventQueue(VirtualClock())).price(scenario.servers[0])
    n = synthetic.PROMPT_MEAN
    prompt = price(StepLoad(chunk_rows=1, chunk_tokens=n, chunk_pairs=n * n / 2, samples=1))
    # At the middle of the window a stream has about as many tokens as its prompt and 1,500 answers.
    step = price(StepLoad(decode_rows=16, decode_context=16 * (synthetic.STREAM_PROMPT + 1_500), samples=16))
    left = (1 - synthetic.PROMPTS * prompt / (end - begin)) / step
    print(f"prompt alone {1000 * prompt:.0f} ms, decode step {1000 * step:.1f} ms; left {left:.1f} tokens/s a stream")
    print("| policy | output lost | tokens/s a stream | longest gap, ms | gaps within 150 ms | prompts: p50, p99 s |")
    print("|---|---|---|---|---|---|")
    for name, settings in CASES.items():
        run = simulate(scenario, workload, settings, token_times=True)
        gaps, tokens = in_window(run, begin, end)
        rate = tokens / synthetic.STREAMS / (end - begin)
        within = sum(g <= BOUND_S for g in gaps) / len(gaps)
        first = run.summary["ttft_s"]
        print(
            f"| {name} | {100 * run.summary['stream_output_lost']:.1f} % | {rate:.1f} | {1000 * max(gaps):.0f} | "
            f"{100 * within:.2f} % | {first['p50']:.2f}, {first['p99']:.2f} |",
            flush=True,
        )


def in_window(run: SimResult, begin: float, end: float) -> tuple[list[float], int]:
    gaps: list[float] = []
    tokens = 0
    for r in run.records:
        if r.stream and r.token_s:
            times = [t for t in r.token_s if begin <= t < end]
            tokens += len(times)
            gaps += [b - a for a, b in pairwise(times)]
    return gaps, tokens


if __name__ == "__main__":
    main()
