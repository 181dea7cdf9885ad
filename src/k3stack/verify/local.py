"""A model in this process as the target: prompts rendered and outputs parsed as the server does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from k3stack.chat import encode, parse_ids, render
from k3stack.config.sampling import SamplingParams
from k3stack.errors import UserError
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.verify.order import Order, places
from k3stack.verify.questions import Question
from k3stack.verify.target import AT_ONCE, MAX_TOKENS, Answer, CannotScoreError, Progress, Scoring

if TYPE_CHECKING:
    from k3stack.engine.llm import LLM, Generation

REFILL = 8
"""Requests that have to end before new ones join a full batch: prompts that are computed together cost less."""


def kept_in(options: Mapping[str, Any]) -> str:
    """What a target's name says of the precision of cache rows and states, where it was chosen."""
    told = {"kv_cache_dtype": "cache rows", "mamba_ssm_dtype": "states"}
    found = [f"{what} in {options[name]}" for name, what in told.items() if name in options]
    return f" ({', '.join(found)})" if found else ""


class LocalTarget:
    """``LLM`` behind the target's two questions. Use in a ``with`` block."""

    def __init__(self, model_path: str, dtype: str, device: str, **options: Any) -> None:
        from k3stack.engine.llm import LLM

        options = {"arena_gib": 1.0, "max_running_requests": AT_ONCE, **options}
        self.llm: LLM = LLM(model_path, dtype=dtype, device=device, **options)
        if self.llm.tokenizer is None:
            raise UserError(f"{model_path} has no tokenizer; verify asks in words", param="--model-path")
        self.tokenizer = self.llm.tokenizer
        self.name = f"{model_path} in {dtype} on {device}{kept_in(options)}"

    def __enter__(self) -> LocalTarget:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.llm.close()

    def prompt(self, question: Question) -> list[int]:
        segments = render(
            list(question.messages),
            tools=list(question.tools) or None,
            thinking=question.thinking,
            reasoning_effort=question.effort if question.thinking else None,
        )
        return encode(segments, self.tokenizer)

    def ask(self, questions: Sequence[Question], tell: Progress) -> list[Answer]:
        answers: dict[int, Answer] = {}
        order = Order(places(questions), AT_ONCE)
        sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        asked: dict[int, int] = {}
        with self.llm.rolling() as run:
            while order.left:
                if run.choices <= AT_ONCE - REFILL:
                    while run.choices < AT_ONCE and (i := order.take()) is not None:
                        asked[run.submit(self.prompt(questions[i]), sampling)] = i
                for number, generation in run.turn():
                    i = asked.pop(number)
                    answers[i] = self._answer(questions[i], generation)
                    order.done(i)
                    tell(1)
        return [answers[i] for i in range(len(questions))]

    def _answer(self, question: Question, generation: Generation) -> Answer:
        parsed = parse_ids(generation.token_ids, self.tokenizer, question.thinking)
        calls = tuple((c.name, c.arguments) for c in parsed.tool_calls)
        failed = None if generation.finish_reason in ("stop", "length") else generation.message or "failed"
        return Answer(parsed.content, calls, generation.finish_reason == "length", failed, generation.cached_tokens)

    def score(self, work: Sequence[Scoring], top: int) -> list[list[TokenLogprobs]]:
        heads = [list(w.ids[: w.first]) for w in work if w.first]
        self.llm.flush()
        if heads:
            self.llm.generate(heads, SamplingParams(temperature=0, max_tokens=1))
        params = [
            SamplingParams(temperature=0, max_tokens=1, logprobs=True, top_logprobs=top, prompt_logprobs_from=w.start)
            for w in work
        ]
        found = []
        for w, done in zip(work, self.llm.generate([list(w.ids) for w in work], params), strict=True):
            if done.finish_reason not in ("stop", "length"):
                raise CannotScoreError(f"a prompt of {len(w.ids):,} tokens: {done.message or done.finish_reason}")
            found.append([entry for entry in done.prompt_logprobs if entry is not None])
        return found
