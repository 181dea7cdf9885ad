"""Policy ``slo`` against ``prefill-first`` for real: the same requests to two servers on this machine, in turn.

    python benchmarks/slo_real.py
    python benchmarks/slo_real.py --loads middle --runs 3

The target is the study's, scaled to the machine: as many times a lone request's first token and time a token as there
(``cpu_server.scaled_target``). Loads are shares of what the server completes a second with 16 requests always under
way. Exit status 1 if ``slo`` had fewer requests within the target than ``prefill-first`` at some load.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cpu_server import (
    LONE_FIRST_S,
    LONE_TOKEN_S,
    PROMPT_MEAN,
    OtherPrograms,
    bench,
    server,
    where,
    write_workload,
)

from k3stack.workload.records import Record
from k3stack.workload.target import Target

LOADS = {"low": 0.2, "middle": 0.4, "near saturation": 0.75}
POLICIES = ("prefill-first", "slo")
STREAMS = 16
ANY_TARGET = Target(60.0, 1.0)


def machine(url: str, folder: Path) -> tuple[Target, float]:
    """The scaled target, and requests a second of a closed loop."""
    records = folder / "machine.jsonl"
    fresh = ("--workload", "fresh", "--input-len", str(PROMPT_MEAN), "--output-len", "32", "--concurrency", "1")
    bench(url, ANY_TARGET, records, *fresh, "--requests", "4", "--seed", "1")
    lone, _ = bench(url, ANY_TARGET, records, *fresh, "--requests", "16", "--seed", "2")
    workload = folder / "most.jsonl"
    write_workload(workload, 1.0, 0.0, 3, requests=4 * STREAMS)
    full, _ = bench(url, ANY_TARGET, records, "--workload", str(workload), "--concurrency", str(STREAMS), "--seed", "3")
    first, token = lone["ttft_s"]["p50"], lone["tpot_ms"]["p50"] / 1000
    return Target(2.0 / LONE_FIRST_S * first, 0.025 / LONE_TOKEN_S * token), full["requests_per_s"]


def runs(urls: dict[str, str], rate: float, folder: Path, args: argparse.Namespace) -> dict[str, list[Record]]:
    """All records of each policy at one rate: the same arrivals and lengths, the order of the two turned each time."""
    found: dict[str, list[Record]] = {policy: [] for policy in urls}
    for i in range(args.runs):
        workload = folder / "load.jsonl"
        write_workload(workload, rate, args.seconds, args.seed + i)
        for policy in list(urls)[:: 1 if i % 2 == 0 else -1]:
            args.text += 1  # other words in each run: nothing is found in the cache
            load = ("--workload", str(workload), "--seed", str(args.text))
            found[policy] += bench(urls[policy], ANY_TARGET, folder / "records.jsonl", *load)[1]
    return found


def row(name: str, rate: float, records: dict[str, list[Record]], target: Target) -> tuple[str, bool]:
    """A line of the table, and whether ``slo`` was at least as good."""
    share, p99 = {}, {}
    for policy, these in records.items():
        share[policy] = sum(target.met(r) for r in these) / len(these)
        p99[policy] = statistics.quantiles([r.ttft_s or 60.0 for r in these], n=100)[98]
    before, after = (share[p] for p in POLICIES)
    ratio = after / before if before else float("inf")
    text = (
        f"| {name} | {rate:.2f} | {len(records['slo'])} | {100 * before:.1f} % | {100 * after:.1f} % | {ratio:.2f} "
        f"| {p99['prefill-first']:.2f} / {p99['slo']:.2f} |"
    )
    return text, after >= before


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--loads", default=",".join(LOADS), help=f"of {', '.join(LOADS)} (default: all)")
    parser.add_argument("--runs", type=int, default=1, help="of each policy at each load")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--seed", type=int, default=900)
    args = parser.parse_args()
    args.text = 1000 * args.seed
    others = OtherPrograms()
    with tempfile.TemporaryDirectory() as name:
        good = measure(Path(name), args)
    print(f"\n{where()}; {others}")
    return 0 if good else 1


def measure(folder: Path, args: Any) -> bool:
    """Both servers, all loads; prints the table."""
    with server(args.model, folder) as url:
        target, most = machine(url, folder)
    limits = ("--target-ttft-s", f"{target.ttft_s:.4f}", "--target-tpot-ms", f"{1000 * target.tpot_s:.4f}")
    print(f"target {target.ttft_s:.2f} s, then {1000 * target.tpot_s:.0f} ms a token; closed loop {most:.2f}/s\n")
    print("| load | requests/s | requests | prefill-first | slo | ratio | p99 first token, s |")
    print("|---|---|---|---|---|---|---|")
    good = True
    with ExitStack() as stack:
        urls = {p: stack.enter_context(server(args.model, folder, "--policy", p, *limits)) for p in POLICIES}
        for policy, url in urls.items():  # the policy learns what steps cost here
            write_workload(folder / "warm.jsonl", 1.0, 0.0, 5, requests=24)
            bench(
                url, target, folder / f"{policy}.jsonl", "--workload", str(folder / "warm.jsonl"), "--concurrency", "8"
            )
        for name in args.loads.split(","):
            rate = LOADS[name] * most
            text, better = row(name, rate, runs(urls, rate, folder, args), target)
            print(text, flush=True)
            good &= better
    return good


if __name__ == "__main__":
    sys.exit(main())
