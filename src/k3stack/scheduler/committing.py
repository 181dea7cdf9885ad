"""Applies a ``StepResult``: tokens, stops, scores, failed rows and failed steps."""

from __future__ import annotations

from k3stack.errors import BugError
from k3stack.scheduler.core import Core, Flight
from k3stack.scheduler.plan import GroupResult, RowResult, StepResult, TokenLogprobs
from k3stack.scheduler.policy import LearningPolicy
from k3stack.scheduler.request import Entry, Phase, Stopper, TokenEvent


class Committer:
    """Results come in the order of the plans. A row's extra token, sampled after its end was known, is dropped."""

    def __init__(self, core: Core, stopper: Stopper | None, learner: LearningPolicy | None = None) -> None:
        self.core = core
        self.stopper = stopper
        self.learner = learner

    def commit(self, result: StepResult) -> None:
        core = self.core
        if not core.flights or core.flights[0].step != result.step:
            waited = core.flights[0].step if core.flights else "no step"
            raise BugError(f"result of step {result.step} while {waited} is awaited")
        flight = core.flights.popleft()
        core.committed = flight.step
        if self.learner is not None:
            failed = flight.void or result.error is not None
            self.learner.observed(None if failed else result.seconds, core.clock.now())
        if flight.void:
            return
        if result.error is not None:
            self._step_failed(flight, result.error)
            return
        if len(result.groups) != 1:
            raise BugError(f"step {result.step}: results of {len(result.groups)} groups for a plan of one")
        group = result.groups[0]
        if len(group.tokens) != len(flight.decode) or len(group.rows) < len(flight.work):
            raise BugError(
                f"step {result.step}: {len(group.tokens)} tokens and {len(group.rows)} rows came back for "
                f"{len(flight.decode)} decode rows and {len(flight.work)} rows of work"
            )
        self._failed_decode_rows(flight, group)
        self._decode_tokens(flight.decode, group.tokens)
        for (entry, sampled), row in zip(flight.work, group.rows, strict=False):
            self._row(entry, sampled, row)

    def _step_failed(self, flight: Flight, message: str) -> None:
        core = self.core
        core.counts["failed_steps"] += 1
        for entry in [*flight.decode, *(entry for entry, _ in flight.work)]:
            if not entry.ended:
                core.end(entry, "error", message=message, keep=False)
        core.lose_device()

    def _failed_decode_rows(self, flight: Flight, group: GroupResult) -> None:
        extra = group.rows[len(flight.work) :]
        if not extra:
            return
        by_row = dict(zip(flight.rows, flight.decode, strict=True))
        for failed in extra:
            entry = by_row.get(failed.row)
            if entry is None or failed.error is None:
                raise BugError(f"step {flight.step}: a result for row {failed.row}, which has no work in it")
            if not entry.ended:
                self.core.end(entry, "error", message=failed.error, keep=False)

    def _decode_tokens(self, entries: list[Entry], tokens: tuple[int, ...]) -> None:
        """The bulk of a decode step: kept free of calls for rows where nothing happens."""
        ended, emit, event = Phase.ENDED, self.core.events.append, TokenEvent
        for entry, token in zip(entries, tokens, strict=True):
            if entry.phase is ended:
                continue
            ids = entry.ids
            ids.append(token)
            if len(ids) >= entry.mark or token in entry.stop_ids or entry.stops:
                self._look(entry, token, ())
            else:
                emit(event(entry.rid, (token,)))

    def _look(self, entry: Entry, token: int, logprobs: tuple[TokenLogprobs, ...]) -> bool:
        """``token`` has just joined ``entry.ids``: emit it, and end the request if it is time (False)."""
        core, request = self.core, entry.request
        outputs = entry.outputs
        may_stop = outputs >= request.sampling.min_tokens
        hit = None
        if entry.stops and self.stopper is not None:
            hit = self.stopper(request, (token,))
        if hit is not None and may_stop:
            kept = min(hit.keep, 1)
            if kept:
                core.events.append(TokenEvent(entry.rid, (token,), logprobs))
            core.end(entry, "stop", matched=hit.matched, outputs=outputs - 1 + kept)
            return False
        core.events.append(TokenEvent(entry.rid, (token,), logprobs))
        if may_stop and token in entry.stop_ids:
            core.end(entry, "stop", matched=token)
        elif outputs >= entry.limit:
            core.end(entry, "length")
        else:
            if len(entry.ids) >= entry.mark:
                core.pages_known(entry)
            return True
        return False

    def _row(self, entry: Entry, sampled: bool, row: RowResult) -> None:
        """The result of one ``RowWork``."""
        core = self.core
        if entry.ended:
            return
        if row.error is not None:
            core.end(entry, "error", message=row.error, keep=False)
            return
        if bool(row.tokens) != sampled:
            raise BugError(f"row {row.row} brought {len(row.tokens)} tokens; sampling was {sampled}")
        if row.scored and entry.score_from is not None:
            core.events.append(TokenEvent(entry.rid, (), (), row.scored))
            entry.score_from += len(row.scored)
        if not row.tokens:
            return
        entry.score_from = None
        if entry.first_at is None:
            core.first_token(entry)
        for i, token in enumerate(row.tokens):
            entry.ids.append(token)
            if not self._look(entry, token, row.logprobs[i : i + 1]):
                return
