"""Trains K3-nano. Resumes from ``--resume``; stops by itself after ``--seconds``. See README.md.

On a GPU a run of full size sees about half a million tokens a second. On a CPU ``--smoke`` trains a miniature of the
same network for a few steps: it shows that every part runs and that the loss falls.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training import batches, mxfp4
from training.format import Formatter
from training.model import Batch, Nano, NanoConfig, Ops
from training.optim import Muon, split

SHARD_BYTES = 13_000_000
SMOKE = NanoConfig(
    hidden=64, layers=9, heads=2, q_rank=32, kv_rank=32, dense_width=64, experts=4, top_k=2, latent=32, expert_width=64
)


def rate_at(progress: float, since_start: int, warm: int, flat: float = 0.45) -> float:
    """Share of the peak rate: a short warm-up after each start, flat, then down to 2 % from ``flat`` of the time on."""
    down = 1.0 if progress < flat else 0.02 + 0.98 * (1 - (progress - flat) / (1 - flat))
    return min(1.0, (since_start + 1) / warm) * max(down, 0.02)


def _squeeze(name: str, tensor: Tensor, final: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Experts in 8 bits with a scale for 32 values, other matrices in bfloat16, the rest in float32.

    ``final``: experts as the exact values that MXFP4 holds.
    """
    if tensor.ndim == 3 and final:
        return mxfp4.quantize(tensor).to(torch.bfloat16).cpu()
    if tensor.ndim == 3:
        groups = tensor.unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
        return torch.round(groups / scale).to(torch.int8).cpu(), scale.half().cpu()
    return tensor.to(torch.bfloat16 if tensor.ndim == 2 and "conv" not in name else torch.float32).cpu()


def save(folder: Path, model: Nano, meta: dict[str, Any], *, final: bool = False) -> None:
    """Weights in parts of at most 13 MB, small enough to travel; optimiser moments are warmed up anew on resume."""
    folder.mkdir(parents=True, exist_ok=True)
    part: dict[str, Any] = {}
    size = number = 0
    for name, tensor in model.state_dict().items():
        kept = _squeeze(name, tensor.detach().float(), final)
        nbytes = kept.nbytes if isinstance(kept, Tensor) else sum(t.nbytes for t in kept)
        if size + nbytes > SHARD_BYTES and part:
            torch.save(part, folder / f"part{number}.pt")
            part, size, number = {}, 0, number + 1
        part[name] = kept
        size += nbytes
    torch.save(part, folder / f"part{number}.pt")
    (folder / "meta.json").write_text(json.dumps({**meta, "config": model.c.to_dict(), "parts": number + 1}))


def load(folder: Path, model: Nano) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    state: dict[str, Any] = {}
    for i in range(meta["parts"]):
        state.update(torch.load(folder / f"part{i}.pt", weights_only=True))
    full = {k: v.float() if isinstance(v, Tensor) else (v[0] * v[1].float()).flatten(-2) for k, v in state.items()}
    model.load_state_dict(full)
    return meta


