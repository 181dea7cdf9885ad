"""Builds K3-nano's ``tiktoken.model``: a small byte-pair encoding trained on the generator's own output.

Two choices keep copying simple for a small model. A word has one spelling in tokens: the form after a blank differs
from the form after a quote in its first token alone, because the blank joins last. Digits never merge. Syllables of
the invented names are merged first, so that unseen names fall into syllables too.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
from collections import Counter
from pathlib import Path

import regex

from k3stack.verify.language.names import syllables
from k3stack.verify.language.talk import Conversation, Talker
from training.format import EFFORT_TEXT, OFFSETS, PATTERN, SPECIAL_SLOTS, TOOLS_TEXT

Pair = tuple[bytes, bytes]
MARKUP = "message role user system assistant tool type name index key think response tools call argument json string"
MARKUP += " number boolean null object array thinking-effort tool-declare tool-choice response-format"


def corpus(conversations: int) -> Counter[str]:
    """Pre-tokens of generated conversations, by count."""
    counts: Counter[str] = Counter()
    find = regex.compile(PATTERN, regex.V1).findall
    for i in range(conversations):
        talker = Talker(f"vocabulary:{i}", held_out=False)
        for talk in (talker.tool_use(), talker.conversation(), talker.lookup(12, 3), talker.chat()):
            for text in texts(talk):
                counts.update(find(text))
    for word in MARKUP.split():
        counts[word] += 10**6
        counts[" " + word] += 10**6
    return counts


def texts(talk: Conversation) -> list[str]:
    found = [EFFORT_TEXT.format(talk.effort)]
    if talk.tools:
        found.append(TOOLS_TEXT.format(json.dumps(talk.tools, separators=(",", ":"), sort_keys=True)))
    for message in talk.messages:
        found += [message["content"], message.get("reasoning_content", "")]
        for call in message.get("tool_calls", ()):
            found += [call["function"]["name"], *json.loads(call["function"]["arguments"])]
    return found


def pieces(counts: Counter[str], at_least: int) -> tuple[Counter[bytes], Counter[bytes]]:
    """(words without a leading blank, words seen after a blank): frequent pre-tokens, letters apart from the rest."""
    plain: Counter[bytes] = Counter()
    spaced: Counter[bytes] = Counter()
    for token, count in counts.items():
        if count < at_least or any(c.isdigit() for c in token):
            continue
        blank = token.startswith(" ") and len(token) > 1
        body = token[1:] if blank else token
        if len(body) > 1 and body[1].isalpha() and not body[0].isalpha():
            body = body[1:]  # a quote or underscore before a word stays a token of its own
        plain[body.encode()] += count
        if blank:
            spaced[body.encode()] += count
    return plain, spaced


def forced_merges() -> list[Pair]:
    merges: list[Pair] = []
    for form in (str.lower, str.capitalize):
        for syllable in syllables():
            word = form(syllable).encode()
            merges.append((word[:-1], word[-1:]))
    return merges


def apply(word: list[bytes], pair: Pair) -> list[bytes]:
    out: list[bytes] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def learn(plain: Counter[bytes], spaced: Counter[bytes], size: int) -> list[bytes]:
    """Tokens in rank order: bytes, syllables, words by byte-pair merges, then the forms with a leading blank."""
    tokens = [bytes([i]) for i in range(256)]
    known = set(tokens)
    words = {w: [bytes([b]) for b in w] for w in plain}

    def add(pair: Pair) -> None:
        token = pair[0] + pair[1]
        if token not in known:
            known.add(token)
            tokens.append(token)
        for w, split in words.items():
            if token in w and len(split) > 1:
                words[w] = apply(split, pair)

    for pair in forced_merges():
        add(pair)
    blank_forms = list(tokens[256:])
    while True:
        ends = {split[0] for w, split in words.items() if w in spaced and len(split) == 1}
        heads = list(dict.fromkeys([*blank_forms, *sorted(ends)]))
        if len(tokens) + len(heads) >= size:
            break
        pairs: Counter[Pair] = Counter()
        for w, split in words.items():
            for pair in itertools.pairwise(split):
                pairs[pair] += plain[w]
        if not pairs:
            break
        add(max(pairs, key=lambda p: (pairs[p], p)))
    for head in heads:
        if b" " + head not in known and len(tokens) < size:
            known.add(b" " + head)
            tokens.append(b" " + head)
    return tokens


def write(folder: Path, tokens: list[bytes]) -> None:
    """``tiktoken.model`` and ``tokenizer_config.json`` (names of the special slots)."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = {offset: name for name, offset in OFFSETS.items()}
    base = len(tokens)
    not_special = {"<|open|>", "<|close|>", "<|sep|>"}
    added = {}
    for slot in range(SPECIAL_SLOTS):
        name = names.get(slot, f"<|reserved_token_{base + slot}|>")
        added[str(base + slot)] = {"content": name, "special": name not in not_special}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "added_tokens_decoder": added,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096, help="rows of the embedding, a multiple of 64")
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--at-least", type=int, default=40)
    args = parser.parse_args()
    plain, spaced = pieces(corpus(args.conversations), args.at_least)
    tokens = learn(plain, spaced, args.vocab - SPECIAL_SLOTS)
    while len(tokens) < args.vocab - SPECIAL_SLOTS:  # fewer merges than room: fill up with longer runs of blanks
        tokens.append(b" " * (len(tokens) - 256 + 2))
    write(args.out, tokens)
    print(f"{len(plain)} frequent words, {len(tokens)} ranks, {len(tokens) + SPECIAL_SLOTS} rows")


if __name__ == "__main__":
    main()
