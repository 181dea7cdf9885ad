"""The network on a CPU beside transformers' Kimi-Linear: equal outputs first, then prefill and decode, in turns.

One model (Kimi-Linear's layer shapes at a quarter of the width, random weights) is written to a temporary folder and
loaded by both. The peer runs in a process of its own, perhaps with another interpreter; measurements alternate
between the two, so that both meet the same noise. The peer gets the better of its two expert implementations.

    python -m benchmarks.cpu_model --peer-python path/to/python

On a machine that others use at the time, ``--cpu-time --threads 1`` compares processor time instead.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.make_checkpoint import quarter_kimi_linear, write_checkpoint

from k3stack.config.geometry import ModelGeometry
from k3stack.config.tensors import expected_tensors, expert_tensors
from k3stack.estimate.pools import BlockLayout, block_layout
from k3stack.models import pages
from k3stack.models.batch import ForwardBatch
from k3stack.models.capture import Capture
from k3stack.models.load import load_model
from k3stack.models.network import Model
from k3stack.models.views import ArenaViews, cache_dtypes

PROMPT, CONTEXT, BATCH = 1024, 128, 16
TARGETS = {"prefill 1024": 5.0, "decode, batch 1": 1.5, "decode, batch 16": 3.0}
PEER_EXPERTS = ("eager", "grouped_mm")
CLOSE = 1e-3
Clock = Callable[[], float]
TIE = 1e-5
"""Router scores closer than this may order either way under float32 rounding."""


class Ours:
    """Prompts and decode steps on a bare arena: sequence i has state block i and pages of its own."""

    def __init__(self, path: Path, dtype: str, clock: Clock) -> None:
        self.clock = clock
        self.model: Model = load_model(path, dtype=dtype, progress=False)
        for thread in threading.enumerate():
            if thread.name == pages.THREAD:  # as a server's weights are, some seconds after its start
                thread.join()
        state, window, row = cache_dtypes(self.model.dtype)
        self.layout: BlockLayout = block_layout(
            self.model.geometry,
            recurrent_itemsize=state.itemsize,
            conv_itemsize=window.itemsize,
            row_itemsize=row.itemsize,
        )
        self.pages_each = -(-(PROMPT + CONTEXT) // self.layout.page_tokens)
        blocks = BATCH + -(-BATCH * self.pages_each // self.layout.pages_per_block)
        self.buffer = torch.zeros(blocks * self.layout.block_bytes, dtype=torch.uint8)
        self.views = ArenaViews(
            self.buffer,
            self.layout,
            self.model.geometry,
            state_dtype=state,
            window_dtype=window,
            row_dtype=row,
        )
        self.length = 0
        self.last = torch.empty(0)

    def _forward(self, ids: list[list[int]], capture: Capture | None = None) -> float:
        rows, count = len(ids), len(ids[0])
        begin = self.clock()
        first = BATCH * self.layout.pages_per_block
        table = first + torch.arange(rows * self.pages_each).view(rows, -1)
        batch = ForwardBatch(
            ids=torch.tensor([i for row in ids for i in row]),
            cu=[r * count for r in range(rows + 1)],
            starts=[self.length] * rows,
            state_blocks=torch.arange(rows),
            page_table=table,
            logit_index=torch.arange(rows) * count + count - 1,
        )
        self.last = self.model.forward(batch, self.views, capture)
        self.length += count
        return self.clock() - begin

    def prefill(self, ids: list[list[int]]) -> float:
        self.buffer.zero_()
        self.length = 0
        return self._forward(ids)

    def decode(self, ids: list[int], steps: int) -> list[float]:
        return [self._forward([[i] for i in ids]) for _ in range(steps)]

    def prefill_margins(self, ids: list[list[int]]) -> torch.Tensor:
        """Prefill; by how much, at least, each sequence's experts were chosen before the next best [sequences]."""
        self.buffer.zero_()
        self.length = 0
        return self._margins(ids)

    def decode_margins(self, ids: list[int]) -> torch.Tensor:
        return self._margins([[i] for i in ids])

    def _margins(self, ids: list[list[int]]) -> torch.Tensor:
        capture, k = Capture(), self.model.geometry.moe.top_k
        self._forward(ids, capture)
        best = [s.topk(k + 1, dim=-1).values for s in capture.values["router_scores"].values()]
        margins = torch.stack([b[:, k - 1] - b[:, k] for b in best]).amin(0)
        return margins.view(len(ids), -1).amin(1)


