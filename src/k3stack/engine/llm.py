"""``LLM``: the engine in this process, for scripts, tests and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from k3stack.chat import Detokenizer, Tokenizer
from k3stack.config.options import make_engine_options
from k3stack.config.sampling import SamplingParams
from k3stack.engine import messages as msg
from k3stack.engine.boot import boot
from k3stack.errors import UserError
from k3stack.scheduler.plan import TokenLogprobs

Prompt = Sequence[int] | str


@dataclass(slots=True)
class Choice:
    """One generated sequence. ``token_ids`` include the end token that stopped it; a matched stop string does not."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """stop, length, abort, rejected or error."""
    matched_stop: int | str | None = None
    message: str | None = None
    """Why, where it was rejected or failed."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str | None = None
    """Decoded without control tokens; None where the model has no tokenizer."""


@dataclass(slots=True)
class Generation:
    """What came of one prompt; the first choice's fields can be read off directly."""

    prompt_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    """Prompt tokens that were reused instead of computed (by the first choice)."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """From ``prompt_logprobs_from`` on."""

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> int | str | None:
        return self.choices[0].matched_stop

    @property
    def message(self) -> str | None:
        return self.choices[0].message

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self.choices[0].logprobs

    @property
    def text(self) -> str | None:
        return self.choices[0].text


class LLM:
    """A model and its engine in this process.

    ``engine_options``: any field of ``EngineOptions`` (``LLM(path, engine="sglang", chunked_prefill_size=64)``); an
    unknown one raises UserError with its name; ``progress=True`` shows a bar while the weights are read. It works on
    token ids alone where a checkpoint has no tokenizer.
    Not thread-safe. ``close`` (or a ``with`` block) frees its memory.
    """

    def __init__(self, model_path: str, dtype: str = "float32", device: str = "cpu", **engine_options: Any) -> None:
        progress = bool(engine_options.pop("progress", False))
        self.options = make_engine_options(str(model_path), {"dtype": dtype, "device": device, **engine_options})
        self._engine = boot(self.options, progress=progress)
        self._core = self._engine.core
        self._count = 0

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the checkpoint has none."""
        return self._core.tokenizer

    @property
    def info(self) -> dict[str, Any]:
        """Facts of model and engine; ``pools`` has predicted and actual sizes."""
        return self._core.info

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.floating[Any]]:
        """Logits [len(ids), vocab] after each of ``ids``: float64 for dtype float64, else float32.

        Computed as one fresh sequence in chunks of ``chunked_prefill_size``; nothing cached is used or kept.
        """
        self._check_ids(ids)
        from k3stack.executor.torch.whole import sequence_logits

        chunk = self.options.chunked_prefill_size
        engine, precision = self._engine, self._engine.precision
        found = sequence_logits(
            engine.model,
            engine.plan.layout,
            ids,
            chunk if chunk > 0 else max(len(ids), 1),
            state=precision.state,
            row=precision.row,
        )
        logits: npt.NDArray[np.floating[Any]] = found.numpy()
        return logits

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generation]:
        """Continue every prompt; results in the order of ``prompts``.

        A prompt is a sequence of token ids, or text where the model has a tokenizer. ``sampling``: one for all, or
        one for each. A request that cannot run (too long, say) comes back with finish_reason 'rejected' and a message.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise UserError("generate takes a list of prompts; wrap a single one in a list", param="prompts")
        ids = [self._encode(prompt) for prompt in prompts]
        if sampling is None or isinstance(sampling, SamplingParams):
            params = [sampling or SamplingParams()] * len(ids)
        else:
            params = list(sampling)
            if len(params) != len(ids):
                raise UserError(f"{len(params)} sampling parameters for {len(ids)} prompts", param="sampling")
        for own in params:
            own.validate()
        found = _with_bar(self, ids, params) if progress else _all(self, ids, params)
        done = dict(found)
        return [done[i] for i in range(len(ids))]

    def rolling(self) -> Rolling:
        """Requests that come and go, where the next depend on what came of others."""
        return Rolling(self)

    def stats(self) -> dict[str, Any]:
        """The arena's occupancy by kind (``blocks_free``, ``blocks_running``, ``blocks_snapshot``, ``pages_running``,
        ``pages_cached``, ...) and counters of reuse; the scheduler's under ``scheduler``,
        durations of steps under ``steps``; of an emulated rank what it would have exchanged under ``exchanges``."""
        stats = self._core.stats()
        return {**stats.pop("memory"), **stats}

    def flush(self) -> bool:
        """Drop every cached prefix."""
        return self._core.flush()

    def close(self) -> None:
        """Free the engine. Must not be used afterwards."""
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def next_rid(self) -> str:
        """A fresh request id."""
        self._count += 1
        return f"llm-{self._count}"

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(i) for i in prompt]
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer; give token ids instead of text", param="prompts")
        return self.tokenizer.encode_text(prompt)

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocab = self._core.info["vocab"]
        if not len(ids):
            raise UserError("logits of no tokens were asked for; give at least one id", param="ids")
        bad = [i for i in ids if not 0 <= i < vocab]
        if bad:
            raise UserError(f"token id {bad[0]} is outside of the vocabulary of {vocab:,}", param="ids")


class Rolling:
    """Requests of an ``LLM`` that come and go: ``submit`` at any time, ``turn`` until all have ended. What is still
    open at the end of a ``with`` block is aborted."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._core = llm._core
        self._open: dict[str, _Open] = {}
        self._count = 0

    def __enter__(self) -> Rolling:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for rid in list(self._open):
            self._core.abort(rid)
        if self._open:
            self._core.take_outputs()
            self._open = {}

    @property
    def choices(self) -> int:
        """Sequences that have not ended: a request's ``n`` until all of them have."""
        return sum(entry.left for entry in self._open.values())

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> int:
        """Take a request in. Returns its number, counted from 0. One that cannot run ends as 'rejected'."""
        rid, number = self._llm.next_rid(), self._count
        result = Generation(list(prompt_ids), [Choice() for _ in range(sampling.n)])
        self._open[rid] = _Open(number, result, sampling.n)
        self._count += 1
        self._core.submit(msg.Submit(rid=rid, prompt_ids=tuple(result.prompt_ids), sampling=sampling))
        return number

    def turn(self) -> list[tuple[int, Generation]]:
        """One turn of the engine; the requests that have ended, with their numbers."""
        self._core.turn()
        ended = []
        for output in self._core.take_outputs():
            entry = self._open[output.rid]
            self._take(entry, output)
            if not entry.left:
                del self._open[output.rid]
                ended.append((entry.number, entry.result))
        return ended

    def _take(self, entry: _Open, output: msg.Output) -> None:
        result = entry.result
        choice = result.choices[output.choice]
        choice.token_ids += output.token_ids
        choice.logprobs += output.logprobs
        result.prompt_logprobs += output.scored
        if output.finish_reason is None:
            return
        choice.finish_reason = output.finish_reason
        choice.matched_stop = output.matched_stop
        choice.message = output.message
        if output.choice == 0:
            result.cached_tokens = output.cached_tokens
        tokenizer = self._llm.tokenizer
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, show_control=False)
            choice.text = detokenizer.feed(choice.token_ids) + (output.tail or detokenizer.finish())
        entry.left -= 1


@dataclass(slots=True)
class _Open:
    """A request that has not ended. ``left``: its choices that have not."""

    number: int
    result: Generation
    left: int


def _all(llm: LLM, ids: list[list[int]], params: list[SamplingParams]) -> Iterator[tuple[int, Generation]]:
    """Every prompt's generation, as they end; the queue is kept filled without ever overflowing it."""
    room = llm.options.max_queued_requests or 1
    at = 0
    with llm.rolling() as run:
        while at < len(ids) or run.choices:
            while at < len(ids) and run.choices < room:
                run.submit(ids[at], params[at])
                at += 1
            yield from run.turn()


def _with_bar(llm: LLM, ids: list[list[int]], params: list[SamplingParams]) -> Iterator[tuple[int, Generation]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=len(ids))
        for found in _all(llm, ids, params):
            bar.advance(task)
            yield found
