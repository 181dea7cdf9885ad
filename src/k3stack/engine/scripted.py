"""An engine core that answers from a script, without network, memory and torch: for what stands on the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from k3stack.config.options import EngineOptions
from k3stack.engine import messages as msg


@dataclass(frozen=True, slots=True)
class Script:
    """What the scripted engine says: ``reply`` (empty: the prompt itself), one token a step of ``step_seconds``."""

    reply: tuple[int, ...] = ()
    step_seconds: float = 0.0


@dataclass(slots=True)
class _Choice:
    submit: msg.Submit
    choice: int
    reply: tuple[int, ...]
    queued: float
    limit: int
    first_token: float | None = None
    sent: int = field(default=0)


class ScriptedCore:
    """Every running choice gets its next scripted token each turn; it stops at the end of the script, or by length."""

    def __init__(self, options: EngineOptions, script: Script) -> None:
        self._script = script
        self._context = options.context_length or 1_048_576
        self._running: list[_Choice] = []
        self._outputs: list[msg.Output] = []
        self._draining = False
        self._tokens = 0
        self._requests = 0

    @property
    def info(self) -> dict[str, Any]:
        return {"executor": "scripted", "context": self._context}

    def submit(self, submit: msg.Submit) -> None:
        self._requests += 1
        now = time.monotonic()
        for choice in range(submit.sampling.n):
            if self._draining or len(submit.prompt_ids) >= self._context:
                message = "the engine is draining" if self._draining else "the prompt is longer than the context"
                refusal = "draining" if self._draining else "too_long"
                self._outputs.append(
                    msg.Output(
                        rid=submit.rid, choice=choice, finish_reason="rejected", message=message, refusal=refusal
                    )
                )
                continue
            reply = self._script.reply or submit.prompt_ids
            room = self._context - len(submit.prompt_ids)
            limit = min(room, submit.sampling.max_tokens or room)
            self._running.append(_Choice(submit, choice, reply, now, limit))

    def abort(self, rid: str) -> None:
        for choice in [c for c in self._running if c.submit.rid == rid]:
            self._running.remove(choice)
            self._outputs.append(self._output(choice, (), "abort"))

    def turn(self) -> bool:
        if not self._running:
            return False
        if self._script.step_seconds:
            time.sleep(self._script.step_seconds)
        still = []
        for choice in self._running:
            token = choice.reply[choice.sent % len(choice.reply)]
            choice.sent += 1
            if choice.first_token is None:
                choice.first_token = time.monotonic()
            over = choice.sent >= len(choice.reply) and not choice.submit.sampling.ignore_eos
            reason: msg.FinishReason | None = "stop" if over else "length" if choice.sent >= choice.limit else None
            self._outputs.append(self._output(choice, (token,), reason))
            if reason is None:
                still.append(choice)
        self._tokens += len(self._running)
        self._running = still
        return True

    def _output(self, choice: _Choice, tokens: tuple[int, ...], reason: msg.FinishReason | None) -> msg.Output:
        if reason is None:
            return msg.Output(rid=choice.submit.rid, choice=choice.choice, token_ids=tokens)
        times = msg.Times(choice.queued, choice.queued, choice.first_token, time.monotonic())
        return msg.Output(
            rid=choice.submit.rid,
            choice=choice.choice,
            token_ids=tokens,
            finish_reason=reason,
            prompt_tokens=len(choice.submit.prompt_ids),
            output_tokens=choice.sent,
            times=times,
        )

    def take_outputs(self) -> list[msg.Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> dict[str, Any]:
        return {"running": len(self._running), "requests": self._requests, "output_tokens": self._tokens}

    def flush(self) -> bool:
        return not self._running

    def drain(self) -> None:
        self._draining = True

    @property
    def drained(self) -> bool:
        return self._draining and not self._running

    def close(self) -> None:
        """Nothing is held."""
