"""The checkpoint reader beside plain reading of the same files: rate, and peak memory over the final weights.

A random checkpoint of more than 1 GB is written to a temporary folder. Both ways of reading run in processes of their
own, in turns, each time after the files have been dropped from the page cache (or, with --warm, with all of them in
it). Plain reading uses as many threads and pieces as large as the reader's, into one buffer a thread.

    python -m benchmarks.read_checkpoint [--layout linear|k3] [--warm] [--folder PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from benchmarks.make_checkpoint import quarter_kimi_linear, small_k3, write_checkpoint

from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear import stacked
from k3stack.models.checkpoint import find_tensors
from k3stack.models.load import load_model

THREADS, PIECE = 4, 16 << 20
WANTED_RATE = 0.7


def resident(field: str) -> int:
    """Bytes of this process: VmRSS (now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def read_plainly(folder: Path) -> float:
    """Seconds to read every byte of the safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    work = [(f, a, min(a + (64 << 20), f.stat().st_size)) for f in files for a in range(0, f.stat().st_size, 64 << 20)]
    buffers = [bytearray(PIECE) for _ in range(THREADS)]

    def read(task: tuple[Path, int, int]) -> None:
        buffer = buffers.pop()
        file, at, end = task
        fd = os.open(file, os.O_RDONLY)
        while at < end:
            at += os.preadv(fd, [memoryview(buffer)[: min(PIECE, end - at)]], at)
        os.close(fd)
        buffers.append(buffer)

    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, work))
    return time.perf_counter() - begin


def read_model(folder: Path, dtype: str) -> dict[str, float]:
    """Load a model ready to run: seconds, and bytes of memory besides torch's own (libraries, threads)."""
    for kind in (torch.float32, torch.bfloat16):
        weight = torch.ones(512, 256, dtype=kind)
        linear.linear(weight[:64], linear.pack(weight))
        stacked.pack_all([weight, weight])
    before = resident("VmRSS")
    begin = time.perf_counter()
    model = load_model(folder, dtype=dtype, progress=False, threads=THREADS)
    seconds = time.perf_counter() - begin
    weights = model.weight_bytes
    found = find_tensors(folder, model.geometry)
    return {
        "seconds": seconds,
        "weights": weights,
        "over": resident("VmHWM") - before - weights,
        "left": resident("VmRSS") - before - weights,
        "largest": max(e.nbytes for _, e in found.tensors),
        "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
    }


def drop(folder: Path) -> None:
    """Take the files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def child(what: str, folder: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.read_checkpoint", "--child", what, "--folder", str(folder)]
    out = subprocess.run([*command, "--dtypes", dtype], check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(out)
    return result


def compare(folder: Path, dtype: str, rounds: int, warm: bool) -> bool:
    plain, ours = [], []
    for _ in range(rounds):
        for what, kept in (("plain", plain), ("model", ours)):
            if not warm:
                drop(folder)
            kept.append(child(what, folder, dtype))
    size, last = ours[0]["bytes"], ours[-1]
    plain_s = statistics.median(p["seconds"] for p in plain)
    ours_s = statistics.median(o["seconds"] for o in ours)
    share = plain_s / ours_s
    over = max(o["over"] for o in ours)
    print(
        f"{dtype}: plain reading {size / plain_s / 1e9:.2f} GB/s, until the model is ready {size / ours_s / 1e9:.2f} "
        f"GB/s: {share:.0%} (wanted {WANTED_RATE:.0%})\n"
        f"  weights {last['weights'] / 1e6:,.0f} MB; peak over them {over / 1e6:,.1f} MB, afterwards "
        f"{max(o['left'] for o in ours) / 1e6:,.1f} MB (largest tensor in the files {last['largest'] / 1e6:,.1f} MB)"
    )
    return share >= WANTED_RATE and over <= last["largest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=("linear", "k3"), default="k3", help="of the checkpoint written")
    parser.add_argument("--folder", type=Path, help="an existing checkpoint, or where to write one and leave it")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--child", choices=("plain", "model"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "plain":
        print(json.dumps({"seconds": read_plainly(options.folder)}))
        return
    if options.child == "model":
        print(json.dumps(read_model(options.folder, options.dtypes[0])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "config.json").exists():
            config = small_k3() if options.layout == "k3" else quarter_kimi_linear(experts=96)
            size = write_checkpoint(folder, config)
            print(
                f"{options.layout} checkpoint of {size / 1e9:.2f} GB, {'warm' if options.warm else 'cold'} page cache"
            )
        good = [compare(folder, dtype, options.rounds, options.warm) for dtype in options.dtypes]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
