"""Does `k3 bench` with many streams at a time still measure the server? Beside a server that knows its own times.

    python benchmarks/bench_streams.py --streams 500 --gap-ms 25

The server (``paced_server.py``) and the client share this machine. The client's percentiles are compared with the times
at which the server really wrote; exit status 1 unless they agree within 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--requests", type=int, help="default: three for each stream")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--first-ms", type=float, default=500.0)
    parser.add_argument("--spread-ms", type=float, default=1000.0)
    parser.add_argument("--gap-ms", type=float, default=25.0)
    parser.add_argument("--prompt", type=int, default=500)
    args = parser.parse_args()
    pace = ["--first-ms", str(args.first_ms), "--gap-ms", str(args.gap_ms), "--spread-ms", str(args.spread_ms)]
    server = subprocess.Popen([sys.executable, str(HERE / "paced_server.py"), *pace], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run(url, Path(folder) / "records.jsonl", args)
    finally:
        server.terminate()
        server.wait()


def run(url: str, records: Path, args: argparse.Namespace) -> int:
    """Load, compare, print."""
    requests = args.requests or 3 * args.streams
    command = [sys.executable, "-m", "k3stack", "bench", "--base-url", url, "--workload", "fresh", "--json"]
    command += ["--concurrency", str(args.streams), "--requests", str(requests), "--input-len", str(args.prompt)]
    command += ["--output-len", str(args.tokens), "--records", str(records)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(done.stderr, file=sys.stderr)
        return 1
    summary = json.loads(done.stdout)
    with urllib.request.urlopen(f"{url}/times") as answer:
        times = np.array(json.load(answer))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}")
    print(f"{args.streams} streams, {requests} requests of {args.tokens} tokens, one every {args.gap_ms:g} ms")
    print(f"{'':<18}{'server':>10}{'client':>10}{'':>9}")
    good = summary["completed"] == requests
    for i, (name, key) in enumerate((("first token, s", "ttft_s"), ("per token, ms", "tpot_ms"))):
        for p in (50, 90, 99):
            here, there = summary[key][f"p{p}"], float(np.quantile(times[:, i], p / 100))
            good &= abs(here / there - 1) <= 0.05
            print(f"{name:<15}p{p}{there:>10.4g}{here:>10.4g}{100 * (here / there - 1):>+7.1f} %")
    lag = summary["client"]
    print(f"client: {100 * lag['cpu_share']:.0f} % of a core, late by {1000 * lag['p50_s']:.1f} ms (p50),", end=" ")
    print(f"{1000 * lag['p99_s']:.1f} ms (p99)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
