"""Time of grammar masks over Kimi-K3's 163,840 tokens: llguidance, which the server uses, and xgrammar if it is there.

    python benchmarks/grammar_masks.py path/to/tiktoken.model

Each grammar first has to let through a text it accepts, token by token, in both libraries; then compiling it, a mask
(median and largest over that text, second pass over a fresh matcher) and following one token are timed.
xgrammar needs torch and transformers beside it (`pip install --no-deps xgrammar apache-tvm-ffi`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance

import k3stack.config
from k3stack.chat import Tokenizer, encode, load_tokenizer, render
from k3stack.chat.grammar import build_grammar
from k3stack.chat.masks import Grammars
from k3stack.chat.settings import ToolChoice
from k3stack.config.geometry import load_geometry

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "note": {"type": "string"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DOCUMENT = '{"name": "Ünal 😀 the first", "age": 42, "tags": ["red", "blue"], "note": "said \\"hi\\" to all of them"}'
PROSE = "Hello there, I am going to call a tool for you now.\n" * 3
TOOL = {"type": "function", "function": {"name": "write_file", "strict": True, "parameters": SCHEMA}}


class Row:
    """Timings of one grammar in one library: compile in ms, the rest in µs."""

    def __init__(self, compile_s: float, masks: list[float], follows: list[float]) -> None:
        self.compile_ms = compile_s * 1e3
        self.median, self.largest = statistics.median(masks) * 1e6, max(masks) * 1e6
        self.follow = statistics.median(follows) * 1e6

    def __str__(self) -> str:
        return f"{self.compile_ms:10.1f} {self.median:10.1f} {self.largest:10.1f} {self.follow:10.1f}"


def clock(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def run(compile_s: float, fresh: Callable[[], tuple[Callable[[], Any], Callable[[int], bool]]], ids: list[int]) -> Row:
    masks: list[float] = []
    follows: list[float] = []
    for _ in range(2):
        masks, follows = [], []
        mask, follow = fresh()
        for token in ids:
            masks.append(clock(mask)[0])
            seconds, good = clock(lambda token=token, follow=follow: follow(token))
            assert good, f"token {token} was refused"
            follows.append(seconds)
    return Row(compile_s, masks, follows)


def with_llguidance(tokenizer: Any, lark: str, ids: list[int]) -> Row:
    seconds, matcher = clock(
        lambda: llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    )

    def fresh() -> tuple[Callable[[], Any], Callable[[int], bool]]:
        copy = matcher.deep_copy()
        return copy.compute_bitmask, copy.consume_token

    return run(seconds, fresh, ids)


def with_xgrammar(compiled: Callable[[], Any], vocab: int, ids: list[int]) -> Row:
    import xgrammar

    seconds, grammar = clock(compiled)
    bits = xgrammar.allocate_token_bitmask(1, vocab)

    def fresh() -> tuple[Callable[[], Any], Callable[[int], bool]]:
        matcher = xgrammar.GrammarMatcher(grammar)
        return lambda: matcher.fill_next_token_bitmask(bits), matcher.accept_token

    return run(seconds, fresh, ids)


def call_ids(tokenizer: Tokenizer) -> list[int]:
    """What a model without thinking would generate to call the tool with the document."""
    asked = [{"role": "user", "content": "x"}]
    call = {"function": {"name": "write_file", "arguments": DOCUMENT}}
    answered = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = encode(render(asked, thinking=False), tokenizer)
    whole = encode(render(answered, thinking=False), tokenizer)
    return whole[len(prompt) : whole.index(tokenizer.control.end_of_msg, len(prompt))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiktoken_model", type=Path)
    file = parser.parse_args().tiktoken_model
    geometry = load_geometry(Path(k3stack.config.__file__).parent / "data" / "k3_config.json")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / "tiktoken.model")
        tokenizer = load_tokenizer(folder, geometry)
    seconds, grammars = clock(lambda: Grammars(tokenizer))
    print(f"llguidance {llguidance.get_version().split()[0]}: vocabulary {seconds:.2f} s")
    print(f"{'':36}{'compile ms':>10} {'mask µs':>10} {'largest':>10} {'follow µs':>10}")
    texts = {"schema": DOCUMENT, "any object": DOCUMENT, "free text": PROSE, "text of 2,000 at most": PROSE}
    larks = {
        "schema": f"start: %json {json.dumps(SCHEMA)}",
        "any object": 'start: %json {"type": "object"}',
        "free text": "start: T\nT: /(?s:.)*/",
        "text of 2,000 at most": "start: T\nT: /(?s:.){0,2000}/",
    }
    for name, lark in larks.items():
        print(f"llguidance  {name:24}{with_llguidance(grammars.tokenizer, lark, tokenizer.encode_text(texts[name]))}")
    forced = build_grammar(tokenizer, in_think=False, tools=[TOOL], choice=ToolChoice("required"))
    assert forced is not None
    print(
        f"llguidance  {'forced strict call':24}{with_llguidance(grammars.tokenizer, forced.lark, call_ids(tokenizer))}"
    )
    xgrammar_rows(tokenizer, texts)


def xgrammar_rows(tokenizer: Tokenizer, texts: dict[str, str]) -> None:
    try:
        import xgrammar
    except ImportError as e:
        print(f"xgrammar: {e}")
        return
    seconds, info = clock(
        lambda: xgrammar.TokenizerInfo(
            tokenizer.pieces,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=tokenizer.vocab_size,
            stop_token_ids=[tokenizer.control.end_of_msg],
        )
    )
    print(f"xgrammar: vocabulary {seconds:.2f} s")
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    grammars: dict[str, Callable[[], Any]] = {
        "schema": lambda: compiler.compile_json_schema(json.dumps(SCHEMA)),
        "any object": lambda: compiler.compile_builtin_json_grammar(),
        "free text": lambda: compiler.compile_grammar("root ::= [^\\x00]*"),
        "text of 2,000 at most": lambda: compiler.compile_grammar("root ::= [^\\x00]{0,2000}"),
    }
    for name, compiled in grammars.items():
        ids = tokenizer.encode_text(texts[name])
        print(f"xgrammar    {name:24}{with_xgrammar(compiled, tokenizer.vocab_size, ids)}")


if __name__ == "__main__":
    main()
