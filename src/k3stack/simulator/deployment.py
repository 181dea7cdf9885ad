"""How servers stand together: unified behind a router, or prefill servers that hand requests on to decode servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from k3stack.scheduler.request import Event, FinishEvent, Request, TokenEvent
from k3stack.simulator.events import EventQueue
from k3stack.simulator.router import Router
from k3stack.simulator.server import SimServer
from k3stack.simulator.traffic import Traffic


class Deployment(Protocol):
    """A way in for requests, and the servers behind it."""

    traffic: Traffic | None

    @property
    def servers(self) -> list[SimServer]: ...

    def submit(self, request: Request, session: int) -> None: ...

    def forget(self, session: int) -> None: ...

    def deliver(self, server: SimServer, events: list[Event]) -> None: ...

    def stream(self, server: SimServer, rids: Sequence[str], times: Sequence[float]) -> None: ...


class Unified:
    """Servers that each do everything. ``up_from``: when each is started and ready (scaling), in seconds."""

    def __init__(self, router: Router, events: EventQueue, up_from: Sequence[float] = ()) -> None:
        self.members: list[SimServer] = []
        self.traffic: Traffic | None = None
        self._router, self._events, self._up_from = router, events, up_from
        self._late: list[tuple[Request, int]] = []

    @property
    def servers(self) -> list[SimServer]:
        return self.members

    def submit(self, request: Request, session: int) -> None:
        ready = self._ready()
        if ready:
            self._router.choose(session, ready).submit(request)
            return
        if not self._late:
            self._events.at(min(self._up_from), self._release)
        self._late.append((request, session))

    def _ready(self) -> list[SimServer]:
        if not self._up_from:
            return self.members
        now = self._events.clock.now()
        return [s for s, up in zip(self.members, self._up_from, strict=True) if up <= now]

    def _release(self) -> None:
        late, self._late = self._late, []
        for request, session in late:
            self.submit(request, session)

    def forget(self, session: int) -> None:
        self._router.forget(session)

    def deliver(self, server: SimServer, events: list[Event]) -> None:
        assert self.traffic is not None
        self.traffic.deliver(server, events)

    def stream(self, server: SimServer, rids: Sequence[str], times: Sequence[float]) -> None:
        assert self.traffic is not None
        self.traffic.stream(rids, times)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Moving a request from prefill to decode: the state, and the rows of the last chunk (earlier ones went before)."""

    state_bytes: int
    token_bytes: float
    chunk_tokens: int
    link: float
    """Bytes a second that one GPU receives."""
    latency_s: float

    def seconds(self, prompt_tokens: int) -> float:
        return (
            self.latency_s + (self.state_bytes + self.token_bytes * min(prompt_tokens, self.chunk_tokens)) / self.link
        )


class Disaggregated:
    """A prefill pool computes the prompt and the first token; a decode pool has the rest.

    The client sees the first token when the decode server has the request's cache and state.
    """

    def __init__(self, router: Router, decode_router: Router, events: EventQueue, transfer: Transfer) -> None:
        self.prefill: list[SimServer] = []
        self.decode: list[SimServer] = []
        self.traffic: Traffic | None = None
        self._router, self._decode_router, self._events, self._transfer = router, decode_router, events, transfer
        self._requests: dict[str, tuple[Request, int]] = {}
        self._first: dict[str, int] = {}

    @property
    def servers(self) -> list[SimServer]:
        return [*self.prefill, *self.decode]

    def submit(self, request: Request, session: int) -> None:
        self._requests[request.rid] = (request, session)
        one = msgspec.structs.replace(request.sampling, max_tokens=1)
        prefill = msgspec.structs.replace(request, sampling=one)
        self._router.choose(session, self.prefill).submit(prefill)

    def forget(self, session: int) -> None:
        self._router.forget(session)
        self._decode_router.forget(session)

    def stream(self, server: SimServer, rids: Sequence[str], times: Sequence[float]) -> None:
        """Only decode servers have stretches of decoding."""
        assert self.traffic is not None
        self.traffic.stream(rids, times)

    def deliver(self, server: SimServer, events: list[Event]) -> None:
        assert self.traffic is not None
        if server in self.decode:
            self.traffic.deliver(server, events)
            return
        now = self._events.clock.now()
        for event in events:
            if isinstance(event, TokenEvent):
                if event.tokens:
                    self._first[event.rid] = event.tokens[-1]
            elif event.reason in ("stop", "length"):
                server.outstanding -= 1
                self._hand_on(event, now)
            else:
                server.outstanding -= 1
                self._requests.pop(event.rid)
                self.traffic.finished(event, now)

    def _hand_on(self, event: FinishEvent, now: float) -> None:
        request, session = self._requests.pop(event.rid)
        token = self._first.pop(event.rid)
        arrives = now + self._transfer.seconds(len(request.prompt_ids))
        self._events.at(arrives, lambda: self._arrive(request, session, token, event))

    def _arrive(self, request: Request, session: int, token: int, event: FinishEvent) -> None:
        assert self.traffic is not None
        now = self._events.clock.now()
        self.traffic.prefilled(request.rid, event)
        self.traffic.tokens(request.rid, 1, now)
        asked = request.sampling.max_tokens or 1
        if asked == 1:
            self.traffic.finished(event, now)
            return
        rest = msgspec.structs.replace(
            request,
            prompt_ids=(*request.prompt_ids, token),
            sampling=msgspec.structs.replace(request.sampling, max_tokens=asked - 1),
            arrival=now,
            delivered=True,
        )
        self._decode_router.choose(session, self.decode).submit(rest)
