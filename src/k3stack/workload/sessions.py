"""The shape of load: sessions of turns. A plain request is a session of one turn.

A turn's prompt is everything before it in the session (earlier prompts and answers) plus ``new_tokens``; it is sent
``think_s`` after the previous answer ended. Content is either synthetic (only lengths matter) or given as messages.
"""

from __future__ import annotations

from typing import Any

import msgspec

from k3stack.errors import UserError


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call. ``output_tokens`` is the answer's length: the client asks for exactly so many where it can."""

    new_tokens: int
    output_tokens: int
    tool_call: bool = False
    think_s: float = 0.0
    priority: int = 0
    messages: tuple[dict[str, Any], ...] | None = None
    """The whole message list of a recorded call (system, history and all), or None: synthetic text."""
    tools: tuple[dict[str, Any], ...] | None = None
    blocks: tuple[int, ...] | None = None
    """Content identities of a trace that ships hashes instead of text: one id a ``block_tokens`` prompt tokens."""
    block_tokens: int = 512


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Turns that follow one another. ``arrival_s``: when the first one arrives, seconds after the start."""

    sid: int
    arrival_s: float
    turns: tuple[Turn, ...]
    stream: bool = False
    """A long-running stream whose output rate is watched (interference workload)."""

    def prompt_tokens(self, turn: int) -> int:
        """Prompt length of turn ``turn``: all earlier turns' prompts and answers, and its own new tokens."""
        if self.turns[turn].messages is not None or self.turns[turn].blocks is not None:
            return self.turns[turn].new_tokens
        before = sum(t.new_tokens + t.output_tokens for t in self.turns[:turn])
        return before + self.turns[turn].new_tokens


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions in order of arrival. ``concurrency`` set: closed loop, so many sessions at a time, arrivals ignored."""

    name: str
    sessions: tuple[Session, ...]
    concurrency: int | None = None
    duration_s: float | None = None
    """Sessions that arrive in [0, duration) are measured; None: all."""
    window_s: tuple[float, float] | None = None
    """Interference: the window in which the streams' output is compared with the quiet time before it."""

    def requests(self) -> int:
        return sum(len(s.turns) for s in self.sessions)

    def validate(self) -> Workload:
        """Refuse loads that cannot be run; returns self."""
        if not self.sessions:
            raise UserError(f"workload {self.name}: no sessions", param="workload")
        if self.concurrency is not None and self.concurrency < 1:
            raise UserError(f"--concurrency is {self.concurrency}; it must be at least 1", param="concurrency")
        for s in self.sessions:
            if not s.turns or any(t.new_tokens < 1 or t.output_tokens < 1 for t in s.turns):
                raise UserError(f"workload {self.name}, session {s.sid}: a turn needs a prompt and an answer")
        return self
