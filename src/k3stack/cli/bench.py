"""`k3 bench`: load-test any OpenAI-compatible server against a latency target."""

from __future__ import annotations

import argparse
import os
import sys

from k3stack.cli.arguments import Parser, above, flag_of, from_zero, print_json, say, whole
from k3stack.cli.load_arguments import (
    add_load_options,
    check_outputs,
    compare_records,
    print_summary,
    read_spec,
    read_target,
    write_outputs,
)
from k3stack.errors import UserError


def run(argv: list[str]) -> int:
    """Run the load; exit 1 when the target's share was not kept."""
    parser = _parser()
    args = parser.read(argv)
    target = read_target(args)
    if args.compare:
        _refuse_beside_compare(args)
        first, second = args.compare
        rows = compare_records(first, second, target)
        if args.json:
            print_json([dict(zip(("figure", "first", "second", "change"), row, strict=True)) for row in rows])
        else:
            for row in rows:
                print("  ".join(f"{cell:>22}" for cell in row))
        return 0
    if not args.base_url:
        raise UserError("--base-url is missing: where the server is, such as http://127.0.0.1:30000", param="base-url")
    from k3stack.workload.bench import run_bench, run_sustained
    from k3stack.workload.client import ClientOptions

    options = ClientOptions(
        base_url=args.base_url.removesuffix("/v1"),
        model=args.model,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY"),
        ignore_eos=not args.no_ignore_eos,
        temperature=args.temperature,
        keep_token_times=args.token_times,
    )
    spec = read_spec(args)
    check_outputs(args)
    more = {
        "gpus": args.gpus,
        "tokens_per_word": args.tokens_per_word,
        "progress": not args.json or sys.stderr.isatty(),
    }
    if args.sustained:
        bench = run_sustained(
            spec,
            options,
            target,
            on_point=lambda p: say(
                f"{p.rate:.3f} requests/s: {100 * p.share:.1f} % within target ({len(p.shares)} runs)"
            ),
            **more,
        )
    else:
        bench = run_bench(spec, options, target, **more)
    title = f"{args.base_url}: {spec.name}" + (f" at {spec.rate:g} requests/s" if spec.rate else "")
    write_outputs(args, title, bench.records, bench.summary, target, bench.window_s, bench.points)
    if args.json:
        print_json(bench.summary)
    else:
        print_summary(bench.summary, title)
    share = bench.summary["share_within_target"]
    return 0 if args.sustained or (share is not None and share >= target.share) else 1


def _refuse_beside_compare(args: argparse.Namespace) -> None:
    """What a comparison of two files would not use is refused by name."""
    server = ("base_url", "model", "api_key", "temperature", "no_ignore_eos", "tokens_per_word", "token_times")
    load = (
        "rate",
        "concurrency",
        "requests",
        "duration",
        "arrivals",
        "input_len",
        "output_len",
        "answer_mean",
        "turns",
    )
    for name in (*server, *load, "time_scale", "sustained", "records", "png", "html"):
        if getattr(args, name) not in (None, False):
            flag = flag_of(name)
            raise UserError(f"{flag} would change nothing beside --compare; leave it out", param=flag)


def _parser() -> Parser:
    parser = Parser("bench", __doc__ or "", json_output=True)
    where = parser.add_argument_group("server")
    where.add_argument("--base-url", help="the server, such as http://127.0.0.1:30000")
    where.add_argument("--model", help="model name to send (default: the server's first)")
    where.add_argument("--api-key", help="bearer token (default: the environment's OPENAI_API_KEY)")
    where.add_argument("--gpus", type=whole(1, 1_000_000), default=1, help="GPUs of the server, for figures per GPU")
    where.add_argument("--temperature", type=from_zero, help="sampling temperature (default: the server's)")
    where.add_argument("--no-ignore-eos", action="store_true", help="let answers end where the model ends them")
    where.add_argument("--tokens-per-word", type=above(0, 1e6), help="skip the calibration of synthetic prompts")
    where.add_argument("--token-times", action="store_true", help="keep the time of every token in the records")
    add_load_options(parser)
    parser.add_argument("--compare", nargs=2, metavar="FILE", help="compare two files of records; nothing is sent")
    return parser
