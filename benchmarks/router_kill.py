"""Two workers behind a router, one killed under load: what do the clients see?

    python benchmarks/router_kill.py --router sglang-router==0.3.2
    python benchmarks/router_kill.py --router smg --policy round_robin --kill engine

Installs the router into an environment of its own (``--venvs``), starts it with two scripted workers, sends streaming
requests, freezes one worker for 1.5 s (so that requests without a first byte pile up in it) and kills it.
Exit status 1 unless every request that had no first byte succeeded, every stream that was cut ended at the client as an
error, none was answered twice, and the router took the dead worker's successor in again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.scripted_worker import expected  # noqa: E402

TOKENS, STEP_MS, FROZEN_S = 60, 20.0, 1.5
LATE = 16
"""Requests of their own texts that come while a worker is frozen."""
WORDS = "state page block arena snapshot cache row token step queue prefix tree route expert chunk target".split()
MODULES = {"sglang-router": "sglang_router.launch_router", "smg": "smg.launch_router"}


def install(router: str, venvs: Path) -> tuple[Path, str]:
    """The Python of the router's environment, and its module."""
    name = router.partition("=")[0]
    python = venvs / router / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venvs / router)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", router], check=True)
    return python, MODULES[name]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Worker:
    """A scripted server process. ``log`` has a line of JSON for each request it finished."""

    def __init__(self, port: int, log: IO[str]) -> None:
        self.port, self.log = port, log
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(ROOT / "benchmarks" / "scripted_worker.py"), "--port", str(port)]
        command += ["--tokens", str(TOKENS), "--step-ms", str(STEP_MS)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def wait_until_up(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != self.url:
            raise SystemExit(f"the worker on port {self.port} did not start")

    def victim(self, kind: str) -> int:
        """The process to kill: of HTTP, or of the engine."""
        if kind == "worker":
            return self.process.pid
        return int(
            next(c.pid for c in psutil.Process(self.process.pid).children() if "spawn_main" in " ".join(c.cmdline()))
        )

    async def open(self, session: aiohttp.ClientSession) -> int:
        """Requests that run here now."""
        async with session.get(f"{self.url}/dashboard/data") as response:
            return int((await response.json())["open"])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@dataclass
class Answer:
    """What a client saw of one request."""

    rid: str
    sent: float
    first_byte: float | None = None
    status: int | None = None
    text: str = ""
    finish: str | None = None
    done: bool = False
    error: str | None = None

    @property
    def complete(self) -> bool:
        return self.done and self.finish == "stop" and self.text == expected(TOKENS) and self.error is None

    @property
    def cut(self) -> bool:
        """It broke off after its first byte, and said so: the connection broke, or an error event came and no
        finish_reason. A [DONE] behind the error event, as smg sends it, makes it no less an error to a client."""
        return self.first_byte is not None and self.finish is None and self.error is not None


async def ask(session: aiohttp.ClientSession, url: str, rid: str) -> Answer:
    """One streaming request. It begins with one of eight texts (a late one with its own), so that a router by prefix
    uses both workers."""
    text = rid if rid.startswith("late") else int(rid[-3:]) % 8
    prefix = " ".join(random.Random(text).choices(WORDS, k=60))
    body = {"model": "scripted", "messages": [{"role": "user", "content": f"{prefix} {rid}"}], "stream": True}
    answer = Answer(rid, time.monotonic())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers={"X-Request-ID": rid}) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = (await response.text())[:300]
                return answer
            async for line in response.content:
                answer.first_byte = answer.first_byte or time.monotonic()
                take(answer, line.strip())
    except aiohttp.ClientError as e:
        answer.error = repr(e)
    return answer


def take(answer: Answer, line: bytes) -> None:
    """One line of the stream."""
    if not line.startswith(b"data:"):
        return
    data = line[5:].strip()
    if data == b"[DONE]":
        answer.done = True
        return
    frame = json.loads(data)
    if "error" in frame:
        answer.error = str(frame["error"])[:300]
        return
    for choice in frame["choices"]:
        answer.text += choice["delta"].get("content") or ""
        answer.finish = choice["finish_reason"] or answer.finish


async def load(url: str, name: str, requests: int, concurrency: int, kill: Any) -> tuple[list[Answer], float]:
    """All answers, and when the kill happened."""
    answers: list[Answer] = []
    numbers = iter(range(requests))
    killed = 0.0

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            answers.append(await ask(session, url, f"{name}-{number:03d}"))

    async def killer() -> None:
        nonlocal killed
        while len(answers) < requests // 4:
            await asyncio.sleep(0.02)
        await asyncio.sleep(TOKENS * STEP_MS / 2000)  # streams run in step; this is the middle of their lives
        killed = await kill()

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(killer(), *(client(session) for _ in range(concurrency)))
    return answers, killed


async def wait_ready(url: str, workers: int) -> None:
    """Until the router has that many healthy workers."""
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            try:
                async with session.get(f"{url}/workers") as response:
                    found = await response.json()
                    if sum(bool(w.get("is_healthy", w.get("healthy"))) for w in found["workers"]) >= workers:
                        return
            except (aiohttp.ClientError, ValueError, KeyError):
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"the router never had {workers} healthy workers")