class Peer:
    """The other side of ``peer_transformers.py``."""

    def __init__(self, python: str, threads: int, cpu_time: bool) -> None:
        script = Path(__file__).with_name("peer_transformers.py")
        self.threads, self.cpu_time = threads, cpu_time
        self.process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the peer ended with status {self.process.wait()} during {do!r}; its message is above")
        return json.loads(answer)

    def load(self, path: Path, dtype: str, experts: str) -> None:
        self.call("load", path=str(path), dtype=dtype, threads=self.threads, experts=experts, cpu_time=self.cpu_time)

    def prefill(self, ids: list[list[int]]) -> float:
        return float(self.call("prefill", ids=ids))

    def decode(self, ids: list[int], steps: int) -> list[float]:
        times: list[float] = self.call("decode", ids=ids, steps=steps)
        return times

    def logits(self, folder: Path) -> torch.Tensor:
        self.call("save", path=str(folder / "peer.pt"))
        saved: torch.Tensor = torch.load(folder / "peer.pt")
        return saved

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


@dataclass
class Times:
    """Seconds by measurement, of both sides."""

    ours: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in TARGETS})
    peer: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {e: {k: [] for k in TARGETS} for e in PEER_EXPERTS}
    )


def prompts() -> dict[str, list[list[int]]]:
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(160_000) for _ in range(n)]

    return {"long": [ids(PROMPT)], "one": [ids(CONTEXT)], "many": [ids(CONTEXT) for _ in range(BATCH)]}


def check_equal(ours: Ours, peer: Peer, folder: Path) -> None:
    """Compare logits in float32 after each kind of work; stops the benchmark where they differ.

    Every sequence must agree, except where some expert was chosen by less than ``TIE``: there rounding decides, and
    two correct networks may part.
    """
    for name, ids in prompts().items():
        peer.prefill(ids)
        margin = ours.prefill_margins(ids)
        for what in ("prefill", "decode"):
            off = (ours.last - peer.logits(folder)).abs().amax(1)
            agree = off < CLOSE
            print(
                f"  equal outputs: {name} {what}: {int(agree.sum())} of {len(ids)} sequences agree, largest difference "
                f"{float(off[agree].max()):.1e} of {float(ours.last.abs().max()):.1f}; parted after a tie between "
                f"experts: {int((~agree).sum())}"
            )
            if (margin[~agree] > TIE).any() or 2 * int(agree.sum()) < len(ids):
                raise SystemExit("the two networks disagree: nothing is measured")
            if what == "prefill":
                step = [row[0] for row in ids]
                peer.decode(step, 2)
                for _ in range(2):
                    margin = torch.minimum(margin, ours.decode_margins(step))


def measure(times: Times, ours: Ours, peer: Peer, experts: str, rounds: int) -> None:
    work = prompts()
    sides: list[tuple[Ours | Peer, dict[str, list[float]]]] = [(ours, times.ours), (peer, times.peer[experts])]
    for side, _ in sides:
        side.prefill(work["one"])
    for _ in range(rounds):
        for side, kept in sides:
            kept["prefill 1024"].append(side.prefill(work["long"]))
    for name, key in (("decode, batch 1", "one"), ("decode, batch 16", "many")):
        step = [row[0] for row in work[key]]
        for side, _ in sides:
            side.prefill(work[key])
            side.decode(step, 2)
        for _ in range(rounds):
            for side, kept in sides:
                kept[name] += side.decode(step, 6)


def decode_bytes(geometry: ModelGeometry, layout: BlockLayout, itemsize: int, batch: int, context: int) -> float:
    """Bytes one decode step must read or write: weights in use, states twice, cache rows."""
    plain = sum(t.numel for t in expected_tensors(geometry, vision=False, routed=False) if t.kind != "embed")
    one = sum(t.numel for t in expert_tensors(geometry, geometry.dense_layers, 0))
    moe = geometry.moe
    used = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** batch) * len(geometry.moe_layers)
    rows = context * layout.cache_layers * layout.row_bytes
    return (plain + used * one) * itemsize + batch * (2 * layout.state_bytes + rows)


