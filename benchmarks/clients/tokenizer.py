"""Writes a Hugging Face tokenizer folder from a tiktoken vocabulary, for load generators that want one.

    python tokenizer.py MODEL_FOLDER OUT_FOLDER

Runs in a load generator's environment (needs the package ``tokenizers`` alone). Counts of tokens agree with the
server's to a few percent: pre-tokenization is byte-level GPT-2's here.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "[EOS]"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for number, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(256 + number)
    return letters


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each piece is merged from, in order of rank: what is left of it when only lower ranks merge."""
    found = []
    for piece, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in piece]
        while len(parts) > 2:
            pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def main() -> None:
    """See the module."""
    source, out = Path(sys.argv[1]) / "tiktoken.model", Path(sys.argv[2])
    ranks = {}
    for line in source.read_bytes().splitlines():
        piece, rank = line.split()
        ranks[base64.b64decode(piece)] = int(rank)
    letters = byte_letters()

    def text(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    vocab = {text(piece): rank for piece, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(text(a), text(b)) for a, b in merges_of(ranks)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END, "pad_token": END,
        "model_max_length": 8192, "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
