"""What benchmarks of the real server on a CPU share: start it, send it load, turn its step log into a scenario.

Load is the study's fresh workload made small for a small model: the same spread of prompts and answers around other
means, a third of the answers tool calls. The target is the study's as well, scaled to the machine: as many times the
time of a lone request as there.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np

from k3stack.estimate.measured import MeasuredCost
from k3stack.estimate.work import StepLoad
from k3stack.simulator.scenario import Scenario
from k3stack.workload.lengths import arrival_times, lognormal, truncated_exponential
from k3stack.workload.records import Record, read_records, write_records
from k3stack.workload.target import Target

PROMPT_MEAN, PROMPT_LOW, PROMPT_HIGH = 400, 64, 3_000
ANSWER_MEAN, ANSWER_LOW, ANSWER_HIGH = 32, 4, 64
LONE_FIRST_S, LONE_TOKEN_S = 0.44, 0.0077
"""The study's server, one request of mean length alone; its target is 2 s and 25 ms."""
ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
K3 = [sys.executable, "-m", "k3stack"]


@contextlib.contextmanager
def server(model: str, folder: Path, *options: str) -> Iterator[str]:
    """A running server's address; it has ended, and its step log is complete, when the context has."""
    command = [*K3, "serve", "--model-path", model, "--host", "127.0.0.1", "--port", "0", "--disable-request-log"]
    log = (folder / "serve.log").open("ab")
    process = subprocess.Popen([*command, *options], env=ENVIRONMENT, stderr=log, stdout=log)
    try:
        yield _address(process, folder / "serve.log", log.tell())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log.close()


def _address(process: subprocess.Popen[bytes], log: Path, start: int) -> str:
    """Wait until the server says where it is and answers there."""
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"the server ended at its start:\n{log.read_text()[-2000:]}")
        said = log.read_bytes()[start:].decode(errors="replace")
        if " answers at http" in said:
            return said.partition(" answers at ")[2].split()[0]
        time.sleep(0.2)
    sys.exit("the server did not start within two minutes")


def bench(url: str, target: Target, records: Path, *options: str) -> tuple[dict[str, Any], list[Record]]:
    """One run of `k3 bench`: its summary and its records."""
    command = [*K3, "bench", "--base-url", url, "--json", "--records", str(records), "--temperature", "0"]
    command += ["--ttft", f"{target.ttft_s:.6f}", "--tpot", f"{1000 * target.tpot_s:.6f}", *options]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    return json.loads(done.stdout), read_records(records)[0]


def write_workload(path: Path, rate: float, seconds: float, seed: int, requests: int | None = None) -> None:
    """A file of records for `--workload`: the small fresh workload.

    ``requests``: so many, for a closed loop that does not look at times.
    """
    rng = np.random.default_rng([seed, 7])
    times = arrival_times(rng, rate, seconds) if requests is None else np.zeros(requests)
    n = len(times)
    prompts = lognormal(rng, n, PROMPT_MEAN, 0.7, PROMPT_LOW, PROMPT_HIGH)
    answers = truncated_exponential(rng, n, ANSWER_MEAN, ANSWER_LOW, ANSWER_HIGH)
    _write(path, times.tolist(), prompts.tolist(), answers.tolist(), (rng.random(n) < 1 / 3).tolist())


def write_lone(path: Path, requests: int, every_s: float) -> None:
    """A file of short requests so far apart that each finds the server idle, as in light traffic."""
    prompts = np.linspace(PROMPT_LOW, 2 * PROMPT_MEAN, requests).round().astype(int).tolist()
    times = [i * every_s for i in range(requests)]
    _write(path, times, prompts, [ANSWER_LOW] * requests, [False] * requests)


def _write(path: Path, times: list[float], prompts: list[int], answers: list[int], tools: list[bool]) -> None:
    records = [
        Record(rid=f"{i}.0", session=i, turn=0, arrival_s=at, prompt_tokens=prompt, asked_tokens=answer, tool_call=tool)
        for i, (at, prompt, answer, tool) in enumerate(zip(times, prompts, answers, tools, strict=True))
    ]
    write_records(path, records, {})


def scaled_target(cost: MeasuredCost, chunk_tokens: int) -> Target:
    """The study's target for this machine: the same multiples of a lone request's first token and time a token."""
    first = cost.before_s(PROMPT_MEAN) + cost.prompt_s(PROMPT_MEAN, chunk_tokens)
    token = cost.seconds(StepLoad(decode_rows=1, decode_context=PROMPT_MEAN + ANSWER_MEAN // 2, samples=1))
    return Target(2.0 / LONE_FIRST_S * first, 0.025 / LONE_TOKEN_S * token)


def cost_of(scenario: Scenario) -> MeasuredCost:
    """The step times of a scenario that was fitted to a step log."""
    cost = scenario.servers[0].cost
    assert cost is not None
    return cost


def where() -> str:
    """The machine, what ran on it, and when: what goes beside a figure."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{processor}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {version('torch')}; {today}"


class OtherPrograms:
    """How much of the processors other programs took, from now until this is printed (children must have ended)."""

    def __init__(self) -> None:
        self._begun, self._before = time.monotonic(), self._taken()

    def __str__(self) -> str:
        whole = (time.monotonic() - self._begun) * (os.cpu_count() or 1)
        return f"other programs took {100 * (self._taken() - self._before) / whole:.0f} % of the processors"

    @staticmethod
    def _taken() -> float:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy - sum(u.ru_utime + u.ru_stime for u in own)
