"""Builds the servers of a scenario: pools from the estimate, memory and scheduler as in a real engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from k3stack.config.geometry import ModelGeometry
from k3stack.config.hardware import GIB, Hardware, load_catalogue
from k3stack.config.layout import ParallelLayout
from k3stack.config.models import model_geometry
from k3stack.errors import UserError
from k3stack.estimate.pools import PoolPlan, plan_pools, replay_ring_bytes, stage_block_layouts
from k3stack.estimate.saved_plan import load_plan
from k3stack.estimate.seconds import Efficiency, StepModel, load_efficiency
from k3stack.estimate.sglang import SglangSettings
from k3stack.estimate.work import Precision
from k3stack.executor.modelled.executor import ModelledExecutor
from k3stack.memory import Memory
from k3stack.scheduler.cost import CorrectedCost
from k3stack.scheduler.options import SchedulerOptions
from k3stack.scheduler.policies.prefill_first import PrefillFirst
from k3stack.scheduler.policies.slo import Slo, SloOptions
from k3stack.scheduler.policy import Policy
from k3stack.scheduler.scheduler import Scheduler
from k3stack.simulator.deployment import Deployment, Disaggregated, Transfer, Unified
from k3stack.simulator.events import EventQueue
from k3stack.simulator.pricing import Drafter, StepPrice, accept_shares
from k3stack.simulator.router import make_router
from k3stack.simulator.scenario import Scenario, ServerSpec
from k3stack.simulator.server import SimServer
from k3stack.workload.target import Target

EngineName = Literal["k3", "sglang"]


@dataclass(frozen=True, slots=True)
class SimSettings:
    """What a run may choose beside the scenario."""

    engine: EngineName = "k3"
    policy: str = "slo"
    target: Target = field(default_factory=Target)
    mixed: bool = False
    max_gap_s: float | None = None
    told_lengths: bool = False
    """Policy slo is told how long each answer will be: to see what knowing it would be worth."""
    efficiency: str | None = None
    """Another set of efficiencies than the scenario's: a shipped name or a file."""
    constants: Efficiency | None = None
    """Efficiencies given outright (a fit tries many)."""
    chunk_tokens: int | None = None
    seed: int = 0
    check_every: int = 0
    fast_path: bool = True
    """Skip through stretches of pure decoding; the results are the same to the byte."""


