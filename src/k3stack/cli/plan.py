"""`k3 plan`: what a command will do on given hardware, or what to run there. Needs no GPU and no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from k3stack.config.hardware import load_catalogue
from k3stack.config.layout import SizingEngine
from k3stack.errors import UserError
from k3stack.estimate.sglang import DEFAULT_VERSION, parse_version
from k3stack.planner.command import Command, read_command, read_flags
from k3stack.planner.plan import DEFAULT_INPUT, DEFAULT_OUTPUT, Plan, make_plan
from k3stack.planner.recommend import Recommendation, recommend
from k3stack.planner.setup import Setup, build_setup

USAGE = """\
usage: k3 plan --hardware HW [options] [layout and memory flags]
       k3 plan --hardware HW [options] -- COMMAND
       k3 plan --from pool_plan.json

With a command (sglang serve, python -m sglang.launch_server, vllm serve, k3 serve; environment assignments before
it are read) or a layout flag it says what that will do. Otherwise it recommends layouts.

  --hardware HW          8xB300, 32xH200, gb300-nvl72, dgx-h200, ... (nodes of 8; GB200 and GB300 of 4);
                         cpu: this machine, for k3 serve
  --hardware-file FILE   your own GPUs and systems, in the catalogue's form
  --model-path PATH      a packaged model or a checkpoint's folder [moonshotai/Kimi-K3]
  --engine NAME          k3, sglang or vllm: whose rules [k3; after -- the command's own]
  --engine-version V     SGLang's version, where its rules differ [0.5.23]
  --input-len N          prompt tokens of a request [8192]
  --output-len N         answer tokens of a request [1024]
  --concurrency N        requests at once that must be admitted (recommendation)
  --budget-gib G         GiB per GPU for states and cache, instead of the assumed budget
  --disk-gbps R          GB/s (decimal) at which a node reads the checkpoint
  --session-len N        tokens of a session, for how many are kept [128000]
  --from FILE            a plan that a boot saved: predicted against actual
  --html FILE            a page with the pictures, one file; --png FILE the pictures alone
  --json                 the answer as JSON on stdout

Layout and memory flags are SGLang's: --tp-size, --pp-size, --ep-size, --dp-size with --enable-dp-attention,
--dcp-size, --mem-fraction-static, --mamba-full-memory-ratio, --kv-cache-dtype, --mamba-ssm-dtype, ...
Exit status: 0 it fits, 1 it does not (what would is said), 2 the request is wrong.
"""

MAX_TOKENS = 100_000_000
"""Of a prompt or an answer: the time of a prompt is summed over its chunks."""
MAX_NUMBER = 1_000_000_000_000
"""Of the other numbers."""
LAYOUT_FLAGS = ("tp", "pp", "ep", "dp", "attn_dp", "dcp")
_NUMBERS = ("--input-len", "--output-len", "--concurrency", "--session-len")
_WORDS = ("--hardware", "--hardware-file", "--engine", "--engine-version", "--from", "--html", "--png")
_FLOATS = ("--budget-gib", "--disk-gbps")


@dataclass
class Arguments:
    """What was typed, split into our own options and flags that belong to a server."""

    values: dict[str, Any] = field(default_factory=dict)
    as_json: bool = False
    flags: list[str] = field(default_factory=list)
    command: list[str] | None = None

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def run(argv: list[str]) -> int:
    """Plan or recommend; returns 0 when it fits, 1 when it does not."""
    if not argv or any(w in ("-h", "--help") for w in _before_command(argv)):
        print(USAGE)
        return 0 if argv else 2
    args = parse(argv)
    if "from" in args.values:
        from k3stack.planner.saved import saved_text

        print(saved_text(args.values["from"], as_json=args.as_json))
        return 0
    setup, chosen = _setup(args)
    if chosen:
        return _one(args, make_plan(setup, _tokens(args)))
    answer = recommend(setup, args.get("input-len", DEFAULT_INPUT), args.get("output-len", DEFAULT_OUTPUT),
                       args.get("concurrency"))  # fmt: skip
    return _many(args, answer)


def _before_command(argv: Sequence[str]) -> Sequence[str]:
    return argv[: list(argv).index("--")] if "--" in argv else argv


def parse(argv: Sequence[str]) -> Arguments:
    """Split the words. Raises UserError for a malformed value; server flags are checked later."""
    args = Arguments()
    words = list(argv)
    if "--" in words:
        cut = words.index("--")
        words, args.command = words[:cut], words[cut + 1 :]
    while words:
        word = words.pop(0)
        name, equals, inline = word.partition("=")
        if name == "--json":
            args.as_json = True
        elif name in (*_NUMBERS, *_WORDS, *_FLOATS):
            if not equals and (not words or words[0].startswith("--")):
                raise UserError(f"{name} needs a value", param=name)
            args.values[name[2:]] = _convert(name, inline if equals else words.pop(0))
        else:
            args.flags.append(word)
            while words and not words[0].startswith("-"):
                args.flags.append(words.pop(0))
    return args


def _convert(name: str, text: str) -> Any:
    try:
        value: Any = int(text) if name in _NUMBERS else float(text) if name in _FLOATS else text
    except ValueError:
        kind = "a whole number" if name in _NUMBERS else "a number"
        raise UserError(f"{name} is {text!r}; it must be {kind}", param=name) from None
    most = MAX_TOKENS if name in ("--input-len", "--output-len") else MAX_NUMBER
    if isinstance(value, (int, float)) and not 0 < value <= most:
        raise UserError(f"{name} is {text}; it must be above 0 and at most {most:,}", param=name)
    return value


def _tokens(args: Arguments) -> int:
    return int(args.get("input-len", DEFAULT_INPUT)) + int(args.get("output-len", DEFAULT_OUTPUT))


def _setup(args: Arguments) -> tuple[Setup, bool]:
    """The setup, and whether a layout was chosen (else a recommendation is asked for)."""
    if "hardware" not in args.values:
        raise UserError("--hardware is missing, such as --hardware 8xB300", param="--hardware")
    hardware = load_catalogue(args.get("hardware-file")).parse(args.values["hardware"])
    engine = _engine(args)
    own, unknown = read_flags(args.flags, engine)
    if unknown:
        meant = f"; did you mean {unknown[0].meant}?" if unknown[0].meant else ""
        raise UserError(f"there is no option {unknown[0].flag}{meant} (k3 plan --help)", param=unknown[0].flag)
    if args.command is not None:
        command = read_command(args.command)
        if "engine" in args.values and args.values["engine"] != command.engine:
            raise UserError(
                f"--engine {args.values['engine']} contradicts the {command.engine} command after --; leave it out",
                param="--engine",
            )
        clash = sorted(set(own) & set(command.flags) - {"model"})
        if clash:
            raise UserError(f"{', '.join(clash)}: given both before -- and in the command", param=clash[0])
        command = Command(
            command.engine, {**own, **command.flags}, command.env, command.words, command.unknown,
            (*args.flags, *command.serve_words),
        )  # fmt: skip
    else:
        command = Command(engine, own, serve_words=tuple(args.flags))
    version = parse_version(args.values["engine-version"]) if "engine-version" in args.values else DEFAULT_VERSION
    setup = build_setup(command, hardware, budget_gib=args.get("budget-gib"), version=version)
    chosen = args.command is not None or any(f in command.flags for f in LAYOUT_FLAGS)
    return setup, chosen or setup.own is not None


def _engine(args: Arguments) -> SizingEngine:
    name = args.get("engine", "k3")
    engines: dict[str, SizingEngine] = {"k3": "k3", "sglang": "sglang", "vllm": "vllm"}
    if name not in engines:
        raise UserError(f"--engine is {name!r}; known: k3, sglang, vllm", param="--engine")
    if args.command is not None:
        return read_command(args.command).engine
    return engines[name]


def _one(args: Arguments, plan: Plan) -> int:
    session = {"session_len": args.values["session-len"]} if "session-len" in args.values else {}
    if args.as_json:
        from k3stack.planner.document import plan_document

        print(json.dumps(plan_document(plan, disk_gbps=args.get("disk-gbps"), **session), indent=1))
    else:
        from k3stack.planner.report import plan_text

        print(plan_text(plan, disk_gbps=args.get("disk-gbps"), **session))
    _pictures(args, plan, None)
    if plan.refused is not None:
        print(f"k3 plan: refused: {plan.refused.id}: {plan.refused.message}", file=sys.stderr)
        return 1
    if not plan.fits:
        over = plan.setup.gpus_used > plan.setup.hardware.count  # then GiB are not what is short
        short = "" if over else f", {plan.missing_gib:.2f} GiB per GPU short"
        print(f"k3 plan: does not fit{short}: {plan.reason}", file=sys.stderr)
        return 1
    return 0


def _many(args: Arguments, answer: Recommendation) -> int:
    tokens = _tokens(args)
    if args.as_json:
        from k3stack.planner.document import recommendation_document

        print(json.dumps(recommendation_document(answer, disk_gbps=args.get("disk-gbps")), indent=1))
    else:
        from k3stack.planner.report import recommendation_text

        print(recommendation_text(answer, tokens, disk_gbps=args.get("disk-gbps")))
    if answer.layouts:
        _pictures(args, answer.layouts[0].plan, answer)
    enough = bool(answer.layouts) and answer.layouts[0].enough
    if not enough:
        print("k3 plan: no layout of this hardware admits what was asked for", file=sys.stderr)
    return 0 if enough else 1


def _pictures(args: Arguments, plan: Plan, answer: Recommendation | None) -> None:
    if "html" not in args.values and "png" not in args.values:
        return
    from k3stack.planner.pictures import write_pictures

    for path in write_pictures(plan, answer, html=args.get("html"), png=args.get("png")):
        print(f"wrote {path}", file=sys.stderr)