def flops_of_prefill(geometry: ModelGeometry, tokens: int) -> float:
    """Products of the weights alone: two operations a weight and token; the head for one token."""
    moe = geometry.moe
    plain = sum(
        t.numel for t in expected_tensors(geometry, vision=False, routed=False) if t.kind not in ("embed", "lm_head")
    )
    one = sum(t.numel for t in expert_tensors(geometry, geometry.dense_layers, 0))
    return 2.0 * tokens * (plain + one * moe.top_k * len(geometry.moe_layers)) + 2.0 * geometry.vocab * geometry.hidden


def fastest(run: Callable[[], object], clock: Clock, times: int = 8) -> float:
    best = float("inf")
    for _ in range(times):
        begin = clock()
        run()
        best = min(best, clock() - begin)
    return best


def machine(dtype: torch.dtype, clock: Clock) -> tuple[float, float]:
    """(bytes/s of reading memory, operation/s of a large product) of this machine, as torch reaches them."""
    data = torch.zeros(128 << 20, dtype=torch.float32)
    a, b = torch.ones(2048, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    return data.nbytes / fastest(data.sum, clock), 2 * 2048**3 / fastest(lambda: a @ b, clock)


def report(dtype: str, times: Times, ours: Ours) -> list[dict[str, Any]]:
    geometry, itemsize = ours.model.geometry, ours.model.dtype.itemsize
    bandwidth, rate = machine(ours.model.dtype, ours.clock)
    print(f"  memory is read at {bandwidth / 1e9:.1f} GB/s, large products run at {rate / 1e9:.0f} GFLOP/s")
    rows = []
    for name, target in TARGETS.items():
        mine = statistics.median(times.ours[name])
        by_experts = {e: statistics.median(t[name]) for e, t in times.peer.items() if t[name]}
        experts, theirs = min(by_experts.items(), key=lambda x: x[1])
        if name.startswith("prefill"):
            floor, of = flops_of_prefill(geometry, PROMPT) / rate, "operations"
        else:
            batch = int(name.rsplit(" ", 1)[1])
            floor, of = decode_bytes(geometry, ours.layout, itemsize, batch, CONTEXT) / bandwidth, "bytes"
        row = {"dtype": dtype, "what": name, "ours_ms": mine * 1e3, "peer_ms": theirs * 1e3, "peer_experts": experts}
        row |= {"times_faster": theirs / mine, "target": target, "floor_ms": floor * 1e3, "floor_of": of}
        rows.append(row)
        print(
            f"  {name:18s} {mine * 1e3:9.1f} ms   peer {theirs * 1e3:9.1f} ms ({experts})   {theirs / mine:5.2f} times "
            f"(wanted {target})   floor of {of} {floor * 1e3:7.1f} ms, reached {floor / mine:.0%}"
        )
    return rows


def run(folder: Path, options: argparse.Namespace, peer: Peer) -> list[dict[str, Any]]:
    checkpoint = folder / "checkpoint"
    size = write_checkpoint(checkpoint, quarter_kimi_linear())
    what = "processor time" if options.cpu_time else "elapsed time"
    print(
        f"random Kimi-Linear at a quarter of the width, {size / 1e9:.2f} GB on disk, threads: {options.threads}, {what}"
    )
    results = []
    for dtype in options.dtypes:
        print(dtype)
        times, ours = Times(), Ours(checkpoint, dtype, time.process_time if options.cpu_time else time.perf_counter)
        for experts in PEER_EXPERTS:
            peer.load(checkpoint, dtype, experts)
            if dtype == "float32" and experts == PEER_EXPERTS[0]:
                check_equal(ours, peer, folder)
            measure(times, ours, peer, experts, options.rounds)
        results += report(dtype, times, ours)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time, of all threads together")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    peer = Peer(options.peer_python, options.threads, options.cpu_time)
    try:
        versions = peer.call("versions")
        print(f"torch {torch.__version__}; peer: {versions}")
        with tempfile.TemporaryDirectory() as folder:
            results = run(Path(folder), options, peer)
    finally:
        peer.close()
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions, "results": results}, indent=1))
    short = [r for r in results if r["times_faster"] < r["target"]]
    for r in short:
        print(f"short of its target: {r['dtype']} {r['what']}: {r['times_faster']:.2f} of {r['target']}")
    raise SystemExit(1 if short else 0)


if __name__ == "__main__":
    main()
