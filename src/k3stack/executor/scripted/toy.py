"""A toy language model on numbers: what a real network's state, cache rows and sampler are to each other.

The *state* after a prefix is a 64-bit digest of it; the *cache row* of a token is the state after it. The next token is
a function of the state and of every cache row so far, so that a wrong, missing or foreign piece of memory changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from k3stack.config.sampling import SamplingParams

MASK = (1 << 64) - 1
FRESH = 0x9E3779B97F4A7C15
"""State of an empty prefix."""


def mix(a: int, b: int) -> int:
    """A 64-bit digest of two numbers (multiply, rotate, multiply)."""
    h = (a ^ (b + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    h ^= h >> 29
    return h * 0x94D049BB133111EB & MASK


def mix_all(h: int, values: Iterable[int]) -> int:
    for value in values:
        h = mix(h, value)
    return h


@dataclass(slots=True)
class Sampling:
    """What the sampler of one row knows beside the logits."""

    params: SamplingParams
    prompt_ids: tuple[int, ...]
    outputs: list[int]
    """Output tokens, kept where a penalty counts them."""
    count: int
    eos_ids: tuple[int, ...]


def counts_outputs(params: SamplingParams) -> bool:
    """True where a penalty makes the next token depend on which tokens were output before."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class ToyModel:
    """``vocab`` tokens. ``script``: instead of the toy's own choice, output number n is ``script[n % len]``."""

    vocab: int = 512
    script: tuple[int, ...] = ()

    def next_state(self, state: int, token: int) -> int:
        return mix(state, token)

    def sample(self, state: int, row_sum: int, sampling: Sampling, mask: bytes | None) -> int:
        """The next token; ``row_sum``: sum of all cache rows of the prefix, modulo 2^64."""
        params = sampling.params
        h = mix(state, row_sum)
        if params.seed is not None:
            h = mix(mix(h, params.seed), sampling.count)
        if params.repetition_penalty != 1:
            h = mix_all(h, sampling.prompt_ids)
        if counts_outputs(params):
            h = mix_all(h, sampling.outputs)
        token = h % self.vocab
        if self.script:
            token = self.script[sampling.count % len(self.script)]
        banned = sampling.eos_ids if sampling.count < params.min_tokens else ()
        for shift in range(self.vocab):
            at = (token + shift) % self.vocab
            if at not in banned and (mask is None or mask[at >> 3] >> (at & 7) & 1):
                return at
        raise ValueError("the mask and min_tokens leave no token to choose")

    def score(self, state: int, token: int) -> float:
        """Log-probability of ``token`` after the prefix with ``state``."""
        return -(mix(state, token) % 10_000) / 1_000

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_ids: tuple[int, ...] = (),
        limit: int,
        masks: Callable[[Sequence[int]], bytes] | None = None,
    ) -> list[int]:
        """What a lone run answers, computed without any memory: up to a stop id (included) or ``limit`` tokens."""
        stops = {*(() if params.ignore_eos else eos_ids), *params.stop_token_ids}
        sampling = Sampling(params, tuple(prompt_ids), [], 0, tuple(stops))
        state, row_sum = FRESH, 0
        tokens: list[int] = []
        for token in prompt_ids:
            state = mix(state, token)
            row_sum = row_sum + state & MASK
        while len(tokens) < limit:
            token = self.sample(state, row_sum, sampling, masks(tokens) if masks else None)
            tokens.append(token)
            if token in stops and len(tokens) >= params.min_tokens:
                break
            state = mix(state, token)
            row_sum = row_sum + state & MASK
            sampling.outputs.append(token)
            sampling.count += 1
        return tokens