@torch.no_grad()
def score(model: Nano, ops: Ops, data: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Teacher-forced: a token, a turn or a conversation counts when the most likely token is right everywhere in it."""
    batch = Batch(data, device)
    right = (model.logits(batch, ops).argmax(-1) == batch.target).cpu()
    turns = torch.from_numpy(data["turn"])
    ends = torch.searchsorted(torch.tensor(batch.cu_list), torch.from_numpy(data["where"]), right=True)

    def groups(key: Tensor) -> float:
        wrong = torch.zeros(int(key.max()) + 1).index_add_(0, key, (~right).float())
        present = torch.bincount(key, minlength=len(wrong)) > 0
        return float((wrong[present] == 0).float().mean())

    return {"token": float(right.float().mean()), "turn": groups(turns), "whole": groups(ends)}


def evaluate(
    model: Nano, ops: Ops, device: torch.device, sets: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    return {name: {k: round(v, 4) for k, v in score(model, ops, data, device).items()} for name, data in sets.items()}


def score_sets(form: Formatter, size: int, smoke: bool) -> dict[str, dict[str, Any]]:
    """Held-out questions by kind, and one set of the kind that training shows, to see the gap."""
    sets = {k: batches.questions(form, k, size, held_out=True) for k in ("tool_call", "tool_use", "conversation")}
    sets["seen tool_call"] = batches.questions(form, "tool_call", size, held_out=False)
    for sentences in () if smoke else (60, 300, 640, 1000):
        name = f"lookup {sentences}"
        sets[name] = batches.questions(form, "lookup", size, held_out=True, sentences=sentences)
    return sets


def steps(source: batches.Source, device: torch.device) -> Iterator[Batch]:
    while True:
        yield Batch(source.next(), device)


def run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = Nano(SMOKE if args.smoke else NanoConfig()).to(device)
    meta: dict[str, Any] = {"seconds": 0.0, "steps": 0, "tokens": 0, "starts": 0, "log": []}
    if args.resume and (args.resume / "meta.json").exists():
        meta = load(args.resume, model)
    elif args.resume:
        from training.export import read

        model.load_state_dict(read(args.resume).state_dict())
    ops = Ops(device, compiled=device.type == "cuda" and not args.eager)
    form = Formatter(args.tokenizer)
    shares = tuple(float(x) for x in args.shares.split(",")) if args.shares else None
    if shares is not None and len(shares) != len(batches.KINDS):
        raise ValueError(f"--shares needs {len(batches.KINDS)} numbers, for {', '.join(batches.KINDS)}")
    source = batches.Source(args.tokenizer, args.tokens, args.workers, f"{args.seed}:{meta['starts']}", shares)
    meta["starts"] += 1
    try:
        _loop(
            args, device, model, ops, source, meta, {} if args.no_scores else score_sets(form, args.tokens, args.smoke)
        )
    finally:
        source.stop()
    return meta


def _loop(
    args: argparse.Namespace,
    device: torch.device,
    model: Nano,
    ops: Ops,
    source: batches.Source,
    meta: dict[str, Any],
    sets: dict[str, dict[str, Any]],
) -> None:
    matrices, rest = split(model)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")
    began = time.monotonic()
    first: float | None = None  # the clock of the schedule starts after compilation
    last_eval = last_save = began
    before = float(meta["seconds"])
    total = float(args.total_seconds)
    shown: list[Tensor] = []
    for since, batch in enumerate(steps(source, device)):
        spent = before + (time.monotonic() - first if first is not None else 0.0)
        progress = min(1.0, spent / total)
        source.progress.value = max(progress, args.curriculum_from)
        share = rate_at(progress, since, args.warmup, args.flat)
        logits = model.logits(batch, ops)
        losses = F.cross_entropy(logits, batch.target, reduction="none")
        loss = (losses * batch.weight).sum() / batch.weight.sum().clamp(min=1.0)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(rest, 1.0)
        muon.step(args.rate * share)
        adam.param_groups[0]["lr"] = args.adam_rate * share
        adam.step()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            worst = model.balance(0.004 * max(share, 0.05))
        count = since + 1
        meta["steps"] += 1
        meta["tokens"] += args.tokens
        shown.append(torch.stack((loss.detach(), norm.detach(), worst)))
        if first is None and count == 3:
            if device.type == "cuda":
                torch.cuda.synchronize()
            first = time.monotonic()
            if args.last:  # the schedule ends when this run does, however long compilation took
                total = before + args.seconds - (first - began)
            print(f"compiled after {first - began:.1f} s; schedule of {total:.0f} s", flush=True)
        now = time.monotonic()
        if count % args.show == 0:
            mean = torch.stack(shown).mean(0).tolist()
            shown = []
            if not math.isfinite(mean[0]):
                raise FloatingPointError(f"the loss is {mean[0]} at step {meta['steps']}")
            speed = (count - 3) * args.tokens / max(1e-6, now - (first or now)) if count > 3 else 0.0
            print(
                f"step {meta['steps']} progress {progress:.3f} loss {mean[0]:.4f} norm {mean[1]:.2f} "
                f"load {mean[2]:.2f} tokens/s {speed:,.0f}",
                flush=True,
            )
        done = now - began > args.seconds or count >= args.steps or progress >= 1.0
        if now - last_eval > args.eval_seconds or done:
            result = evaluate(model, ops, device, sets)
            meta["log"].append({"step": meta["steps"], "progress": round(progress, 3), **result})
            print(json.dumps(result), flush=True)
            last_eval = time.monotonic()
        if now - last_save > args.save_seconds or done:
            meta["seconds"] = before + (time.monotonic() - first if first is not None else 0.0)
            save(args.out, model, meta, final=done and (progress >= 1.0 or args.last))
            last_save = time.monotonic()
        if done:
            return


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("src/k3stack/models/data/nano/tiktoken.model"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the resumable weights and the log")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run, or an exported checkpoint")
    parser.add_argument("--seconds", type=float, default=520, help="stop after this long, compilation included")
    parser.add_argument("--total-seconds", type=float, default=1200, help="length of the whole schedule, over all runs")
    parser.add_argument("--last", action="store_true", help="this run ends the schedule: --seconds replaces its total")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after this many steps")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of one batch")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak rate of Muon")
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument(
        "--curriculum-from", type=float, default=0.0, help="start here on the way from short documents to long ones"
    )
    parser.add_argument("--flat", type=float, default=0.45, help="share of the time before the rate falls")
    parser.add_argument(
        "--shares", default="", help="shares of tokens by kind instead of the curriculum's, with commas"
    )
    parser.add_argument("--no-scores", action="store_true", help="do not ask held-out questions on the way")
    parser.add_argument("--show", type=int, default=50)
    parser.add_argument("--eval-seconds", type=float, default=60)
    parser.add_argument("--save-seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a miniature network")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
    sys.exit(0)
