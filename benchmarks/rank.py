"""One rank of a layout, alone on one GPU: a decode step or a prompt's chunk against the floor of its bytes.

The rank holds what the shard table gives it (real geometry, random weights), runs the real kernels under a CUDA graph,
and leaves its collectives out; they are counted. Experts are chosen as on the mean rank, or on the slowest one. Kernels
are compared with plain torch at the same sizes first.

    python -m benchmarks.rank --tp-size 32 --ep-size 32 --kv-cache-dtype fp8_e4m3 --batch 64 --context 8500 --json
    python -m benchmarks.rank --tp-size 16 --ep-size 16 --batch 64 --context 8500 --floor-only
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from typing import Any

from k3stack.config.geometry import ModelGeometry, load_geometry
from k3stack.config.layout import ParallelLayout
from k3stack.estimate.floor import decode_floor
from k3stack.estimate.work import Precision, RankModel, StepLoad

MODELS = {"k3": "k3_config.json", "kimi-linear-48b": "kimi_linear_48b_config.json"}
ROW_BYTES = {"bfloat16": 2, "fp8_e4m3": 1}


def main() -> int:
    args = arguments().parse_args()
    geometry = config_of(args.model)
    layout = ParallelLayout(tp=args.tp_size, ep=args.ep_size)
    model = RankModel(geometry, layout, precision=Precision(row=ROW_BYTES[args.kv_cache_dtype]))
    if args.floor_only:
        reports = [floors(model, batch, args.context) for batch in args.batch]
    else:
        from benchmarks.rank_gpu import measure

        reports = measure(args, geometry, layout, model)
    for report in reports:
        print(json.dumps(report, indent=None if args.json else 2))
    return 0


def config_of(model: str) -> ModelGeometry:
    """The geometry of one of ``MODELS``."""
    return load_geometry(str(files("k3stack.config").joinpath("data", MODELS[model])))


def decode_load(batch: int, context: int) -> StepLoad:
    """A decode step of ``batch`` rows that each see ``context`` cached tokens."""
    return StepLoad(decode_rows=batch, decode_context=batch * context, samples=batch)


def prefill_load(tokens: int) -> StepLoad:
    """One chunk of ``tokens`` at the start of its prompt."""
    return StepLoad(chunk_rows=1, chunk_tokens=tokens, chunk_pairs=tokens**2 / 2, samples=1)


def floors(model: RankModel, batch: int, context: int) -> dict[str, Any]:
    """Bytes alone: nothing is measured."""
    load = decode_load(batch, context)
    work = model.work(load)
    parts = {name: round(value / 1e9, 4) for name, value in decode_floor(model, load).items()}
    return {
        "batch": batch,
        "context": context,
        "floor_gb": round(work.bytes / 1e9, 3),
        "parts_gb": parts,
        "collectives": {"count": work.sums, "bytes": round(work.sum_bytes)},
    }


def arguments() -> argparse.ArgumentParser:
    """What a rank is, and which of its steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="k3", help="geometry of the public config.json")
    parser.add_argument("--tp-size", type=int, default=16)
    parser.add_argument("--ep-size", type=int, default=16)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--routing", choices=("mean", "slowest"), default="mean", help="whose experts are chosen")
    parser.add_argument("--kv-cache-dtype", choices=ROW_BYTES, default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--context", type=int, default=8500, help="cached tokens a row")
    parser.add_argument("--prefill", type=int, help="measure a chunk of so many tokens instead of decode steps")
    parser.add_argument("--layers", type=int, help="only the first so many layers: a quick look, no result")
    parser.add_argument("--no-parts", action="store_true", help="the whole step alone")
    parser.add_argument("--timeline", action="store_true", help="also the kernels of the step: count, time, gaps")
    parser.add_argument("--floor-only", action="store_true", help="bytes by arithmetic; needs no GPU")
    parser.add_argument("--json", action="store_true", help="one line a result")
    return parser


def cut_layers(geometry: ModelGeometry, layers: int | None) -> ModelGeometry:
    """The first ``layers`` layers of the network."""
    import dataclasses

    if layers is None:
        return geometry
    return dataclasses.replace(
        geometry,
        layers=layers,
        kda_layers=tuple(i for i in geometry.kda_layers if i < layers),
        mla_layers=tuple(i for i in geometry.mla_layers if i < layers),
    )


if __name__ == "__main__":
    raise SystemExit(main())
