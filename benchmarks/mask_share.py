"""Masks of many rows beside the steps they belong to: CPU time of both, over answers under random schemas.

    python benchmarks/mask_share.py --model-path nano --streams 64

The engine runs in this process, without a server. Every answer must end by itself and validate. CPU time is what is
counted, so that other load on the machine hardly matters; on a device the masks are worked out while it computes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.schema_streams import obj, problem, with_reference  # noqa: E402

from k3stack import LLM, SamplingParams  # noqa: E402
from k3stack.chat import encode, parse_ids, render  # noqa: E402
from k3stack.chat.grammar import build_grammar  # noqa: E402
from k3stack.chat.settings import ResponseFormat  # noqa: E402
from k3stack.engine import messages as msg  # noqa: E402


class Clock:
    """Wraps a function: how often it was called, and its CPU time."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work, self.calls, self.seconds, self.rows = work, 0, 0.0, 0

    def __call__(self, rows: Any) -> Any:
        began = time.thread_time()
        try:
            return self._work(rows)
        finally:
            self.seconds += time.thread_time() - began
            self.calls, self.rows = self.calls + 1, self.rows + len(rows)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="nano")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with LLM(args.model_path, load_format=args.load_format, arena_gib=0.5, max_running_requests=args.streams) as llm:
        core, tokenizer = llm._core, llm.tokenizer
        assert tokenizer is not None
        schemas, tokens, wrong = {}, {}, []
        for number in range(args.streams):
            rng = random.Random(f"{args.seed}-{number}")
            schemas[str(number)] = with_reference(rng, 2) if rng.random() < 0.2 else obj(rng, 3)
            segments = render([{"role": "user", "content": f"Describe item {number}."}], thinking=False)
            core.submit(msg.Submit(
                rid=str(number), prompt_ids=tuple(encode(segments, tokenizer)),
                sampling=SamplingParams(temperature=1.0, seed=number, max_tokens=3000),
                grammar=build_grammar(
                    tokenizer, in_think=False, form=ResponseFormat("json_schema", schemas[str(number)])
                ),
            ))  # fmt: skip
            tokens[str(number)] = []
        masks = core._loop.masks = Clock(core._loop.masks)
        began, busy = time.process_time(), True
        while busy:
            busy = core.turn()
            for output in core.take_outputs():
                tokens[output.rid] += output.token_ids
                if (end := output.finish_reason) is not None:
                    text = parse_ids(tokens[output.rid], tokenizer, thinking=False).content
                    if found := problem(text, end, {"response_format": True}, schemas[output.rid]):
                        wrong.append(f"{output.rid}: {found}")
        spent = time.process_time() - began
    print(json.dumps({
        "model": args.model_path, "streams": args.streams, "tokens": sum(map(len, tokens.values())),
        "steps_with_masks": masks.calls, "rows_a_step": round(masks.rows / masks.calls, 1),
        "mask_us": round(1e6 * masks.seconds / masks.rows, 1),
        "masks_ms_a_step": round(1e3 * masks.seconds / masks.calls, 2),
        "cpu_ms_a_step": round(1e3 * spent / masks.calls, 2), "share": round(masks.seconds / spent, 4), "wrong": wrong,
    }, indent=2))  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
