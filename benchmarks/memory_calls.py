"""What the memory costs: microseconds of its calls, and requests per second through it, with nothing else running.

Kimi-K3's true sizes at TP8 (64-token pages, 32 to a block). Prints one line a case:

- calls of a decode step: ``extend`` with room, ``advance`` between page boundaries, both at a boundary;
- a request of 8,400 tokens from ``open`` to ``close``, fresh, and in an arena that is always full;
- a returning session of 118,000 tokens that adds 600.

    python benchmarks/memory_calls.py [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from datetime import date

from k3stack import __version__
from k3stack.config.models import model_geometry
from k3stack.estimate.pools import block_layout, plan_pools
from k3stack.memory import Memory

VOCAB = 163_840


def memory(blocks: int) -> Memory:
    layout = block_layout(model_geometry("kimi-k3"), tp=8)
    return Memory(plan_pools(layout, blocks * layout.block_bytes, max_running=1024))


def prompts(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB) for _ in range(length)) for _ in range(count)]


def decode_calls(rows: int = 64, context: int = 8_000, steps: int = 640) -> dict[str, float]:
    """Microseconds a call, rows side by side as in a decode step."""
    mem = memory(rows * 8)
    ids = [list(p) for p in prompts(rows, context)]
    rng = random.Random(1)
    for seq, prompt in enumerate(ids):
        mem.open(seq, prompt)
        mem.extend(seq, context)
        mem.advance(seq, prompt, context)
    spent = {"extend": 0.0, "advance": 0.0, "extend at a boundary": 0.0, "advance at a boundary": 0.0}
    calls = dict.fromkeys(spent, 0)
    for step in range(steps):
        length = context + step + 1
        for prompt in ids:
            prompt.append(rng.randrange(VOCAB))
        edge = " at a boundary" if (length - 1) % mem.page_tokens == 0 else ""
        t0 = time.process_time()
        for seq in range(rows):
            mem.extend(seq, length)
        spent["extend" + edge] += time.process_time() - t0
        calls["extend" + edge] += rows
        edge = " at a boundary" if length % mem.page_tokens == 0 else ""
        t0 = time.process_time()
        for seq in range(rows):
            mem.advance(seq, ids[seq], length)
        spent["advance" + edge] += time.process_time() - t0
        calls["advance" + edge] += rows
    mem.check()
    return {f"{name}, us": spent[name] / calls[name] * 1e6 for name in spent}


def life(mem: Memory, ids: tuple[int, ...], output: tuple[int, ...], chunk: int) -> int:
    """One request alone, decode in strides of a page; returns the tokens it reused."""
    opened = mem.open(0, ids)
    if opened is None:
        raise SystemExit("the arena is too small for one request")
    at = opened.cached
    while at < len(ids):
        end = mem.cut(0, at, min(len(ids), at + chunk))
        mem.extend(0, end)
        mem.snapshot(0, ids, end)
        mem.advance(0, ids, end)
        at = end
    whole = ids + output
    for at in range(len(ids) + 64, len(whole), 64):
        mem.extend(0, at)
        mem.advance(0, whole, at)
    mem.extend(0, len(whole))
    mem.close(0, whole, state_at=len(whole) - 1)
    return opened.cached


def requests(count: int, length: int, output: int, blocks: int) -> float:
    """Microseconds a fresh request."""
    mem, work, tail = memory(blocks), prompts(count, length), prompts(1, output, 9)[0]
    t0 = time.process_time()
    for ids in work:
        life(mem, ids, tail, 16_384)
    spent = time.process_time() - t0
    mem.check()
    return spent / count * 1e6


def sessions(turns: int, history: int, added: int, output: int) -> float:
    """Microseconds a returning turn."""
    mem = memory(2 * (history + turns * (added + output)) // 2048)
    ids = prompts(1, history)[0]
    life(mem, ids, (), 16_384)
    more = prompts(turns, added + output, 5)
    t0 = time.process_time()
    for new in more:
        ids = ids + new[:added]
        if life(mem, ids, new[added:], 16_384) < history - 2:
            raise SystemExit("a returning turn did not find its history")
        ids = ids + new[added:]
    return (time.process_time() - t0) / turns * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    result = decode_calls()
    result["request of 8,400 + 1,024, room for all, us"] = requests(200, 8_400, 1_024, 2_000)
    result["request of 8,400 + 1,024, arena always full, us"] = requests(400, 8_400, 1_024, 563)
    result["returning turn of 118,000 + 600 + 400, us"] = sessions(40, 118_000, 600, 400)
    about = {"version": __version__, "python": platform.python_version(), "date": date.today().isoformat()}
    if as_json:
        print(json.dumps({**about, **result}))
        return
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    for name, value in result.items():
        print(f"{value:12,.2f}  {name}")


if __name__ == "__main__":
    main()
