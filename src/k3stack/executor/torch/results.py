"""From device tensors to plain results: what a launched step leaves behind, and its conversion once it is done."""

from __future__ import annotations

import time

import torch

from k3stack.executor.torch.batch import Batch, Score
from k3stack.executor.torch.logprobs import Logprobs
from k3stack.executor.torch.sampler import Sampled
from k3stack.kernels.upload import upload_ints
from k3stack.scheduler.plan import GroupPlan, GroupResult, RowResult, TokenLogprobs

UNUSABLE = "the network's logits are not finite, or the grammar allows no token"


class Launched:
    """A step whose work is on its way on the device (on a CPU: done)."""

    def __init__(self, group: GroupPlan, device: torch.device, begun: float) -> None:
        self._group = group
        self._begun = begun
        self._seconds = 0.0
        self._on_gpu = device.type != "cpu"
        self._first = torch.cuda.Event(enable_timing=True) if self._on_gpu else None
        self._last = torch.cuda.Event(enable_timing=True) if self._on_gpu else None
        if self._first is not None:
            self._first.record()
        self._batch: Batch | None = None
        self._tokens: torch.Tensor | None = None
        self._best: torch.Tensor | None = None
        self._logprobs: Logprobs | None = None
        self._scores: dict[int, Logprobs] = {}

    def take_scores(self, batch: Batch, logits: torch.Tensor, tails: dict[int, torch.Tensor]) -> None:
        """Score prompt tokens; ``tails`` keeps each row's last logits for its next chunk."""
        self._batch = batch
        for index, score in batch.scores.items():
            own = logits[score.first : score.first + score.count]
            known = score.known()
            if known and score.failure is None:
                used = own[: len(known) - score.from_tail]
                if score.from_tail:
                    used = torch.cat((tails[score.row].unsqueeze(0), used))
                tokens = upload_ints(known, logits.device)
                self._scores[index] = Logprobs(used, tokens, [score.top] * len(known), self._fetch)
            tails.pop(score.row, None)
            if score.keep_tail:
                tails[score.row] = own[-1].clone()

    def take_samples(self, batch: Batch, logits: torch.Tensor, sampled: Sampled) -> None:
        """Start fetching the sampled tokens, and their log-probabilities where asked for."""
        self._tokens = self._fetch(sampled.tokens)
        self._best = self._fetch(sampled.best)
        if batch.logprobs:
            at = upload_ints(list(batch.logprobs), logits.device)
            top = list(batch.logprobs.values())
            self._logprobs = Logprobs(logits.index_select(0, at), sampled.tokens[at], top, self._fetch)

    def _fetch(self, values: torch.Tensor) -> torch.Tensor:
        if not self._on_gpu:
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def mark_end(self) -> None:
        """Everything of this step has been launched."""
        if self._last is not None:
            self._last.record()
        else:
            self._seconds = time.perf_counter() - self._begun

    def ready(self) -> bool:
        """True when the device is done."""
        return self._last is None or self._last.query()

    def seconds(self) -> float:
        """How long the step took; blocks until the device is done."""
        if self._first is None or self._last is None:
            return self._seconds
        self._last.synchronize()
        return self._first.elapsed_time(self._last) / 1000.0

    def group_result(self) -> GroupResult:
        """The section's results; the device must be done."""
        group, batch = self._group, self._batch
        if batch is None:
            return GroupResult()
        tokens: list[int] = [] if self._tokens is None else self._tokens.tolist()
        usable: list[bool] = [] if self._best is None else self._best.isfinite().tolist()
        decoded = tuple(tokens[: len(group.decode)])
        failed: list[RowResult] = []
        if not all(usable):
            fates = list(zip(group.decode, tokens, usable, strict=False))
            decoded = tuple(token if fine else -1 for _, token, fine in fates)
            failed = [RowResult(row=row, error=UNUSABLE) for row, _, fine in fates if not fine]
        rows = self._work_results(batch, tokens, usable) if group.work else []
        return GroupResult(tokens=decoded, rows=(*rows, *failed))

    def _work_results(self, batch: Batch, tokens: list[int], usable: list[bool]) -> list[RowResult]:
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logprobs is not None:
            logprobs = dict(
                zip(batch.logprobs, self._logprobs.result([tokens[at] for at in batch.logprobs]), strict=True)
            )
        results = []
        for index, work in enumerate(self._group.work):
            score, at = batch.scores.get(index), batch.sample_of_work.get(index)
            error = None if score is None else score.failure
            if at is not None and not usable[at]:
                error = UNUSABLE
            if error is not None:
                results.append(RowResult(row=work.row, error=error))
                continue
            scored = () if score is None else self._scored(index, score)
            if at is None:
                results.append(RowResult(row=work.row, scored=scored))
                continue
            own = (logprobs[at],) if at in logprobs else ()
            results.append(RowResult(row=work.row, tokens=(tokens[at],), logprobs=own, scored=scored))
        return results

    def _scored(self, index: int, score: Score) -> tuple[TokenLogprobs | None, ...]:
        found = self._scores[index].result(score.known()) if index in self._scores else []
        return (None, *found) if score.starts_sequence else tuple(found)
