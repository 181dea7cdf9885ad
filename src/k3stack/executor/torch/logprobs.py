"""Log-probabilities: computed on the device with the step, turned into plain data when the step is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from k3stack.scheduler.plan import TokenLogprobs

Fetch = Callable[[torch.Tensor], torch.Tensor]


class Logprobs:
    """Log-probabilities of ``tokens`` [N] under ``logits`` [N, vocab], with the ``top[i]`` best ones of each.

    ``fetch`` starts a copy to the host; ``result`` may be called once it is done.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, top: Sequence[int], fetch: Fetch) -> None:
        self._top = top
        self._most = min(max(top, default=0), logits.shape[1])
        logprobs = torch.log_softmax(logits, dim=-1)
        self._chosen = fetch(logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1))
        if self._most:
            best = logprobs.topk(self._most, dim=-1)
            self._values, self._ids = fetch(best.values), fetch(best.indices)

    def result(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """One entry for each token; ``tokens`` as before, as plain numbers. Of equals the lowest id comes first."""
        chosen = self._chosen.tolist()
        if not self._most:
            return [TokenLogprobs(t, lp) for t, lp in zip(tokens, chosen, strict=True)]
        found = []
        values, ids = self._values.tolist(), self._ids.tolist()
        for i, token in enumerate(tokens):
            order = sorted(zip(values[i], ids[i], strict=True), key=lambda pair: (-pair[0], pair[1]))[: self._top[i]]
            found.append(TokenLogprobs(token, chosen[i], tuple(t for _, t in order), tuple(v for v, _ in order)))
        return found
