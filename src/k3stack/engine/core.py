"""``EngineCore``: requests in, outputs out; one scheduler, one step loop, one executor. No process, no sockets.

It expands ``n``, gives seeds to those without, looks for stop strings, and turns the scheduler's events into
``Output`` messages. The engine process and the offline ``LLM`` both run it.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec

from k3stack.chat import Tokenizer
from k3stack.chat.masks import GrammarSession
from k3stack.config.sampling import SamplingParams
from k3stack.engine import messages as msg
from k3stack.engine.constraints import Constraints
from k3stack.engine.observe import ObservedExecutor
from k3stack.engine.step_log import StepLog
from k3stack.engine.stops import ContentText, RawText, StopMatcher
from k3stack.errors import UserError
from k3stack.memory import Memory
from k3stack.scheduler import FinishEvent, Request, Scheduler, SchedulerOptions, StepLoop, StopHit, Target, TokenEvent
from k3stack.scheduler.policy import Policy
from k3stack.scheduler.seams import Executor

COMPILE_WAIT_S = 0.02
"""How long a turn waits for a grammar when there is nothing else to do."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 64) - 1


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, t: float) -> None:
        time.sleep(max(0.0, t - time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What boot found out and the core needs to know of its model."""

    vocab: int
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    """None: the checkpoint has none, and stop strings are refused."""
    random_seed: int | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Choice:
    """One of a request's ``n`` sequences; ``rid`` is the scheduler's name for it."""

    submit: msg.Submit
    index: int
    rid: str
    matcher: StopMatcher | None = None


@dataclass(slots=True)
class _Live:
    """A request with choices that have not ended. ``held``: those that wait for the first to compute the prompt."""

    submit: msg.Submit
    open: dict[str, _Choice] = field(default_factory=dict)
    held: list[Request] = field(default_factory=list)


class EngineCore:
    """See the module. Single-threaded; ``turn`` blocks for about one step."""

    def __init__(
        self,
        memory: Memory,
        policy: Policy,
        options: SchedulerOptions,
        executor: Executor,
        setup: EngineSetup,
        step_log: StepLog | None = None,
    ) -> None:
        self.memory = memory
        self.executor = ObservedExecutor(executor, step_log)
        self._setup = setup
        self.scheduler = Scheduler(memory, policy, options, WallClock(), stopper=self._stop)
        self._constraints = None if setup.tokenizer is None else Constraints(setup.tokenizer)
        self._loop = StepLoop(self.scheduler, self.executor, self._constraints)
        self._compiling: dict[str, tuple[msg.Submit, Future[list[GrammarSession]]]] = {}
        self._live: dict[str, _Live] = {}
        self._choices: dict[str, _Choice] = {}
        self._outputs: list[msg.Output] = []
        self._seeds = random.Random(setup.random_seed)

    @property
    def info(self) -> dict[str, Any]:
        """Model facts, limits and pools, for ``Ready``."""
        return self._setup.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._setup.tokenizer

    def submit(self, submit: msg.Submit) -> None:
        """Take a request in; one that cannot run ends at once with an output that says why."""
        try:
            self._check(submit)
        except UserError as error:
            self._refuse(submit, str(error))
            return
        if submit.grammar is None:
            self._start(submit, [])
        else:
            assert self._constraints is not None
            future = self._constraints.compile(submit.grammar, submit.sampling.n)
            self._compiling[submit.rid] = submit, future

    def _start(self, submit: msg.Submit, sessions: Sequence[GrammarSession]) -> None:
        """Give the request to the scheduler. ``sessions``: one a choice where it has a grammar."""
        live = self._live[submit.rid] = _Live(submit)
        requests = [self._request(live, index) for index in range(submit.sampling.n)]
        for request, session in zip(requests, sessions, strict=False):
            assert self._constraints is not None
            self._constraints.follow(request.rid, session)
        # The others wait until the first has computed the prompt: then they find it in the cache.
        live.held = requests[1:]
        self.scheduler.submit(requests[0])
        self._collect()

    def _start_compiled(self, timeout_s: float | None) -> None:
        """Start the requests whose grammar is ready, after waiting at most ``timeout_s`` for one to be."""
        if timeout_s is not None:
            wait([future for _, future in self._compiling.values()], timeout_s, "FIRST_COMPLETED")
        for rid, (submit, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[rid]
            try:
                self._start(submit, future.result())
            except UserError as error:
                self._refuse(submit, str(error))

    def abort(self, rid: str) -> None:
        """End every choice of ``rid``; unknown or ended requests are ignored."""
        live = self._live.get(rid)
        if live is None:
            self._abort_compiling(rid)
            return
        self._release(live)
        for choice in list(live.open):
            self.scheduler.abort(choice)
        self._collect()

    def _abort_compiling(self, rid: str) -> None:
        if (entry := self._compiling.pop(rid, None)) is None:
            return
        submit, future = entry
        future.cancel()
        for index in range(submit.sampling.n):
            self._outputs.append(
                msg.Output(rid=rid, choice=index, finish_reason="abort", prompt_tokens=len(submit.prompt_ids))
            )

    def turn(self) -> bool:
        """Plan, run and commit about one step; False when there is nothing to do. What the executor raises passes
        through, after every open request has got its end."""
        if self._compiling:
            self._start_compiled(COMPILE_WAIT_S if self.scheduler.idle else None)
        try:
            busy = self._loop.turn()
        except BaseException as error:
            self._collect()  # may start choices that were held back
            self.scheduler.fail_all(f"the engine failed: {error}")
            self._collect()
            raise
        self._collect()
        return busy or bool(self._compiling) or not self.scheduler.idle

    def take_outputs(self) -> list[msg.Output]:
        """What has happened since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, json-able: of ``memory``, ``scheduler`` and ``steps``."""
        found = {
            "memory": dataclasses.asdict(self.memory.stats()),
            "scheduler": dataclasses.asdict(self.scheduler.stats()),
            "steps": self.executor.stats(),
        }
        if (emulated := self.info.get("emulated")) is not None:
            seen = found["scheduler"]
            found["exchanges"] = {
                "count": seen["steps"] * emulated["sums"],
                "bytes": round((seen["prefill_tokens"] + seen["decode_tokens"]) * emulated["bytes_a_token"]),
            }
        return found

    def flush(self) -> bool:
        """Drop every cached prefix; False (and nothing done) while requests run or wait."""
        if not self.scheduler.idle:
            return False
        self.memory.flush()
        return True

    def drain(self) -> None:
        """Take no new requests; those accepted run to their end."""
        while self._compiling:
            self._start_compiled(COMPILE_WAIT_S)
        for live in list(self._live.values()):
            self._release(live)
        self.scheduler.drain()

    @property
    def drained(self) -> bool:
        return self.scheduler.drained

    def close(self) -> None:
        """End everything that is open, let the steps in flight finish, free the device."""
        for rid in [*self._compiling, *self._live]:
            self.abort(rid)
        while self._loop.turn():
            pass
        self.executor.close()
        if self._constraints is not None:
            self._constraints.close()

    def _check(self, submit: msg.Submit) -> None:
        params, vocab = submit.sampling.validate(), self._setup.vocab
        if submit.rid in self._live or submit.rid in self._compiling:
            raise UserError(f"request id {submit.rid!r} is in use", param="rid")
        if submit.prompt_ids and not 0 <= min(submit.prompt_ids) <= max(submit.prompt_ids) < vocab:
            bad = next(i for i in submit.prompt_ids if not 0 <= i < vocab)
            raise UserError(f"prompt token id {bad} is outside of the vocabulary of {vocab:,}", param="prompt_ids")
        for token in params.logit_bias:
            if not 0 <= token < vocab:
                raise UserError(
                    f"logit_bias names token id {token}, outside of the vocabulary of {vocab:,}", param="logit_bias"
                )
        if params.stop and self._setup.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this model has none; use stop_token_ids", param="stop")
        if "" in params.stop:
            raise UserError("a stop string is empty", param="stop")
        if submit.grammar is not None and self._setup.tokenizer is None:
            raise UserError("constrained output needs a tokenizer, and this model has none", param="grammar")

    def _refuse(self, submit: msg.Submit, message: str) -> None:
        for index in range(submit.sampling.n):
            self._outputs.append(
                msg.Output(
                    rid=submit.rid,
                    choice=index,
                    finish_reason="rejected",
                    refusal="invalid",
                    message=message,
                    prompt_tokens=len(submit.prompt_ids),
                )
            )

    def _request(self, live: _Live, index: int) -> Request:
        submit = live.submit
        rid = submit.rid if index == 0 else f"{submit.rid}\0{index}"
        params = self._own_params(submit.sampling, index)
        choice = _Choice(submit, index, rid)
        if params.stop:
            choice.matcher = self._matcher(submit)
        live.open[rid] = self._choices[rid] = choice
        return Request(
            rid=rid,
            prompt_ids=submit.prompt_ids,
            sampling=params,
            priority=submit.priority,
            eos_ids=self._setup.eos_ids,
            masked=submit.grammar is not None,
            target=self._target(submit),
            whole=submit.whole,
        )

    def _target(self, submit: msg.Submit) -> Target | None:
        """The request's own latency target; None where it brings none."""
        first, token = submit.first_token_target_s, submit.token_target_s
        if first is None and token is None:
            return None
        usual = self.scheduler.options.target or Target()
        return Target(usual.first_s if first is None else first, usual.token_s if token is None else token)

    def _own_params(self, params: SamplingParams, index: int) -> SamplingParams:
        """One choice's parameters: its own seed, and the prompt scored once only."""
        seed = params.seed
        if seed is None and params.temperature > 0.0:
            seed = self._seeds.getrandbits(64)
        elif seed is not None and index:
            seed = (seed + index * _SEED_STRIDE) & _SEED_MASK
        scores = params.prompt_logprobs_from if index == 0 else None
        if seed == params.seed and scores == params.prompt_logprobs_from and params.n == 1:
            return params
        return msgspec.structs.replace(params, seed=seed, prompt_logprobs_from=scores, n=1)

    def _matcher(self, submit: msg.Submit) -> StopMatcher:
        tokenizer = self._setup.tokenizer
        assert tokenizer is not None
        in_content = submit.stop_scope == "content"
        source = ContentText(tokenizer, submit.thinking) if in_content else RawText(tokenizer)
        return StopMatcher(submit.sampling.stop, source, submit.sampling.min_tokens)

    def _release(self, live: _Live) -> None:
        held, live.held = live.held, []
        for request in held:
            self.scheduler.submit(request)

    def _stop(self, request: Request, new_tokens: Sequence[int]) -> StopHit | None:
        """The scheduler's stopper. What a match leaves visible is decided by the matcher, not by ``keep``."""
        matcher = self._choices[request.rid].matcher
        if matcher is None:
            return None
        for token in new_tokens:
            if matcher.feed(token):
                assert matcher.matched is not None
                return StopHit(0, matcher.matched)
        return None

    def _collect(self) -> None:
        """Turn the scheduler's events into outputs. Releasing held choices may bring more events."""
        while events := self.scheduler.take_events():
            for event in events:
                choice = self._choices[event.rid]
                if isinstance(event, TokenEvent):
                    self._tokens(choice, event)
                else:
                    self._finish(choice, event)

    def _tokens(self, choice: _Choice, event: TokenEvent) -> None:
        tokens, logprobs = event.tokens, event.logprobs
        if choice.matcher is not None:
            choice.matcher.add_logprobs(logprobs)
            tokens, logprobs = choice.matcher.release()
        if tokens or event.scored:
            self._outputs.append(
                msg.Output(
                    rid=choice.submit.rid,
                    choice=choice.index,
                    token_ids=tokens,
                    logprobs=logprobs,
                    scored=event.scored,
                )
            )
        if event.tokens and choice.submit.sampling.n > 1:
            self._release(self._live[choice.submit.rid])

    def _finish(self, choice: _Choice, event: FinishEvent) -> None:
        rid = choice.submit.rid
        last = self._take_last(choice)
        tokens, logprobs, tail, count = last.token_ids, last.logprobs, "", event.output_tokens
        if (matcher := choice.matcher) is not None:
            by_string = matcher.matched is not None and event.reason == "stop"
            more = matcher.release() if by_string else matcher.release_all()
            tokens, logprobs = tokens + more.tokens, logprobs + more.logprobs
            if by_string:
                tail, count = matcher.tail, matcher.fed
        times = event.times
        self._outputs.append(
            msg.Output(
                rid=rid,
                choice=choice.index,
                token_ids=tokens,
                logprobs=logprobs,
                scored=last.scored,
                tail=tail,
                finish_reason=event.reason,
                matched_stop=event.matched_stop,
                message=event.message or None,
                refusal=event.refusal,
                prompt_tokens=event.prompt_tokens,
                cached_tokens=event.cached_tokens,
                output_tokens=count,
                times=msg.Times(times.queued, times.started, times.first_token, times.finished),
            )
        )
        live = self._live[rid]
        del live.open[choice.rid], self._choices[choice.rid]
        if self._constraints is not None:
            self._constraints.forget(choice.rid)
        self._release(live)
        if not live.open:
            del self._live[rid]

    def _take_last(self, choice: _Choice) -> msg.Output:
        """The choice's output of just now, to be joined with its end: one message less for the reader."""
        if self._outputs:
            last = self._outputs[-1]
            if last.rid == choice.submit.rid and last.choice == choice.index and last.finish_reason is None:
                return self._outputs.pop()
        return msg.Output(rid=choice.submit.rid)
