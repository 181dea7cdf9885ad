"""`k3 bench` beside aiperf: the same prompts and lengths to the same server, in turn, and what each measured.

    python benchmarks/bench_vs_aiperf.py                      # a server of known times (paced_server.py)
    python benchmarks/bench_vs_aiperf.py --server nano        # K3-nano on this machine's CPU
    python benchmarks/bench_vs_aiperf.py --base-url http://127.0.0.1:30000

aiperf gets an environment of its own (``benchmarks/clients``). Exit status 1 unless time to first token, time a token
and output tokens a second agree within 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent))

from clients.run import CLIENTS, HERE, VOCABULARY, environment
from cpu_server import ENVIRONMENT, K3, OtherPrograms, server, where

FIGURES = {
    "first token, mean, s": (("ttft_s", "mean"), ("time_to_first_token", "avg"), 1e-3),
    "first token, p50, s": (("ttft_s", "p50"), ("time_to_first_token", "p50"), 1e-3),
    "per token, mean, ms": (("tpot_ms", "mean"), ("inter_token_latency", "avg"), 1.0),
    "per token, p50, ms": (("tpot_ms", "p50"), ("inter_token_latency", "p50"), 1.0),
    "output tokens/s": (("output_tokens_per_s",), ("output_token_throughput", "avg"), 1.0),
}
"""Name: path in the summary of k3 bench, path in aiperf's export, and the factor to its unit."""
WORDS = ("river stone cloud amber table seven quick north lamp green paper violin harbor candle silver meadow").split()


@contextlib.contextmanager
def paced() -> Iterator[str]:
    """A server of known times; its answers are reasoning alone."""
    command = [sys.executable, str(Path(__file__).parent / "paced_server.py"), "--gap-ms", "20", "--spread-ms", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def write_prompts(folder: Path, seed: int, args: argparse.Namespace) -> tuple[Path, Path]:
    """The same requests for both: a message log, and aiperf's single turns. No two runs share a prompt."""
    rng, lengths = random.Random(seed), random.Random(0)
    ours, theirs = folder / f"ours-{seed}.jsonl", folder / f"theirs-{seed}.jsonl"
    with ours.open("w") as a, theirs.open("w") as b:
        for _ in range(args.requests):
            text = " ".join(rng.choices(WORDS, k=lengths.randint(args.words // 2, args.words * 3 // 2)))
            answer = lengths.randint(args.tokens // 2, args.tokens * 3 // 2)
            message = {"role": "user", "content": text}
            a.write(json.dumps({"messages": [message], "output_tokens": answer}) + "\n")
            b.write(json.dumps({"text": text, "output_length": answer}) + "\n")
    return ours, theirs


def run_k3(url: str, prompts: Path, args: argparse.Namespace) -> dict[str, Any]:
    command = [*K3, "bench", "--base-url", url, "--workload", str(prompts), "--concurrency", str(args.concurrency)]
    done = subprocess.run([*command, "--json"], env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_aiperf(url: str, model: str, prompts: Path, bin_folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    out = prompts.with_suffix("")
    tokenizer = prompts.parent / "tokenizer"
    if not tokenizer.exists():
        subprocess.run([bin_folder / "python", HERE / "tokenizer.py", VOCABULARY, tokenizer], check=True)
    command = [
        str(bin_folder / "aiperf"), "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--concurrency", str(args.concurrency), "--request-count", str(args.requests), "--tokenizer", str(tokenizer),
        "--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--extra-inputs", "ignore_eos:true",
        "--use-server-token-count", "--workers-max", "1", "--artifact-dir", str(out), "--ui", "none",
        "--no-server-metrics", "--no-gpu-telemetry",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=prompts.parent)
    path = out / "profile_export_aiperf.json"
    if not path.exists():
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def at(summary: Any, path: tuple[str, ...]) -> float:
    for key in path:
        summary = summary[key]
    return float(summary)


def compare(url: str, model: str, folder: Path, args: argparse.Namespace) -> int:
    """Runs in turn, then the table of medians over runs."""
    client = CLIENTS["aiperf"]
    bin_folder = environment(args.venvs, "aiperf", client.installs)
    ours, theirs = [], []
    for i in range(args.runs + 1):
        a, b = write_prompts(folder, 2 * i, args)[0], write_prompts(folder, 2 * i + 1, args)[1]
        found = run_k3(url, a, args), run_aiperf(url, model, b, bin_folder, args)
        if i:  # the first round warms up
            ours.append(found[0])
            theirs.append(found[1])
    print(f"{args.runs} runs each in turn, {args.requests} requests, {args.concurrency} at a time")
    print(f"{'':<24}{'k3 bench':>12}{'aiperf':>12}")
    good = True
    for name, (here, there, factor) in FIGURES.items():
        x = statistics.median(at(s, here) for s in ours)
        y = statistics.median(at(s, there) * factor for s in theirs)
        good &= abs(x / y - 1) <= 0.05
        print(f"{name:<24}{x:>12.4g}{y:>12.4g}{100 * (x / y - 1):>+8.1f} %")
    return 0 if good else 1


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="paced", help="paced, nano, or another model for `k3 serve`")
    parser.add_argument("--base-url", help="a server that is up")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--words", type=int, default=100, help="of a prompt, on average")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, on average")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "k3stack" / "venvs")
    args = parser.parse_args()
    others = OtherPrograms()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if args.base_url:
            url = args.base_url
        elif args.server == "paced":
            url = stack.enter_context(paced())
        else:
            url = stack.enter_context(server(args.server, folder))
        with urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        status = compare(url, model, folder, args)
    print(f"{where()}; aiperf 0.13.0; {others}")
    return status


if __name__ == "__main__":
    sys.exit(main())
