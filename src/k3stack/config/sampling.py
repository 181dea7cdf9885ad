"""How to choose the next token: one request's sampling parameters, as the API, the engine and plans carry them."""

from __future__ import annotations

import msgspec

from k3stack.errors import UserError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request. ``validate`` raises UserError that names the field.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 means all. ``seed`` makes the choice a function of the seed and
    the position alone, so that it does not depend on what else is in the batch.
    """

    max_tokens: int | None = None
    """None: up to the context length."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None
    """Return log-probabilities of the prompt's tokens from this position on (None: none)."""

    def validate(self) -> SamplingParams:
        """Check ranges; returns self."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", self.top_k >= -1, "-1 or 0 (all), or 1 and more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 2.0, "from 0.000001 to 2"),
            ("n", 1 <= self.n <= 128, "from 1 to 128"),
            ("top_logprobs", 0 <= self.top_logprobs <= 64, "from 0 to 64"),
        )
        for name, fine, allowed in checks:
            if not fine:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be {allowed}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", param="min_tokens")
        return self
