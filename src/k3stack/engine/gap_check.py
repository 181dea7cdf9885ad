"""Can this machine keep the bound on the gap between two tokens? Measured at start, before anybody is served."""

from __future__ import annotations

import random

from k3stack.config.sampling import SamplingParams
from k3stack.engine import messages as msg
from k3stack.engine.core import EngineCore
from k3stack.scheduler import Slo

ROUNDS = 3
"""Times that a prompt is computed beside a stream; the first ones are slower than those that count (the learned cost
goes by relative errors, so that a slow one weighs little)."""
STREAM_TOKENS = 48


def check_gap(core: EngineCore, policy: Slo, chunk: int) -> str | None:
    """Compute prompts of ``chunk`` tokens beside a stream, so that ``policy`` learns what steps take here, and say
    whether its bound on the gap can be kept (None: it can, or there is none). Nothing stays in the cache.

    Raises what the executor raises: a machine that cannot run these steps cannot serve.
    """
    if policy.options.max_gap_s is None:
        return None
    rng = random.Random(0)
    vocab = core.info["vocab"]

    def submit(rid: str, answer: int) -> None:
        ids = tuple(rng.randrange(vocab) for _ in range(chunk))
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0, seed=0)
        core.submit(msg.Submit(rid=rid, prompt_ids=ids, sampling=sampling))

    submit("gap-check", STREAM_TOKENS)
    for i in range(ROUNDS):
        for _ in range(4):
            core.turn()
        submit(f"gap-check-{i}", 1)
    while core.turn():
        pass
    core.take_outputs()
    core.flush()
    return policy.gap_note()
