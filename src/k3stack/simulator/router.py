"""Which server gets a request: the policies of the routers in front of real servers, seen from outside a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from k3stack.errors import UserError
from k3stack.simulator.server import SimServer

RouterPolicy = Literal["round_robin", "least_loaded", "cache_aware"]


class Router(Protocol):
    def choose(self, session: int, servers: Sequence[SimServer]) -> SimServer: ...

    def forget(self, session: int) -> None: ...


class RoundRobin:
    """One after the other, whatever they hold."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, session: int, servers: Sequence[SimServer]) -> SimServer:
        chosen = servers[self._next % len(servers)]
        self._next += 1
        return chosen

    def forget(self, session: int) -> None:
        """Nothing is kept."""


class LeastLoaded:
    """The server with the fewest requests that have not ended; ties go round."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, session: int, servers: Sequence[SimServer]) -> SimServer:
        n = len(servers)
        best = min(range(n), key=lambda i: (servers[i].outstanding, (i - self._turn) % n))
        self._turn = best + 1
        return servers[best]

    def forget(self, session: int) -> None:
        """Nothing is kept."""


class CacheAware:
    """A conversation stays on its server unless the load differs too much; new ones go to the least loaded.

    The bounds are sglang-router's: it rebalances when the loads differ by more than 64 and by more than 1.5 times.
    """

    def __init__(self, absolute: int = 64, relative: float = 1.5) -> None:
        self._home: dict[int, SimServer] = {}
        self._absolute, self._relative = absolute, relative
        self._spread = LeastLoaded()

    def choose(self, session: int, servers: Sequence[SimServer]) -> SimServer:
        loads = [s.outstanding for s in servers]
        high, low = max(loads), min(loads)
        home = self._home.get(session)
        if home is None or (high - low > self._absolute and high > self._relative * low):
            home = self._home[session] = self._spread.choose(session, servers)
        return home

    def forget(self, session: int) -> None:
        self._home.pop(session, None)


def make_router(policy: str) -> Router:
    """The router called ``policy``; UserError lists the known ones."""
    known: dict[str, type[Router]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded, "cache_aware": CacheAware}
    if policy not in known:
        raise UserError(f"router policy {policy!r} is not known; known: {', '.join(known)}", param="router")
    return known[policy]()
