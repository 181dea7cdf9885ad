"""Time that the output parser and the detokeniser take per token, on one core.

    python benchmarks/chat_parser.py path/to/tiktoken.model

Checks first that the parser gives back what was encoded.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import k3stack.config
from k3stack.chat import Detokenizer, OutputParser, Tokenizer, load_tokenizer, parse_ids
from k3stack.config.geometry import load_geometry

PROSE = "The quick brown fox, whose name was Größe, jumped. 今天天气很好 😀👨‍👩‍👧 and so on.\n" * 400
CODE = "def f(x):\n    return x + 1  # comment\n" * 1000
OUTPUT = (
    f"{PROSE}<|close|>think<|sep|><|open|>response<|sep|>{PROSE}<|close|>response<|sep|>"
    f'<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|>'
    f'<|open|>argument key="text" type="string"<|sep|>{CODE}<|close|>argument<|sep|>'
    f"<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)


def best(work: Callable[[], object], tokens: int, rounds: int = 7) -> float:
    """The best of several rounds, in µs a token."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) / tokens * 1e6


def parse(tokenizer: Tokenizer, ids: list[int], at_once: int) -> None:
    parser = OutputParser(tokenizer)
    for i in range(0, len(ids), at_once):
        parser.feed(ids[i : i + at_once])
    parser.finish()


def detokenise(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    for i in ids:
        detokenizer.feed((i,))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("tiktoken_model", type=Path)
    geometry = load_geometry(Path(k3stack.config.__file__).parent / "data" / "k3_config.json")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.parse_args().tiktoken_model, Path(folder) / "tiktoken.model")
        tokenizer = load_tokenizer(folder, geometry)
    ids = tokenizer.encode_marked(OUTPUT)
    parsed = parse_ids(ids, tokenizer)
    assert (parsed.reasoning, parsed.content, len(parsed.tool_calls)) == (PROSE, PROSE, 1)
    print(f"{len(ids)} tokens of prose, code, emoji and Chinese; best of 7, µs a token")
    for at_once in (1, 4, 16):
        shown = best(lambda at_once=at_once: parse(tokenizer, ids, at_once), len(ids))
        print(f"parser, {at_once:2} tokens a call  {shown:6.2f}")
    print(f"detokeniser alone        {best(lambda: detokenise(tokenizer, ids), len(ids)):6.2f}")


if __name__ == "__main__":
    main()
