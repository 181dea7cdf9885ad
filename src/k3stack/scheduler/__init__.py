"""What runs next? Queues, admission, step policies, preemption, abort, drain; and the seams they run against."""

from __future__ import annotations

from k3stack.scheduler.clock import VirtualClock
from k3stack.scheduler.cost import CorrectedCost, LearnedCost, StepCost
from k3stack.scheduler.loop import MaskSource, StepLoop
from k3stack.scheduler.options import SchedulerOptions, SglangEstimate
from k3stack.scheduler.policies.prefill_first import PrefillFirst
from k3stack.scheduler.policies.slo import Slo
from k3stack.scheduler.policies.slo_options import SloOptions
from k3stack.scheduler.policy import Decision, Policy, View
from k3stack.scheduler.request import (
    Event,
    FinishEvent,
    FinishReason,
    Refusal,
    Request,
    StopHit,
    Stopper,
    Target,
    Times,
    TokenEvent,
)
from k3stack.scheduler.scheduler import MaskedRow, Scheduler, SchedulerStats

__all__ = [
    "CorrectedCost",
    "Decision",
    "Event",
    "FinishEvent",
    "FinishReason",
    "LearnedCost",
    "MaskSource",
    "MaskedRow",
    "Policy",
    "PrefillFirst",
    "Refusal",
    "Request",
    "Scheduler",
    "SchedulerOptions",
    "SchedulerStats",
    "SglangEstimate",
    "Slo",
    "SloOptions",
    "StepCost",
    "StepLoop",
    "StopHit",
    "Stopper",
    "Target",
    "Times",
    "TokenEvent",
    "View",
    "VirtualClock",
]
