"""transformers' Kimi-Linear as a subprocess of ``cpu_model.py``: one JSON command a line in, one JSON answer out.

It needs torch and transformers alone, so that it can run in an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import transformers


class Peer:
    def __init__(self, path: str, dtype: str, threads: int, experts: str | None, cpu_time: bool) -> None:
        self.clock = time.process_time if cpu_time else time.perf_counter
        torch.set_num_threads(threads)
        extra = {} if experts is None else {"experts_implementation": experts}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), **extra
        ).eval()
        self.cache: Any = None
        self.last: Any = None

    @torch.inference_mode()
    def prefill(self, ids: list[list[int]]) -> float:
        """Time to the logits of the last token of equally long prompts, the cache filled."""
        tokens = torch.tensor(ids)
        begin = self.clock()
        out = self.model(tokens, use_cache=True, logits_to_keep=1)
        took = self.clock() - begin
        self.cache, self.last = out.past_key_values, out.logits[:, -1]
        return took

    @torch.inference_mode()
    def decode(self, ids: list[int], steps: int) -> list[float]:
        """Times of ``steps`` cached steps that feed ``ids`` again and again."""
        times = []
        for _ in range(steps):
            begin = self.clock()
            out = self.model(torch.tensor(ids).unsqueeze(1), past_key_values=self.cache, use_cache=True)
            times.append(self.clock() - begin)
            self.cache, self.last = out.past_key_values, out.logits[:, -1]
        return times

    def save(self, path: str) -> None:
        torch.save(self.last.float().clone(), path)


def main() -> None:
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        what, answer = command.pop("do"), None
        if what == "versions":
            answer = {"torch": torch.__version__, "transformers": transformers.__version__, "fla": _has_fla()}
        elif what == "load":
            peer = None
            peer = Peer(**command)
            answer = peer.model.config._experts_implementation
        else:
            answer = getattr(peer, what)(**command)
        print(json.dumps(answer), flush=True)


def _has_fla() -> bool:
    from importlib.util import find_spec

    return find_spec("fla") is not None


if __name__ == "__main__":
    main()
