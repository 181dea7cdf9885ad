"""A scheduler on the real memory and the toy device, and what a lone run of each request would answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from k3stack.config.sampling import SamplingParams
from k3stack.estimate.pools import BlockLayout, PoolPlan
from k3stack.executor.scripted import Fault, ScriptedExecutor, ToyDevice, ToyModel
from k3stack.memory import Memory
from k3stack.scheduler import (
    FinishEvent,
    MaskedRow,
    PrefillFirst,
    Request,
    Scheduler,
    SchedulerOptions,
    StepLoop,
    StopHit,
    TokenEvent,
    VirtualClock,
)
from k3stack.scheduler.limits import lone_tokens
from k3stack.scheduler.plan import StepPlan, StepResult
from k3stack.scheduler.policy import Policy
from k3stack.scheduler.request import Stopper

PAGE_ROWS = 4
OPTIONS = SchedulerOptions(context=512, max_running=8, chunk_tokens=16, max_queued=64)


def pool(blocks: int = 16, pages_per_block: int = 4, page_rows: int = PAGE_ROWS, **caps: Any) -> PoolPlan:
    """An arena of tiny pages: a row of one byte, a state that fills its block."""
    layout = BlockLayout(1, 1, 1, page_rows * pages_per_block, 0, pages_per_block, page_rows)
    return PoolPlan(engine=caps.pop("engine", "k3"), layout=layout, budget_bytes=0, blocks=blocks, **caps)


def free_memory(memory: Memory) -> tuple[Iterable[int], Iterable[int]]:
    """Pages and blocks that nobody owns now."""
    arena = memory._arena
    used = set(arena.pages_in_use())
    states = set(arena.states_in_use())
    per_block = arena.pages_per_block
    reserved = set(range(arena.reserved))
    blocks = [b for b in range(arena.blocks) if b not in states and b not in reserved]
    free_blocks = [b for b in blocks if not any(p in used for p in range(b * per_block, (b + 1) * per_block))]
    in_slabs = set(blocks) - set(free_blocks)
    return [p for b in in_slabs for p in range(b * per_block, (b + 1) * per_block) if p not in used], free_blocks


def completes_stop(outputs: Sequence[int]) -> bool:
    """What the tests take for a stop string: two neighbours that add up to a multiple of 11."""
    return len(outputs) > 1 and (outputs[-1] + outputs[-2]) % 11 == 0


class StopFinder:
    """A stopper that leaves out the token that completed the stop string."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    def __call__(self, request: Request, new_tokens: Sequence[int]) -> StopHit | None:
        seen = self.seen.setdefault(request.rid, [])
        seen.extend(new_tokens)
        return StopHit(0, "stop") if completes_stop(seen) else None


class Rig:
    """Submit requests, take turns, and check every end against the toy model's lone answer."""

    def __init__(
        self,
        plan: PoolPlan | None = None,
        options: SchedulerOptions = OPTIONS,
        *,
        policy: Policy | None = None,
        overlap: int = 2,
        model: ToyModel | None = None,
        faults: Callable[[str, int], Fault | None] | None = None,
        mask_of: Callable[[Sequence[int]], bytes] | None = None,
        stopper: Stopper | None = None,
        poison: bool = True,
        **memory: Any,
    ) -> None:
        self.pool = plan or pool()
        self.options = options
        self.clock = VirtualClock()
        self.model = model or ToyModel()
        self.memory = Memory(self.pool, **memory)
        self.scheduler = Scheduler(self.memory, policy or PrefillFirst(), options, self.clock, stopper)
        layout = self.pool.layout
        self.device = ToyDevice(self.model, self.pool.blocks, layout.pages_per_block, layout.page_tokens)
        self.executor = ScriptedExecutor(
            self.device,
            max_in_flight=overlap,
            faults=faults,
            free=(lambda: free_memory(self.memory)) if poison else None,
        )
        self.mask_of = mask_of
        self.loop = StepLoop(self.scheduler, self.executor, self.masks if mask_of else None)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self.ends: dict[str, FinishEvent] = {}
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        submit, wait = self.executor.submit, self.executor.wait

        def recording_submit(p: StepPlan) -> Any:
            self.plans.append(p)
            return submit(p)

        def recording_wait(h: Any) -> StepResult:
            self.results.append(wait(h))
            self.clock.advance(0.01)
            return self.results[-1]

        self.executor.submit = recording_submit  # type: ignore[method-assign]
        self.executor.wait = recording_wait  # type: ignore[method-assign]

    def masks(self, rows: Sequence[MaskedRow]) -> dict[int, bytes]:
        assert self.mask_of is not None
        return {row.row: self.mask_of(row.output_ids) for row in rows}

    def submit(self, rid: str, prompt: Sequence[int] | int, max_tokens: int | None = 8, **kw: Any) -> Request:
        ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
        fields = {k: kw.pop(k) for k in ("priority", "arrival", "eos_ids", "masked", "target", "whole") if k in kw}
        request = Request(rid=rid, prompt_ids=ids, sampling=SamplingParams(max_tokens=max_tokens, **kw), **fields)
        self.requests[rid] = request
        self.tokens[rid] = []
        self.events[rid] = []
        self.scheduler.submit(request)
        self.take()
        return request

    def take(self) -> None:
        for event in self.scheduler.take_events():
            assert event.rid not in self.ends, f"{event} after the end"
            if isinstance(event, FinishEvent):
                self.ends[event.rid] = event
            else:
                self.tokens[event.rid] += event.tokens
                self.events[event.rid].append(event)

    def turn(self, *, check: bool = True) -> bool:
        more = self.loop.turn()
        self.take()
        if check:
            self.scheduler.check()
        return more

    def run(self, *, check: bool = True, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.turn(check=check):
                break
        else:
            raise AssertionError(f"still not done after {limit} turns: {self.scheduler.stats()}")
        assert self.scheduler.idle
        assert set(self.ends) == set(self.requests)
        self.scheduler.check()
        stats = self.memory.stats()
        assert stats.running == 0 and stats.pages_running == 0 and stats.blocks_running == 0

    def lone(self, rid: str, limit: int | None = None) -> list[int]:
        """The tokens that ``rid`` has when nothing else runs and memory makes no mistake."""
        request = self.requests[rid]
        if limit is None:
            room = lone_tokens(self.pool) - len(request.prompt_ids) + 1
            limit = min(request.sampling.max_tokens or 10**9, self.options.context - len(request.prompt_ids), room)
        masks = self.mask_of if request.masked else None
        tokens = self.model.generate(
            request.prompt_ids, request.sampling, eos_ids=request.eos_ids, limit=limit, masks=masks
        )
        if request.sampling.stop:
            for n in range(max(1, request.sampling.min_tokens), len(tokens) + 1):
                if completes_stop(tokens[:n]):
                    return tokens[: n - 1]
        return tokens

    def check_tokens(self, *rids: str) -> None:
        """Finished requests have their lone tokens; others a beginning of them."""
        for rid in rids or self.requests:
            end, got = self.ends[rid], self.tokens[rid]
            if end.reason in ("stop", "length"):
                assert got == self.lone(rid), rid
                assert end.output_tokens == len(got)
            elif end.reason != "rejected":
                assert got == self.lone(rid)[: len(got)], rid


def with_options(**changes: Any) -> SchedulerOptions:
    return replace(OPTIONS, **changes)
