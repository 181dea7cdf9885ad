"""What the HTTP process spends on one streamed token (parsing, frames, sending), over an engine with a script.

Starts a whole server (HTTP process and scripted engine process) and a client that opens ``--streams`` chats and
counts events, one a token. The figure is CPU time of the HTTP process over tokens, which other load on the machine
hardly changes. First it checks that every stream is complete and correct. Run: python benchmarks/http_layer.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def serve(tokens: int, step_seconds: float, thinking: bool, profile: str | None, pipe: int) -> None:
    """The HTTP process."""
    from k3stack.config.flags import parse_serve
    from k3stack.engine.client import EngineClient
    from k3stack.engine.scripted import Script
    from k3stack.server.run import Runner, build_service, listen, setup_logging
    from tests.unit.server.harness import MODEL, turn

    setup_logging("warning")
    command = parse_serve(["--model-path", str(MODEL), "--port", "0", "--disable-request-log"])
    words = "the quick brown fox jumps over the lazy dog " * (tokens // 44 + 1)
    reply = turn(words[:tokens] + ("[TC][RO]x[RC][MC]" if thinking else "[RC][MC]"))
    engine = EngineClient(command.engine, script=Script(tuple(reply), step_seconds))
    listener = listen("127.0.0.1", 0)
    runner = Runner(
        build_service(command, engine), announce=lambda: os.write(pipe, b"%d\n" % listener.getsockname()[1]) and None
    )
    if profile is None:
        runner.run_until_stopped(listener)
        return
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(runner.run_until_stopped, listener)
    with open(profile, "w") as out:
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(40)


async def one_stream(port: int, body: bytes) -> tuple[int, bytes]:
    """Send one chat over a bare socket; returns the number of events and the last bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    events, tail = 0, b""
    while chunk := await reader.read(1 << 16):
        events += chunk.count(b"data: ")
        tail = (tail + chunk)[-200:]
    writer.close()
    return events, tail


async def load(port: int, streams: int, body: bytes) -> list[tuple[int, bytes]]:
    """All streams at once."""
    return await asyncio.gather(*(one_stream(port, body) for _ in range(streams)))


def client(port: int, streams: int, body: bytes, expected: int) -> None:
    """The client process: one warm-up, then the load."""
    for events, tail in asyncio.run(load(port, streams, body)):
        if abs(events - expected) > 6 or b"[DONE]" not in tail:
            sys.exit(f"a stream had {events} events instead of about {expected}, and ended in {tail!r}")


def start(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int]:
    """Our HTTP process, and its port."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    call = f"serve({args.tokens}, {args.step_ms / 1000}, {args.thinking}, {args.profile!r}, {write_end})"
    code = f"from benchmarks.http_layer import serve; {call}"
    server = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=(write_end,))
    os.close(write_end)
    return server, int(os.read(read_end, 20))


def start_peer(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int]:
    """vLLM's server over a script of the same length and pace (see peer_vllm.py), and its port."""
    folder = tempfile.mkdtemp(prefix="k3-peer-")
    here = Path(__file__).parent
    vocabulary = ROOT / "src" / "k3stack" / "models" / "data" / "nano"
    subprocess.run([args.peer, str(here / "clients" / "tokenizer.py"), str(vocabulary), folder], check=True)
    command = [args.peer, str(here / "peer_vllm.py"), "--model", folder, "--tokens", str(args.tokens)]
    command += ["--step-ms", str(args.step_ms), *args.peer_options.split()]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith(b"port "):
            return server, int(line.split()[1])
    sys.exit(f"the peer did not start; run it by hand: {' '.join(command)}")


def measure(server: subprocess.Popen[bytes], port: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """One row a run, after a warm-up."""
    fields = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": args.tokens + 50}
    if args.peer:
        fields["model"] = "scripted"
    elif not args.thinking:
        fields["thinking"] = {"type": "disabled"}
    body = json.dumps(fields).encode()
    context = multiprocessing.get_context("spawn")
    rows = []
    for run in range(args.runs + 1):
        before, began = cpu_seconds(server.pid), time.monotonic()
        process = context.Process(target=client, args=(port, args.streams, body, args.tokens))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit("the check failed: no figure")
        spent, wall = cpu_seconds(server.pid) - before, time.monotonic() - began
        if run:
            total = args.streams * args.tokens
            rows.append({"us_per_token": 1e6 * spent / total, "tokens_per_core_s": total / spent, "wall_s": wall})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="tokens a stream")
    parser.add_argument("--step-ms", type=float, default=0.0, help="pace of the engine; 0: as fast as it can")
    parser.add_argument("--thinking", action="store_true", help="measure reasoning instead of content")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", help="file for a profile of the HTTP process (slows it down)")
    parser.add_argument("--peer", metavar="PYTHON", help="measure vLLM's server instead, in that environment of its")
    parser.add_argument("--peer-options", default="", help="more options of vLLM's server")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    server, port = start_peer(args) if args.peer else start(args)
    try:
        rows = measure(server, port, args)
    finally:
        server.terminate()
        server.wait()
    best = min(rows, key=lambda row: row["us_per_token"])
    result = {
        "server": "vllm" if args.peer else "k3stack", "streams": args.streams, "tokens": args.tokens,
        "step_ms": args.step_ms, "runs": rows, "best": best,
        "python": platform.python_version(), "machine": platform.processor() or platform.machine(),
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for row in rows:
        print(f"{row['us_per_token']:6.1f} µs of CPU a token, {row['tokens_per_core_s']:8.0f} tokens/s a core")
    print(f"best of {args.runs}: {best['us_per_token']:.1f} µs, {best['tokens_per_core_s']:.0f} tokens/s a core")


if __name__ == "__main__":
    main()
