"""How long the GPU stands still between decode steps: planning, sampling and bookkeeping beside a running batch.

The engine serves Kimi-Linear-48B's geometry (random weights) to a full batch; after every prompt is in, CUPTI records
what the device does for some steps. Idle is the time in which no kernel or copy runs, as a share of the recorded steps.
Each way of sampling is measured: greedy, plain sampling, and with top-p and top-k.

    python -m benchmarks.gpu_idle --batch 64 --steps 40 --png docs/images/gpu-timeline.png
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmarks.timeline import Span, busy, by_kernel, spans_of

from k3stack import LLM, SamplingParams

CONFIG = "kimi_linear_48b_config.json"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "top-p 0.95, top-k 50": {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
}


def decoding(llm: LLM, batch: int, prompt: int, steps: int, sampling: dict[str, Any]) -> list[Span]:
    """What the device does in ``steps`` turns once all of ``batch`` prompts are answered."""
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_tokens=4 * steps + batch, ignore_eos=True, **sampling)
    with llm.rolling() as run:
        for _ in range(batch):
            run.submit(torch.randint(1000, 100_000, (prompt,), generator=generator).tolist(), params)
        while llm.stats()["scheduler"]["decoding"] < batch:
            run.turn()
        for _ in range(steps):  # the last prompts' chunks, and steps in flight
            run.turn()

        def record() -> None:
            for _ in range(steps):
                run.turn()

        return spans_of(record)


def report(spans: list[Span], steps: int) -> dict[str, Any]:
    """Busy and idle time over the middle eight tenths of what was recorded: the ends are the profiler's."""
    last = max(s.end for s in spans)
    begin, end = 0.1 * last, 0.9 * last
    inside = [Span(s.name, max(s.begin, begin), min(s.end, end)) for s in spans if s.end > begin and s.begin < end]
    on = busy(inside)
    return {
        "step_ms": round(last / steps / 1e3, 3),
        "idle_share": round(1 - on / (end - begin), 4),
        "idle_ms_a_step": round((end - begin - on) / 0.8 / steps / 1e3, 4),
        "before": [k for k in by_kernel(inside) if k["gap_each_us"] > 5][:6],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of every prompt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, help="only the first so many layers: a quick look, no result")
    parser.add_argument("--png", help="draw two steps into this file")
    args = parser.parse_args()
    config = json.loads(files("k3stack.config").joinpath("data", CONFIG).read_text())
    if args.layers is not None:
        shorten(config, args.layers)
    options = {"load_format": "dummy", "max_running_requests": args.batch, "chunked_prefill_size": 4096}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with LLM(folder, dtype="bfloat16", device="cuda", **options) as llm:
            for way, sampling in WAYS.items():
                spans = decoding(llm, args.batch, args.prompt, args.steps, sampling)
                about = {"sampling": way, "batch": args.batch, "device": torch.cuda.get_device_name()}
                print(json.dumps(about | report(spans, args.steps)), flush=True)
                if args.png and way == "sampled":
                    draw(spans, args.steps, args.png)
    return 0


def shorten(config: dict[str, Any], layers: int) -> None:
    """Keep the first ``layers`` layers of a config."""
    config["num_hidden_layers"] = layers
    linear = config["linear_attn_config"]
    for name in ("kda_layers", "full_attn_layers"):
        linear[name] = [i for i in linear[name] if i <= layers]


KINDS = {
    "experts": ("_in_kernel", "_out_kernel", "_sum_kernel", "_group_kernel"),
    "KDA": ("_decode_kernel", "_conv_kernel"),
    "MLA": ("_attend_kernel", "_combine_kernel", "_write_kernel"),
}


def draw(spans: list[Span], steps: int, path: str) -> None:
    """Two steps from the middle: one lane a kind of kernel, and the time in which nothing runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    last = max(s.end for s in spans)
    begin, end = 0.5 * last, 0.5 * last + 2.2 * last / steps
    lanes = [*KINDS, "other kernels, copies", "nothing runs"]
    bars: dict[str, list[tuple[float, float]]] = {lane: [] for lane in lanes}
    reach = begin
    for s in spans:
        if s.end < begin or s.begin > end:
            continue
        kind = next((k for k, names in KINDS.items() if s.name in names), lanes[-2])
        bars[kind].append((s.begin / 1e3, (s.end - s.begin) / 1e3))
        if s.begin > reach:
            bars[lanes[-1]].append((reach / 1e3, (s.begin - reach) / 1e3))
        reach = max(reach, s.end)
    figure, axes = plt.subplots(figsize=(11, 2.8), constrained_layout=True)
    for i, lane in enumerate(lanes):
        axes.broken_barh(
            bars[lane], (len(lanes) - i - 0.4, 0.8), linewidth=0, color="#c0392b" if lane == lanes[-1] else "#2c6fbb"
        )
    axes.set_yticks([len(lanes) - i for i in range(len(lanes))], lanes)
    axes.set_xlim(begin / 1e3, end / 1e3)
    axes.set_xlabel("ms")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
