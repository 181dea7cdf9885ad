"""Four public load generators against a running server, each in an environment of its own.

    python benchmarks/clients/run.py all --base-url http://127.0.0.1:30000
    python benchmarks/clients/run.py vllm --requests 200 --concurrency 16

Installs what a client needs into ``--venvs`` (its heavy dependencies left out), writes a tokenizer folder from the
server's vocabulary, sends streaming chat requests, and reads from the client's own result how many succeeded. Exit
status 1 unless all did.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VOCABULARY = HERE.parents[1] / "src" / "k3stack" / "models" / "data" / "nano"
INPUT, OUTPUT = 100, 24
"""Tokens of a prompt and of an answer."""


@dataclass(frozen=True)
class Job:
    """One run: where, how much, and where files go."""

    bin: Path
    url: str
    model: str
    requests: int
    concurrency: int
    tokenizer: Path
    out: Path

    @property
    def python(self) -> str:
        return str(self.bin / "python")


@dataclass(frozen=True)
class Client:
    """How to install a client, run it, and read (succeeded, failed) from what it wrote."""

    installs: tuple[tuple[str, ...], ...]
    command: Callable[[Job], list[str]]
    result: Callable[[Job], tuple[int, int]]


def aiperf(job: Job) -> list[str]:
    return [
        str(job.bin / "aiperf"), "profile", "--model", job.model, "--url", job.url, "--endpoint-type", "chat",
        "--streaming", "--concurrency", str(job.concurrency), "--request-count", str(job.requests),
        "--tokenizer", str(job.tokenizer), "--isl", str(INPUT), "--isl-stddev", "0", "--osl", str(OUTPUT),
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(job.out), "--ui", "none",
    ]  # fmt: skip


def aiperf_result(job: Job) -> tuple[int, int]:
    records = [json.loads(line) for line in (job.out / "profile_export.jsonl").read_text().splitlines()]
    failed = sum(record.get("error") is not None for record in records)
    return len(records) - failed, failed


def guidellm(job: Job) -> list[str]:
    return [
        str(job.bin / "guidellm"), "run", "--backend", f"kind=openai_http,target={job.url},model={job.model}",
        "--profile", f"kind=concurrent,streams={job.concurrency}",
        "--constraint", f"kind=max_requests,count={job.requests}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
        "--tokenizer", f"kind=hf_auto,model={job.tokenizer}", "--disable-progress",
        "--output", f"kind=json,path={job.out / 'result.json'}",
    ]  # fmt: skip


def guidellm_result(job: Job) -> tuple[int, int]:
    [run] = json.loads((job.out / "result.json").read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    return totals["successful"], totals["errored"] + totals["incomplete"]


def vllm(job: Job) -> list[str]:
    start = (
        "import asyncio\n"
        "from vllm.benchmarks.serve import add_cli_args, main_async\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\n"
        "add_cli_args(parser)\n"
        "asyncio.run(main_async(parser.parse_args()))\n"
    )
    return [
        job.python, "-c", start, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", job.url,
        "--model", job.model, "--tokenizer", str(job.tokenizer), "--dataset-name", "random",
        "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--num-prompts", str(job.requests),
        "--max-concurrency", str(job.concurrency), "--ignore-eos", "--save-result",
        "--result-dir", str(job.out), "--result-filename", "result.json",
    ]  # fmt: skip


def vllm_result(job: Job) -> tuple[int, int]:
    found = json.loads((job.out / "result.json").read_text())
    return found["completed"], found["failed"]


def sglang(job: Job, backend: str = "sglang-oai-chat") -> list[str]:
    return [
        job.python, str(HERE / "sglang_bench.py"), "--backend", backend, "--base-url", job.url,
        "--model", job.model, "--tokenizer", str(job.tokenizer), "--dataset-name", "random-ids",
        "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--random-range-ratio", "1",
        "--num-prompts", str(job.requests), "--max-concurrency", str(job.concurrency),
        "--output-file", str(job.out / "result.jsonl"),
    ]  # fmt: skip


def sglang_result(job: Job) -> tuple[int, int]:
    found = json.loads((job.out / "result.jsonl").read_text().splitlines()[-1])
    return found["completed"], job.requests - found["completed"]


SGLANG_INSTALLS = (
    ("--no-deps", "sglang==0.5.23"),
    ("aiohttp", "datasets", "msgspec", "numpy", "orjson", "pillow", "psutil", "pybase64", "pyzmq", "requests", "tqdm",
     "transformers==5.19.0"),
)  # fmt: skip
CLIENTS = {
    "aiperf": Client((("aiperf==0.13.0",),), aiperf, aiperf_result),
    "guidellm": Client((("guidellm==0.8.1",),), guidellm, guidellm_result),
    "vllm": Client(
        (
            ("--no-deps", "vllm==0.33.0", "xgrammar"),
            ("aiohttp", "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "cloudpickle", "datasets", "einops",
             "fastapi",
             "llguidance", "msgspec", "numpy", "openai", "openai-harmony", "partial-json-parser", "pillow", "psutil",
             "prometheus-client", "py-cpuinfo", "pybase64", "pydantic", "pyzmq", "regex", "requests", "torch==2.13.0",
             "tqdm", "transformers==5.19.0", "urllib3", "uvloop"),
        ),
        vllm, vllm_result,
    ),
    "sglang": Client(SGLANG_INSTALLS, sglang, sglang_result),
    "sglang-native": Client(SGLANG_INSTALLS, lambda job: sglang(job, "sglang"), sglang_result),
}  # fmt: skip


def environment(venvs: Path, name: str, installs: tuple[tuple[str, ...], ...]) -> Path:
    """The ``bin`` folder of the client's environment; made where it is not there yet."""
    folder = venvs / name.partition("-")[0]
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for packages in installs:
            subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True)
        done.touch()
    return folder / "bin"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=[*CLIENTS, "all"])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "k3stack" / "venvs")
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.base_url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    good = True
    for name in CLIENTS if args.client == "all" else [args.client]:
        client = CLIENTS[name]
        folder = environment(args.venvs, name, client.installs)
        with tempfile.TemporaryDirectory(prefix=f"k3-{name}-") as out:
            tokenizer = Path(out) / "tokenizer"
            job = Job(folder, args.base_url, model, args.requests, args.concurrency, tokenizer, Path(out))
            write = [job.python, str(HERE / "tokenizer.py"), str(VOCABULARY), str(tokenizer)]
            subprocess.run(write, check=True)
            report = one(name, client, job)
        good &= report["succeeded"] == args.requests and not report["failed"]
        print(json.dumps(report), flush=True)
    return 0 if good else 1


def one(name: str, client: Client, job: Job) -> dict[str, Any]:
    """Run one client and read its result."""
    began = time.monotonic()
    ended = subprocess.run(client.command(job), capture_output=True, text=True, cwd=job.out)
    seconds = round(time.monotonic() - began, 1)
    try:
        succeeded, failed = client.result(job)
    except (OSError, KeyError, ValueError) as e:
        print(ended.stdout[-3000:], ended.stderr[-3000:], f"{name} left no result: {e!r}", sep="\n", file=sys.stderr)
        succeeded, failed = 0, job.requests
    return {
        "client": name,
        "succeeded": succeeded,
        "failed": failed,
        "exit_status": ended.returncode,
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
