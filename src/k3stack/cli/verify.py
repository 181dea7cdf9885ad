"""`k3 verify`: is a model, a layout, a kernel or a running server still right?"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3stack.cli.arguments import Parser, flag_of, print_json, say, whole
from k3stack.errors import UserError

if TYPE_CHECKING:
    from k3stack.verify.local import LocalTarget
    from k3stack.verify.workers import Workers


def run(argv: list[str]) -> int:
    """Verify; exit 1 when a threshold is missed."""
    args = _parser().read(argv)
    if (args.model_path is None) == (args.base_url is None):
        raise UserError("give one of --model-path and --base-url: what is to be verified", param="--model-path")
    _refuse_unused(args)
    if args.dataset is not None:
        return _dataset(args)
    thresholds = _thresholds(args.threshold)
    from k3stack.verify.run import verify

    options = {"quick": args.quick, "thresholds": thresholds, "say": say}
    if args.base_url is not None:
        if args.workers is not None:
            raise UserError("--workers is for --model-path: a server has its own processes", param="--workers")
        if _cache(args):
            raise UserError(
                f"{' and '.join(_cache(args))}: for --model-path; start the server with it",
                param=next(iter(_cache(args))),
            )
        from k3stack.chat import load_tokenizer
        from k3stack.config.geometry import load_geometry
        from k3stack.models.builtin import resolve
        from k3stack.verify.remote import RemoteTarget

        nano = resolve("nano").path
        tokenizer = load_tokenizer(nano, load_geometry(nano))
        remote = RemoteTarget(args.base_url, args.model, _key(args))
        report = verify(remote, tokenizer, dtype=args.dtype, **options)
    else:
        with _local(args) as local:
            report = verify(local, local.tokenizer, dtype=args.dtype, narrow=bool(_cache(args)), **options)
    if args.json:
        print_json(report)
    else:
        _print(report)
    return 0 if report["passed"] else 1


def _refuse_unused(args: Namespace) -> None:
    """Options that nothing would read are refused by name."""
    served, asked = args.base_url is not None, args.dataset is not None
    for name, used, what in (
        ("model", served, "--base-url: a server may have several"),
        ("api_key", served, "--base-url: a server may ask for one"),
        ("device", not served, "--model-path: a server has its own"),
        ("limit", asked, "--dataset"),
        ("max_tokens", asked, "--dataset"),
    ):
        if not used and getattr(args, name) is not None:
            flag = flag_of(name)
            raise UserError(f"{flag} is for {what}; leave it out", param=flag)
    if asked and args.quick:
        raise UserError("--quick is not for --dataset; --limit asks fewer of its questions", param="--quick")


def _local(args: Namespace) -> LocalTarget | Workers:
    """The model in this process or in several, as ``--workers`` says."""
    from k3stack.verify import workers
    from k3stack.verify.local import LocalTarget

    count, device = args.workers, args.device or "cpu"
    if count is None:
        count = workers.usual_count(args.model_path, device, args.quick)
    cache = {name[2:].replace("-", "_"): value for name, value in _cache(args).items()}
    if count == 1:
        return LocalTarget(args.model_path, args.dtype, device, **cache)
    if device != "cpu":
        raise UserError(f"--workers {count} shares a CPU's cores; --device is {device}", param="--workers")
    return workers.Workers(args.model_path, args.dtype, count, cache)


def _cache(args: Namespace) -> dict[str, str]:
    """Flags about the precision of what is kept, as far as they are given."""
    given = {"--kv-cache-dtype": args.kv_cache_dtype, "--mamba-ssm-dtype": args.mamba_ssm_dtype}
    return {name: value for name, value in given.items() if value is not None}


def _dataset(args: Namespace) -> int:
    if args.base_url is None:
        raise UserError("--dataset asks a server: give --base-url", param="--base-url")
    from k3stack.verify import dataset
    from k3stack.verify.remote import RemoteTarget

    items = dataset.read(Path(args.dataset), args.limit)
    target = RemoteTarget(args.base_url, args.model, _key(args), max_tokens=args.max_tokens or 4096)
    result = dataset.run(target, items, say)
    floor = _thresholds(args.threshold).get("dataset", 0.0)
    if args.json:
        print_json(result)
    else:
        low, high = result["ci"]
        print(f"{result['target']}: {result['score']:.4f} of {result['n']:,} (95 % interval {low:.4f} to {high:.4f})")
        print(f"wrong {result['wrong']}, cut by the token limit {result['truncated']}, failed {result['failed']}")
    return 0 if result["score"] >= floor else 1


def _print(report: dict[str, Any]) -> None:
    print(report["target"])
    for name in ("tool_calls", "long_lookups", "conversations"):
        entry = report[name]
        low, high = entry["ci"]
        print(f"  {name:14} {entry['score']:.4f}  n {entry['n']:,}  95 % interval {low:.4f} to {high:.4f}")
    found = report["agreement"]
    if found is None:
        print(f"  agreement      not measured: {report['agreement_reason']}")
    else:
        kls = f"mean KL {found['mean_kl']:.3g}  largest {found['max_kl']:.3g}"
        print(f"  agreement      top1 {found['top1']:.5f}  {kls}  n {found['n']:,}")
    print("passed" if report["passed"] else "\n".join(("FAILED", *(f"  {line}" for line in report["missed"]))))


def _thresholds(given: list[str]) -> dict[str, float]:
    from k3stack.verify.run import AGREEMENT, THRESHOLDS

    known = {*THRESHOLDS, *(f"agreement.{k}" for k in AGREEMENT["float32"]), "dataset"}
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name] = float(value)
            if not math.isfinite(found[name]):
                raise ValueError
        except ValueError:
            equals = ""
        if not equals or name not in known:
            raise UserError(f"--threshold is {text!r}; expected NAME=NUMBER with NAME one of {sorted(known)}")
    return found


def _key(args: Namespace) -> str | None:
    key: str | None = args.api_key or os.environ.get("OPENAI_API_KEY")
    return key


def _parser() -> Parser:
    parser = Parser("verify", __doc__ or "", json_output=True)
    what = parser.add_argument_group("what is verified")
    what.add_argument("--model-path", help="`nano`, or a folder with its files, run on this machine")
    what.add_argument("--base-url", help="a running server, such as http://127.0.0.1:30000")
    what.add_argument("--model", help="model name to send to the server (default: its first)")
    what.add_argument("--api-key", help="bearer token (default: the environment's OPENAI_API_KEY)")
    what.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16"),
        default="float32",
        help="what --model-path computes in; with --base-url what the server computes in: it chooses the thresholds",
    )
    what.add_argument("--kv-cache-dtype", choices=("bfloat16", "fp8_e4m3"), help="of cache rows, for --model-path")
    what.add_argument("--mamba-ssm-dtype", choices=("float32", "bfloat16"), help="of states, for --model-path")
    what.add_argument("--device", help="cpu, cuda or cuda:N, for --model-path (default: cpu)")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--workers",
        type=whole(1, 256),
        metavar="N",
        help="processes that share the questions to --model-path on a CPU (default: the cores this process may use, "
        "at most 8, with --quick 2; one with all cores for a model larger than 1 GiB)",
    )
    how.add_argument("--quick", action="store_true", help="two minutes instead of twenty: fewer questions")
    how.add_argument(
        "--threshold", action="append", default=[], metavar="NAME=NUMBER", help="another threshold; may be given again"
    )
    how.add_argument("--dataset", metavar="FILE", help="score a server on JSON lines of questions and numeric answers")
    how.add_argument("--limit", type=whole(1, 10**9), help="at most so many questions of --dataset")
    how.add_argument("--max-tokens", type=whole(1, 10**9), help="token limit of an answer to --dataset (default: 4096)")
    return parser