def served(logs: list[IO[str]]) -> Counter[str]:
    """How often each request was answered to its end, over all workers."""
    counts: Counter[str] = Counter()
    for log in logs:
        for line in Path(log.name).read_text().splitlines():
            if line.startswith("{"):
                entry = json.loads(line)
                if entry["end"] in ("stop", "length"):
                    counts[entry["rid"]] += 1
    return counts


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, kill, judge."""
    python, module = install(args.router, args.venvs)
    logs = [open(folder / f"worker{i}.log", "w+") for i in range(3)]  # noqa: SIM115  closed with the process
    workers = [Worker(free_port(), logs[0]), Worker(free_port(), logs[1])]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    command += ["--prometheus-port", str(free_port()), "--policy", args.policy, "--worker-startup-check-interval", "1"]
    command += [
        "--health-check-interval-secs",
        "2",
        "--health-failure-threshold",
        "2",
        "--health-success-threshold",
        "1",
    ]
    async with contextlib.AsyncExitStack() as closing:
        router_log = closing.enter_context(open(folder / "router.log", "w"))  # noqa: SIM115  closed by the stack
        router = None
        try:
            for worker in workers:
                worker.wait_until_up()
            command += ["--worker-urls", *(worker.url for worker in workers)]
            router = subprocess.Popen(
                command, stdout=router_log, stderr=router_log, env={**os.environ, "HF_HUB_OFFLINE": "1"}
            )
            await wait_ready(url, 2)

            late: list[asyncio.Task[Answer]] = []

            session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
            closing.push_async_callback(session.close)

            async def kill() -> float:
                open_on = [await worker.open(session) for worker in workers]
                if open_on[1] > open_on[0]:
                    workers.reverse()
                pid = workers[0].victim(args.kill)
                os.kill(pid, signal.SIGSTOP)
                late.extend(asyncio.create_task(ask(session, url, f"late-{i:03d}")) for i in range(LATE))
                await asyncio.sleep(FROZEN_S)
                os.kill(pid, signal.SIGKILL)
                return time.monotonic()

            answers, killed = await load(url, "kill", args.requests, args.concurrency, kill)
            answers += await asyncio.gather(*late)
            if args.kill == "worker":
                workers.append(Worker(workers[0].port, logs[2]))
                workers[2].wait_until_up()
            await wait_ready(url, 2)
            again, _ = await load(url, "again", 8, 8, lambda: asyncio.sleep(0, 0.0))
        finally:
            for worker in workers:
                worker.stop()
            if router is not None:
                router.terminate()
                router.wait(30)
    return judge(args, answers, killed, again, served(logs))


def judge(
    args: argparse.Namespace, answers: list[Answer], killed: float, again: list[Answer], counts: Counter[str]
) -> dict[str, Any]:
    """The summary; ``wrong`` lists what should not have happened."""
    late = [a for a in answers if a.sent < killed and (a.first_byte is None or a.first_byte > killed)]
    wrong = [vars(a) for a in [*answers, *again] if not a.complete and not a.cut]
    twice = {rid: n for rid, n in counts.items() if n > 1}
    return {
        "router": args.router,
        "policy": args.policy,
        "killed": args.kill,
        "requests": len(answers),
        "complete": sum(a.complete for a in answers),
        "cut_and_said_so": sum(a.cut for a in answers),
        "without_a_first_byte_at_the_kill": len(late),
        "of_these_complete": sum(a.complete for a in late),
        "tokens_of_the_cut": sorted(len(a.text) for a in answers if a.cut),
        "how_cuts_look": dict(Counter((a.error or "")[:90] for a in answers if a.cut)),
        "answered_twice": twice,
        "after_the_restart_complete": sum(a.complete for a in again),
        "wrong": wrong,
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="sglang-router==0.3.2", help="sglang-router or smg, with a version")
    parser.add_argument("--policy", default="cache_aware", choices=["cache_aware", "round_robin"])
    parser.add_argument("--kill", default="worker", choices=["worker", "engine"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "k3stack" / "venvs")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="k3-router-"))
    print(f"logs are in {folder}", file=sys.stderr)
    found = asyncio.run(run(args, folder))
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] or found["answered_twice"] or not found["cut_and_said_so"] else 0


if __name__ == "__main__":
    sys.exit(main())