class Builder:
    """Everything that the servers of one scenario share."""

    def __init__(self, scenario: Scenario, settings: SimSettings, events: EventQueue) -> None:
        self.scenario, self.settings, self.events = scenario, settings, events
        if any(s.cost is None for s in scenario.servers) and scenario.gpus > self.hardware.count:
            raise UserError(
                f"scenario {scenario.name}: its servers take {scenario.gpus} GPUs, {scenario.hardware} has "
                f"{self.hardware.count}"
            )
        self.prices: list[StepPrice] = []
        self.plans: list[PoolPlan] = []
        self._ranks = 0

    @cached_property
    def geometry(self) -> ModelGeometry:
        """The model; not needed where pools and costs are those of a real server."""
        return model_geometry(self.scenario.model)

    @cached_property
    def hardware(self) -> Hardware:
        return load_catalogue().parse(self.scenario.hardware)

    def deployment(self) -> Deployment:
        """The servers, wired together."""
        specs = self.scenario.servers
        prefill = next((s for s in specs if s.role == "prefill"), None)
        deployment: Unified | Disaggregated
        if prefill is None:
            starts = [s.starts_s for s in specs for _ in range(s.servers * s.layout.dp)]
            up_from = starts if any(starts) else ()
            deployment = Unified(make_router(self.scenario.router), self.events, up_from)
            deployment.members = [s for spec in specs for s in self._servers(spec, deployment)]
            return deployment
        router, second = make_router(self.scenario.router), make_router("least_loaded")
        deployment = Disaggregated(router, second, self.events, self._transfer(prefill))
        deployment.prefill = [s for spec in specs if spec.role == "prefill" for s in self._servers(spec, deployment)]
        deployment.decode = [s for spec in specs if spec.role == "decode" for s in self._servers(spec, deployment)]
        return deployment

    def _servers(self, spec: ServerSpec, deployment: Deployment) -> list[SimServer]:
        # Every attention-DP group has its own requests and memory; its steps see the other groups through the
        # experts, which are priced as if all groups were equally busy.
        groups = spec.servers * spec.layout.dp
        return [self._server(spec, f"{spec.role}-{i}", deployment) for i in range(groups)]

    def _server(self, spec: ServerSpec, name: str, deployment: Deployment) -> SimServer:
        settings = self.settings
        plan = self.pools(spec)
        self.plans.append(plan)
        memory = Memory(plan, prefix_cache=spec.role != "decode")
        chunk = settings.chunk_tokens or spec.chunk_tokens
        # Simulated arrivals are never turned away at the door: how long they wait is the answer.
        fields: dict[str, Any] = {"context": spec.context or self.geometry.context, "max_running": plan.max_running}
        fields |= {"chunk_tokens": chunk, "check_when_idle": False, "max_queued": 1_000_000}
        if settings.engine == "sglang":
            options = SchedulerOptions.for_sglang(**fields)
        else:
            options = SchedulerOptions(**fields)
        price = self.price(spec)
        scheduler = Scheduler(memory, self._policy(price, spec.role), options, self.events.clock)
        executor = ModelledExecutor(
            price,
            self.events.clock,
            rows=plan.max_running,
            latency=price.latency if spec.layout.pp > 1 else None,
            max_in_flight=2 if spec.layout.pp == 1 else spec.layout.pp,
            follow=True,
        )
        self._ranks += 1
        return SimServer(
            name,
            scheduler,
            memory,
            executor,
            self.events,
            deployment,
            rank=self._ranks,
            check_every=settings.check_every,
            price=price if settings.fast_path else None,
        )

    def _policy(self, price: StepPrice, role: str) -> Policy:
        settings = self.settings
        # What decode servers receive joins the streams' step: there is no prompt to stop them for.
        mixed = settings.mixed or role == "decode"
        if settings.policy == "prefill-first":
            if settings.max_gap_s is not None:
                raise UserError("--max-gap is for policy slo; prefill-first knows no bound on a gap", param="max-gap")
            return PrefillFirst(mixed=mixed)
        if settings.policy == "slo":
            options = SloOptions(max_gap_s=settings.max_gap_s, mixed=mixed, told_lengths=settings.told_lengths)
            # It predicts steps with the same model that prices them, and corrects that by what it observes, as a
            # server would: of a drafter's accepted tokens and a pipeline it knows only what it has seen.
            return Slo(CorrectedCost(price.model), options)
        raise UserError(f"policy {settings.policy!r} is not known; known: prefill-first, slo", param="policy")

    def notes(self) -> list[str]:
        """What to say before a run: of a bound on the gap that a server's smallest chunk outlasts."""
        found: dict[str, None] = {}
        for spec in self.scenario.servers:
            policy = self._policy(self.price(spec), spec.role) if spec.role == "unified" else None
            note = policy.gap_note() if isinstance(policy, Slo) else None
            if note is not None:
                found[note] = None
        return list(found)

    def layout(self, spec: ServerSpec) -> ParallelLayout:
        parallel = spec.layout
        return ParallelLayout(
            tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, dp=parallel.dp, dcp=parallel.dcp, a2a=parallel.a2a
        )

    def price(self, spec: ServerSpec) -> StepPrice:
        """The cost of steps on one of ``spec``'s servers."""
        if spec.cost is not None:
            price = StepPrice(spec.cost, received=spec.role == "decode")
            self.prices.append(price)
            return price
        assert spec.efficiency is not None
        efficiency = self.settings.constants or load_efficiency(self.settings.efficiency or spec.efficiency)
        model = StepModel(
            self.geometry,
            self.layout(spec),
            self.hardware,
            efficiency,
            engine=self.settings.engine,
            precision=Precision(row=spec.row_bytes, recurrent=spec.state_bytes, experts_fp8=spec.experts_fp8),
            sharded_prefill=spec.sharded_prefill,
        )
        drafter = None
        if spec.drafter is not None:
            shares = accept_shares(spec.drafter.accept_length, spec.drafter.block)
            drafter = Drafter(shares, spec.drafter.block)
        price = StepPrice(model, drafter, self.settings.seed, received=spec.role == "decode")
        self.prices.append(price)
        return price

    def pools(self, spec: ServerSpec) -> PoolPlan:
        """Pools of one GPU under the chosen engine's rules, from the scenario's budget."""
        if spec.pools.saved_plan is not None:
            return load_plan(spec.pools.saved_plan).plan
        layout = self.layout(spec)
        stages = stage_block_layouts(
            self.geometry,
            layout,
            engine=self.settings.engine,
            recurrent_itemsize=spec.state_bytes,
            row_itemsize=spec.row_bytes,
        )
        widest = max(stages, key=lambda s: s.block_bytes)
        budget = int(spec.pools.budget_gib * GIB)
        if self.settings.engine == "k3":
            return plan_pools(widest, budget, max_running=spec.pools.max_running or 512)
        pools = SglangSettings(
            ratio=spec.pools.ratio,
            strategy=spec.pools.strategy,  # type: ignore[arg-type]
            overlap=layout.pp == 1,
            role=spec.role,
            max_running=spec.pools.max_running,
            extra_slots=spec.pools.extra_slots,
        )
        if spec.drafter is not None:
            pools = self._drafted(pools, spec, layout)
        return plan_pools(widest, budget, engine="sglang", sglang=pools, within_budget=False)

    def _drafted(self, pools: SglangSettings, spec: ServerSpec, layout: ParallelLayout) -> SglangSettings:
        assert spec.drafter is not None
        ring = replay_ring_bytes(self.geometry, tp=layout.attn_tp, kda_layers=len(self.geometry.kda_layers))
        # A public DSPARK drafter: 5 layers of 16 cache heads of 64, keys and values, 16 bit, cut over the ranks.
        row = 5 * max(1, 16 // layout.attn_tp) * 2 * 64 * 2
        return replace(pools, draft_tokens=spec.drafter.block + 1, replay=True, ring_bytes=ring, draft_row_bytes=row)

    def _transfer(self, spec: ServerSpec) -> Transfer:
        assert self.scenario.transfer is not None
        stage = stage_block_layouts(
            self.geometry,
            self.layout(spec),
            engine=self.settings.engine,
            recurrent_itemsize=spec.state_bytes,
            row_itemsize=spec.row_bytes,
        )[0]
        return Transfer(
            state_bytes=stage.state_bytes,
            token_bytes=stage.cache_layers * stage.row_bytes,
            chunk_tokens=spec.chunk_tokens,
            link=self.scenario.transfer.link_gbps * 1e9,
            latency_s=self.scenario.transfer.latency_ms / 1000,
        )
