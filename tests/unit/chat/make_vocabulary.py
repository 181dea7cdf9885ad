"""Writes ``data/small.tiktoken``: a few hundred byte-pair ranks in tiktoken's form, learnt from this repository's text.

    python tests/unit/chat/make_vocabulary.py

The ranks only have to behave like a real vocabulary (merges inside words, across blanks, over several bytes of a
code point); the file is committed so that tests do not depend on a library's version.
"""

from __future__ import annotations

import base64
from collections import Counter
from itertools import pairwise
from pathlib import Path

import regex

from k3stack.chat.tokenizer import PATTERN

RANKS = 700
HERE = Path(__file__).parent
CORPUS = [*sorted((HERE.parents[2] / "src" / "k3stack" / "chat").glob("*.py")), HERE / "data" / "parser_cases.json"]
EXTRA = "今天天气很好。今天天气不好。Größe, Straße, naïve, élève, привет мир, 😀😃😄 " * 8


def pair_counts(words: Counter[tuple[bytes, ...]]) -> Counter[tuple[bytes, bytes]]:
    counts: Counter[tuple[bytes, bytes]] = Counter()
    for word, n in words.items():
        for pair in pairwise(word):
            counts[pair] += n
    return counts


def merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    out: list[bytes] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return tuple(out)


def learn(text: str, ranks: int) -> list[bytes]:
    """Byte-pair ranks: the 256 bytes, then the most frequent pair again and again (ties: the smaller bytes)."""
    found = regex.findall(PATTERN, text, flags=regex.V1)
    words = Counter(tuple(bytes((b,)) for b in word.encode()) for word in found)
    vocabulary = [bytes((i,)) for i in range(256)]
    while len(vocabulary) < ranks:
        counts = pair_counts(words)
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        vocabulary.append(best[0] + best[1])
        merged: Counter[tuple[bytes, ...]] = Counter()
        for word, n in words.items():
            merged[merge(word, best)] += n
        words = merged
    return vocabulary


def main() -> None:
    text = "".join(file.read_text() for file in CORPUS) + EXTRA
    lines = [f"{base64.b64encode(p).decode()} {i}\n" for i, p in enumerate(learn(text, RANKS))]
    (HERE / "data" / "small.tiktoken").write_text("".join(lines))


if __name__ == "__main__":
    main()
