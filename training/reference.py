"""Makes the reference outputs of ``k3 verify``: the built-in model in float64, whole sequences, nothing cached."""

from __future__ import annotations

import argparse
from pathlib import Path

from k3stack.engine.llm import LLM
from k3stack.models.builtin import resolve
from k3stack.verify import agreement
from k3stack.verify.language.talk import Conversation
from training.format import Formatter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("src/k3stack/verify/data/nano-agreement.npz"))
    parser.add_argument("--dtype", default="float64")
    args = parser.parse_args()
    form = Formatter(Path(resolve("nano").path) / "tiktoken.model")

    def encode(talk: Conversation) -> tuple[list[int], int]:
        ids, mask = form.encode(talk)
        heads = [i for i, token in enumerate(ids[: mask.index(True)]) if token == form.end]
        return ids, heads[-2] + 1 if len(heads) > 1 else 1  # where the message before the first question ends

    with LLM("nano", dtype=args.dtype, arena_gib=0.1, chunked_prefill_size=1024) as llm:
        assert llm.tokenizer is not None
        work = agreement.sequences(llm.tokenizer, encode)
        reference = agreement.make(work, llm.logits)
    agreement.save(reference, args.out)
    count = sum(len(at) for at in reference.positions)
    print(f"{count:,} positions of {len(work)} sequences, {args.out.stat().st_size:,} bytes in {args.out}")


if __name__ == "__main__":
    main()
