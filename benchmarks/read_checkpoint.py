"""The checkpoint reader beside plain reading of the same files: rate, and peak memory over the final weights.

A random checkpoint of more than 1 GB is written to a temporary folder. Each way of reading runs in a process of its
own, in turns, after the files have been dropped from the page cache (or, with --warm, with all of them in it):

plain  every byte, with as many threads as the reader, 16 MiB at a time into one buffer a thread
direct the same past the page cache (O_DIRECT), 4 MiB at a time into buffers in large pages; the faster of these two is
       the reader's peer
kept   as plain, into memory that stays
stages headers, building the model, reading, preparing, one after the other; the reader's rate is that of "reading"
       alone, which ends when every byte is in the memory of its weight, as stored
load   ``load_model``, as a server starts; memory is taken here
touch  writing once to every page of as much new memory as the weights take, with all cores: no loader can take less

    python -m benchmarks.read_checkpoint [--layout linear|k3] [--warm] [--folder PATH]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from benchmarks.make_checkpoint import quarter_kimi_linear, small_k3, write_checkpoint

from k3stack.config.cores import usable_cores
from k3stack.config.geometry import load_geometry
from k3stack.kernels.linear import cpu as linear
from k3stack.kernels.linear import stacked
from k3stack.kernels.memory import HUGE_PAGE, in_large_pages, keep_freed_memory
from k3stack.models.checkpoint import find_tensors
from k3stack.models.files import BLOCK
from k3stack.models.landing import land
from k3stack.models.load import load_model, parse_dtype
from k3stack.models.network import Model
from k3stack.models.pages import small_pages
from k3stack.models.prepare import prepare
from k3stack.models.stream_in import stream_in

THREADS, PIECE, DIRECT_PIECE, RUN = 4, 16 << 20, 4 << 20, 64 << 20
WANTED_RATE = 0.7
KINDS = ("plain", "direct", "kept", "stages", "load", "touch")


def resident(field: str) -> int:
    """Bytes of this process: VmRSS (now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def read_plainly(folder: Path, keep: bool = False, direct: bool = False) -> float:
    """Seconds to read every byte of the safetensors files, into one buffer a thread or into memory that stays."""
    files = sorted(folder.glob("*.safetensors"))
    sizes = {f: f.stat().st_size for f in files}
    kept = {f: new_memory(n) for f, n in sizes.items()} if keep else {}
    work = [(f, a, min(a + RUN, sizes[f])) for f in files for a in range(0, sizes[f], RUN)]
    piece, flags = (DIRECT_PIECE, os.O_RDONLY | os.O_DIRECT) if direct else (PIECE, os.O_RDONLY)
    buffers = [warm_buffer(piece) for _ in range(THREADS)]

    def read(task: tuple[Path, int, int]) -> None:
        buffer = buffers.pop()
        file, at, end = task
        fd = os.open(file, flags)
        while at < end:
            size = min(piece, -(-(end - at) // BLOCK) * BLOCK)
            at += os.preadv(fd, [kept[file][at : at + size] if keep else buffer[:size]], at)
        os.close(fd)
        buffers.append(buffer)

    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, work))
    return time.perf_counter() - begin


def warm_buffer(size: int) -> memoryview:
    """Written to before, in large pages where the system has them."""
    memory = np.frombuffer(new_memory(size + HUGE_PAGE), dtype=np.uint8)
    first = -memory.ctypes.data % HUGE_PAGE
    in_large_pages(memory.ctypes.data + first, size)
    memory[:] = 1
    return memoryview(memory[first : first + size])


def new_memory(size: int) -> memoryview:
    """In small pages, as the reader's."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def touch(size: int) -> float:
    """Seconds to write once to every page of new memory, with a thread for each core."""
    cores = usable_cores()
    parts = [new_memory(size // cores) for _ in range(cores)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(lambda part: np.frombuffer(part, dtype=np.uint8).fill(1), parts))
    return time.perf_counter() - begin


def warm_up() -> None:
    """What torch and oneDNN take once is not the reader's."""
    for kind in (torch.float32, torch.bfloat16):
        weight = torch.ones(512, 256, dtype=kind)
        linear.linear(weight[:64], linear.pack(weight))
        stacked.pack_all([weight, weight])


def read_in_stages(folder: Path, dtype: str) -> dict[str, float]:
    """Seconds of each stage."""
    warm_up()
    times = [time.perf_counter()]
    geometry = load_geometry(folder)
    found = find_tensors(folder, geometry)
    times.append(time.perf_counter())
    keep_freed_memory()
    model = Model(geometry, dtype=parse_dtype(dtype), device=torch.device("cpu"))
    landed = land(model, found)
    small_pages(landed)
    times.append(time.perf_counter())
    stream_in(landed, threads=THREADS)
    times.append(time.perf_counter())
    prepare(landed.unfinished, threads=THREADS)
    model.finish()
    times.append(time.perf_counter())
    names = ("headers", "building", "reading", "preparing")
    return dict(zip(names, (b - a for a, b in pairwise(times)), strict=True))


def read_model(folder: Path, dtype: str) -> dict[str, float]:
    """Load a model ready to run: seconds, and bytes of memory besides torch's own (libraries, threads)."""
    warm_up()
    before = resident("VmRSS")
    begin = time.perf_counter()
    model = load_model(folder, dtype=dtype, progress=False, threads=THREADS)
    seconds = time.perf_counter() - begin
    weights, filling = model.weight_bytes, model.filling_bytes
    found = find_tensors(folder, model.geometry)
    return {
        "seconds": seconds,
        "weights": weights,
        "filling": filling,
        "over": resident("VmHWM") - before - weights - filling,
        "left": resident("VmRSS") - before - weights - filling,
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


def child(what: str, folder: Path, dtype: str, size: int = 0) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.read_checkpoint", "--child", what, "--folder", str(folder)]
    command += ["--dtypes", dtype, "--size", str(size)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(out)
    return result


def compare(folder: Path, dtype: str, rounds: int, warm: bool) -> bool:
    runs: dict[str, list[dict[str, float]]] = {what: [] for what in KINDS}
    for _ in range(rounds):
        for what, done in runs.items():
            if not warm:
                drop(folder)
            size = int(sum(runs["load"][-1][k] for k in ("weights", "filling"))) if what == "touch" else 0
            done.append(child(what, folder, dtype, size))

    def middle(what: str, field: str = "seconds") -> float:
        return statistics.median(r[field] for r in runs[what])

    last = runs["load"][-1]
    size, over = last["bytes"], max(r["over"] for r in runs["load"])
    plain, direct, kept, reading = (*map(middle, ("plain", "direct", "kept")), middle("stages", "reading"))
    share = min(plain, direct) / reading
    stages = ", ".join(f"{name} {middle('stages', name):.2f}" for name in runs["stages"][0])
    print(
        f"{dtype}: plain reading {size / plain / 1e9:.2f} GB/s (into memory that stays {size / kept / 1e9:.2f}), past "
        f"the page cache {size / direct / 1e9:.2f} GB/s, the reader {size / reading / 1e9:.2f} GB/s: {share:.0%} of "
        f"the faster (wanted {WANTED_RATE:.0%})\n"
        f"  seconds: {stages}; load_model {middle('load'):.2f} ({size / middle('load') / 1e9:.2f} GB/s of files); "
        f"new memory alone {middle('touch'):.2f}\n"
        f"  weights {last['weights'] / 1e6:,.0f} MB and {last['filling'] / 1e6:,.0f} MB of filling; peak over both "
        f"{over / 1e6:,.1f} MB, afterwards {max(r['left'] for r in runs['load']) / 1e6:,.1f} MB (largest tensor in the "
        f"files {last['largest'] / 1e6:,.1f} MB)",
        flush=True,
    )
    return share >= WANTED_RATE and over <= last["largest"]


def run_child(options: argparse.Namespace) -> dict[str, float]:
    folder, dtype = options.folder, options.dtypes[0]
    if options.child in ("plain", "direct", "kept"):
        return {"seconds": read_plainly(folder, options.child == "kept", options.child == "direct")}
    if options.child == "touch":
        return {"seconds": touch(options.size)}
    return read_in_stages(folder, dtype) if options.child == "stages" else read_model(folder, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=("linear", "k3"), default="k3", help="of the checkpoint written")
    parser.add_argument("--folder", type=Path, help="an existing checkpoint, or where to write one and leave it")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(run_child(options)))
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
