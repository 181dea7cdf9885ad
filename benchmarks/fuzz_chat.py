"""Random mutations of valid requests against a running server, by clients of every temper.

Most clients read their answer; some leave in its middle, some before it, some send half a body, some read a byte now
and then. Afterwards the server must be as before: nothing open, nothing running, no memory held by requests.

    python benchmarks/fuzz_chat.py                         starts a server on the built-in model and fuzzes it
    python benchmarks/fuzz_chat.py --base-url http://127.0.0.1:30000 --requests 10000 --seed 1

Prints a summary as JSON; exit status 1 when something was wrong: a status of 500 and above, an answer that is not what
its status promises, one that took longer than --timeout, or something left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.mutations import SEEDS, request  # noqa: E402

CLIENTS = {"reads": 80, "leaves in the middle": 8, "leaves before the answer": 5, "sends half": 3, "reads slowly": 4}


@dataclass
class Found:
    """What happened so far."""

    statuses: Counter[str] = field(default_factory=Counter)
    clients: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    longest_s: float = 0.0
    longest: int = -1
    """Number of the request that took longest."""

    def report(self, number: int, path: str, body: bytes, what: str) -> None:
        """Keep what is needed to repeat the request."""
        self.wrong.append(
            {"number": number, "path": path, "what": what, "body": body.decode("utf-8", "replace")[:4000]}
        )
        print(f"request {number} {path}: {what}", file=sys.stderr, flush=True)


@dataclass
class Target:
    host: str
    port: int
    timeout_s: float

    def head(self, path: str, length: int, number: int) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"X-Request-ID: fuzz-{number}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        ).encode()


async def one(target: Target, found: Found, number: int, rng: random.Random, paths: list[str]) -> None:
    """One request by a client of a random temper."""
    path, body = request(rng, paths)
    temper = rng.choices(list(CLIENTS), list(CLIENTS.values()))[0]
    found.clients[temper] += 1
    found.paths[path] += 1
    began = time.monotonic()
    try:
        async with asyncio.timeout(target.timeout_s):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=2**24)
            try:
                await _talk(target, found, number, rng, path, body, temper, reader, writer)
            finally:
                writer.close()
    except TimeoutError:
        found.report(number, path, body, f"no end within {target.timeout_s:g} s")
    except (ConnectionError, asyncio.IncompleteReadError) as e:
        # A server may close the connection while a body is still being sent, but must have answered.
        found.report(number, path, body, f"the connection broke: {e!r}")
    seconds = time.monotonic() - began
    if seconds > found.longest_s:
        found.longest_s, found.longest = seconds, number


async def _talk(
    target: Target, found: Found, number: int, rng: random.Random, path: str, body: bytes, temper: str,
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
) -> None:  # fmt: skip
    writer.write(target.head(path, len(body), number))
    if temper == "sends half":
        writer.write(body[: len(body) // 2])
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.2)
        return
    writer.write(body)
    await writer.drain()
    if temper == "leaves before the answer":
        await asyncio.sleep(rng.random() * 0.1)
        return
    if temper == "leaves in the middle":
        await reader.read(rng.choice((1, 200, 600, 2000)))
        return
    if temper == "reads slowly":
        data = await _slowly(reader, rng)
    else:
        data = await reader.read()
    head, _, rest = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
    found.statuses[str(status)] += 1
    if problem := check(status, head.lower(), rest, found):
        found.report(number, path, body, problem)


async def _slowly(reader: asyncio.StreamReader, rng: random.Random) -> bytes:
    data = b""
    while True:
        await asyncio.sleep(rng.random() * 0.2)
        part = await reader.read(64 if len(data) < 2_000 else 2**16)
        if not part:
            return data
        data += part


def unchunked(body: bytes) -> bytes | None:
    """A chunked body put together; None when it does not end properly."""
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return out
        out, body = out + body[:length], body[length + 2 :]
    return None


def check(status: int, head: bytes, body: bytes, found: Found) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if status >= 500 or status < 200:
        return f"status {status}: {body[:300]!r}"
    if b"transfer-encoding: chunked" in head:
        whole = unchunked(body)
        if whole is None:
            return "the chunked body does not end"
        body = whole
    if b"text/event-stream" in head:
        return _check_stream(body, found)
    if b"application/json" not in head:
        return None if status == 200 else f"status {status} without JSON: {head!r}"
    try:
        answer = json.loads(body)
    except ValueError as e:
        return f"not JSON: {e}: {body[:300]!r}"
    if status >= 400:
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
            return f"status {status} without error.message: {body[:300]!r}"
        found.ends[f"refused {status}"] += 1
    else:
        found.ends["whole"] += 1
    return None


def _check_stream(body: bytes, found: Found) -> str | None:
    frames = [frame for frame in body.split(b"\n\n") if frame]
    for frame in frames:
        data = next((line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")), b"")
        if data == b"[DONE]":
            continue
        try:
            json.loads(data)
        except ValueError:
            return f"a frame is not JSON: {frame[:300]!r}"
    last = frames[-1] if frames else b""
    if b"[DONE]" in last or b"message_stop" in last:
        found.ends["stream"] += 1
    elif b'"error"' in last:
        return f"a stream broke off: {last[:300]!r}"
    else:
        return f"a stream without an end: {last[:300]!r}"
    return None


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def left_behind(base_url: str, wait_s: float = 30.0) -> dict[str, Any]:
    """What the server still holds for requests, once it had ``wait_s`` to let go; all zero when it is idle."""
    deadline = time.monotonic() + wait_s
    while True:
        data = get(f"{base_url}/dashboard/data")
        row = dict(zip(data["samples"]["columns"], data["samples"]["rows"][-1], strict=True))
        names = ("blocks_running", "pages_running", "waiting", "prefilling", "decoding", "finishing")
        held = {"open": data["open"], **{name: row[name] for name in names}}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        print(f"still held: {held}", file=sys.stderr, flush=True)
        time.sleep(1)


async def fuzz(base_url: str, requests: int, concurrency: int, seed: int, timeout_s: float) -> Found:
    """Send ``requests`` requests, ``concurrency`` at a time."""
    host, port = re.fullmatch(r"http://([^:/]+):(\d+)/?", base_url).groups()  # type: ignore[union-attr]
    target = Target(host, int(port), timeout_s)
    served = get(f"{base_url}/openapi.json")["paths"]
    paths = [path for path in SEEDS if path in served]
    found = Found()
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await one(target, found, number, random.Random(f"{seed}-{number}"), paths)
            if number % 500 == 499:
                print(f"{number + 1} requests, {dict(found.statuses)}", file=sys.stderr, flush=True)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return found


def serve(*options: str) -> tuple[subprocess.Popen[str], str]:
    """A server on the built-in model and a free port."""
    options = options or ("--arena-gib", "0.05", "--context-length", "2048")
    log = tempfile.NamedTemporaryFile("w+", prefix="k3-fuzz-", suffix=".log", delete=False)  # noqa: SIM115  the server's
    process = subprocess.Popen(
        [sys.executable, "-m", "k3stack", "serve", "--model-path", "nano", "--port", "0",
         *options, "--disable-request-log"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        stderr=log, text=True,
    )  # fmt: skip
    print(f"the server's log is {log.name}", file=sys.stderr)
    while process.poll() is None:
        if found := re.search(r"answers at (http://\S+)", Path(log.name).read_text()):
            return process, found.group(1)
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until a request counts as hanging")
    args = parser.parse_args()
    sys.setrecursionlimit(20_000)  # bodies are nested deeper than Python's json goes by itself
    process, url = (None, args.base_url) if args.base_url else serve()
    try:
        began = time.monotonic()
        found = asyncio.run(fuzz(url, args.requests, args.concurrency, args.seed, args.timeout))
        seconds = time.monotonic() - began
        held = left_behind(url)
    finally:
        if process is not None:
            process.terminate()
            status = process.wait(90)
            if status:
                print(f"the server ended with status {status}", file=sys.stderr)
    summary = {
        "requests": args.requests,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "longest_s": round(found.longest_s, 2),
        "longest": found.longest,
        "statuses": dict(sorted(found.statuses.items())),
        "ends": dict(found.ends),
        "clients": dict(found.clients),
        "paths": dict(found.paths),
        "left_behind": held,
        "wrong": found.wrong,
    }
    print(json.dumps(summary, indent=2))
    return 1 if found.wrong or any(held.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
