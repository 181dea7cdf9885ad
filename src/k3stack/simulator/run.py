"""One simulated run: build the scenario, drive the workload, summarize. The same seed gives the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3stack.memory import MemoryStats
from k3stack.scheduler.clock import VirtualClock
from k3stack.simulator.build import Builder, SimSettings
from k3stack.simulator.events import EventQueue
from k3stack.simulator.scenario import Scenario
from k3stack.simulator.server import SimServer
from k3stack.simulator.traffic import Traffic
from k3stack.workload.records import Record
from k3stack.workload.report import summarize
from k3stack.workload.sessions import Workload
from k3stack.workload.target import Target

GRACE_S = 600.0
"""After the last arrival, so long is waited for what still runs; then the run is cut and the rest counts as misses."""


@dataclass(slots=True)
class SimResult:
    """What a run gives back."""

    records: list[Record]
    summary: dict[str, Any]
    window_s: tuple[float, float] | None


def simulate(scenario: Scenario, workload: Workload, settings: SimSettings, *, token_times: bool = False) -> SimResult:
    """Run ``workload`` against ``scenario`` in virtual time."""
    events = EventQueue(VirtualClock())
    builder = Builder(scenario, settings, events)
    deployment = builder.deployment()
    front = builder.prices[0].front
    traffic = Traffic(
        workload,
        events,
        deployment.submit,
        target=settings.target,
        host=front.before_s,
        token_times=token_times,
    )
    deployment.traffic = traffic
    traffic.start(deployment.forget)
    last = max(s.arrival_s for s in workload.sessions)
    events.run(until=last + GRACE_S if workload.concurrency is None else float("inf"))
    for server in deployment.servers:
        server.settle()
        server.scheduler.check()
    stats = [s.memory.stats() for s in deployment.servers]
    summary = summarize(
        traffic.records,
        target=settings.target,
        gpus=scenario.gpus,
        duration_s=workload.duration_s,
        window_s=workload.window_s,
        max_running=max(s.peak_running for s in deployment.servers),
        binding=_binding(traffic.records, stats, deployment.servers, settings.target),
    )
    summary["scenario"] = scenario.name
    summary["engine"], summary["policy"] = settings.engine, settings.policy
    summary["steps"] = sum(s.steps for s in deployment.servers)
    summary["device_busy_share"] = _busy(deployment.servers, summary["elapsed_s"])
    summary["busy_share_by_role"] = {k: _busy(v, summary["elapsed_s"]) for k, v in _roles(deployment.servers).items()}
    summary["missed"] = _missed(traffic.records, settings.target)
    summary["accept_length"] = _accepted(builder)
    summary["preempted"] = sum(s.scheduler.stats().preempted for s in deployment.servers)
    summary["efficiency"] = settings.efficiency or scenario.servers[0].efficiency or "measured"
    summary["step_time_error"] = front.error
    return SimResult(traffic.records, summary, workload.window_s)


def start_notes(scenario: Scenario, settings: SimSettings) -> list[str]:
    """What a user should know before the run: settings that this deployment cannot keep."""
    return Builder(scenario, settings, EventQueue(VirtualClock())).notes()


def _busy(servers: list[SimServer], elapsed: float) -> float:
    return float(sum(s.executor.busy_s for s in servers) / max(len(servers) * elapsed, 1e-9))


def _accepted(builder: Builder) -> float | None:
    verified = sum(p.verified for p in builder.prices)
    return sum(p.accepted for p in builder.prices) / verified if verified else None


def _roles(servers: list[SimServer]) -> dict[str, list[SimServer]]:
    roles: dict[str, list[SimServer]] = {}
    for server in servers:
        roles.setdefault(server.name.partition("-")[0], []).append(server)
    return roles


def _missed(records: list[Record], target: Target) -> dict[str, float]:
    """Shares of the requests that missed the target: by their first token, by their pace after it, as tool calls that
    were complete too late."""
    measured = [r for r in records if not r.stream] or records
    shares = {"first_token": 0, "pace": 0, "whole": 0}
    for r in measured:
        if target.met(r):
            continue
        late = r.ttft_s is None or r.ttft_s > target.ttft_s
        shares["whole" if r.tool_call else "first_token" if late else "pace"] += 1
    return {k: v / len(measured) for k, v in shares.items()}


def _binding(records: list[Record], stats: list[MemoryStats], servers: list[SimServer], target: Target) -> str:
    """What kept the run from doing more: rows, memory, the time of some kind of server, what is late, or nothing.

    Decode servers are busy whenever a stream runs: that says nothing, whether their steps keep the pace does.
    """
    if any(s.peak_running >= s.scheduler.options.max_running for s in servers):
        return "max_running_requests"
    if any(s.scheduler.stats().admission_waits for s in servers):
        return "memory"
    elapsed = max((r.finished_s or 0.0) for r in records)
    for role, members in _roles(servers).items():
        if role != "decode" and _busy(members, elapsed) > 0.9:
            return "device time" if role == "unified" else f"time of the {role} servers"
    missed = _missed(records, target)
    if sum(missed.values()) <= 1 - target.share:
        return "nothing"
    worst = max(missed, key=lambda k: missed[k])
    return {"first_token": "time to first token", "pace": "time per token", "whole": "time of whole answers"}[worst]
