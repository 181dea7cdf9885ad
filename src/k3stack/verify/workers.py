"""Several processes, a model in each, as one target: small matrices do not get faster by a second thread.

On two Zen 4 cores K3-nano answers slower with two threads than with one; two processes of one thread are twice as fast.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from k3stack.chat import Tokenizer, load_tokenizer
from k3stack.config.cores import usable_cores
from k3stack.config.geometry import load_geometry
from k3stack.errors import K3Error, Unavailable
from k3stack.models.builtin import resolve
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.verify.local import LocalTarget, kept_in
from k3stack.verify.order import deal, shares
from k3stack.verify.questions import Question
from k3stack.verify.target import Answer, CannotScoreError, Progress, Scoring, Target

MOST = 8
QUICK_MOST = 2
"""With more of them a quick run would not ask each of them 64 questions at once."""
SMALL_BYTES = 1 << 30
"""Files of a model up to which it runs in several processes unless told otherwise: the matrices of larger ones keep
several cores busy, and every process holds a copy."""
ARENA_GIB = 0.5
END_S = 10.0


def usual_count(model_path: str, device: str, quick: bool) -> int:
    """How many processes verify a model unless told otherwise."""
    if device != "cpu":
        return 1
    folder = Path(resolve(model_path).path)
    size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) if folder.is_dir() else 0
    return min(usable_cores(), QUICK_MOST if quick else MOST) if size <= SMALL_BYTES else 1


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's model is loaded."""


@dataclass(frozen=True, slots=True)
class Told:
    """``count`` more questions have answers."""

    count: int


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a job."""

    result: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """The job, or the model, cannot be done, and why."""

    error: Exception


Pipe = connection.Connection
Maker = Callable[[], AbstractContextManager[Target]]


@dataclass(frozen=True, slots=True)
class MakeLocal:
    """Makes the target of a worker, in the worker: a model with one thread."""

    model_path: str
    dtype: str
    options: Mapping[str, Any]

    def __call__(self) -> AbstractContextManager[Target]:
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch

        torch.set_num_threads(1)
        return LocalTarget(self.model_path, self.dtype, "cpu", arena_gib=ARENA_GIB, **self.options)


def work(pipe: Pipe, make: Maker) -> None:
    """The worker process: jobs ("ask" or "score", argument) in, what came of them out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    try:
        with make() as target:
            pipe.send(Ready())
            _serve(pipe, target)
    except K3Error as e:
        pipe.send(Refused(e))
    except BrokenPipeError:
        return  # the parent is gone, and with it whoever could be told


def _serve(pipe: Pipe, target: Target) -> None:
    while True:
        try:
            job, argument = pipe.recv()
        except EOFError:
            return
        try:
            if job == "ask":
                pipe.send(Done(target.ask(argument, lambda n: pipe.send(Told(n)))))
            else:
                pipe.send(Done(target.score(*argument)))
        except CannotScoreError as e:
            pipe.send(Refused(e))


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Pipe
    busy: bool = True
    """With a job, or its model."""


class Workers:
    """``count`` processes as one target, with engine ``options``. Use in a ``with`` block. Raises what a worker refuses
    with, and Unavailable, which says which and how, when one has died."""

    def __init__(
        self,
        model_path: str,
        dtype: str,
        count: int,
        options: Mapping[str, Any] | None = None,
        make: Maker | None = None,
    ) -> None:
        options = options or {}
        folder = Path(resolve(model_path).path)
        self.tokenizer: Tokenizer = load_tokenizer(folder, load_geometry(folder))
        self.name = f"{model_path} in {dtype} on cpu{kept_in(options)}, {count} processes"
        context = get_context("spawn")
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                mine, theirs = context.Pipe()
                own = make or MakeLocal(model_path, dtype, options)
                process = context.Process(target=work, args=(theirs, own), name="k3-verify", daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, mine))
            self._results(lambda n: None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they do."""
        for worker in self._workers:
            worker.pipe.close()
            if worker.busy:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []

    def ask(self, questions: Sequence[Question], tell: Progress) -> list[Answer]:
        parts = shares(questions, len(self._workers))
        for worker, part in zip(self._workers, parts, strict=False):
            self._give(worker, ("ask", [questions[i] for i in part]))
        return _in_order(parts, self._results(tell))

    def score(self, work: Sequence[Scoring], top: int) -> list[list[TokenLogprobs]]:
        parts = deal([len(w.ids) for w in work], len(self._workers))
        for worker, part in zip(self._workers, parts, strict=False):
            self._give(worker, ("score", ([work[i] for i in part], top)))
        return _in_order(parts, self._results(lambda n: None))

    def _give(self, worker: _Worker, job: tuple[str, Any]) -> None:
        worker.busy = True
        try:
            worker.pipe.send(job)
        except OSError:
            raise self._died(worker) from None

    def _results(self, tell: Progress) -> list[Any]:
        """What came of every busy worker's job, in the order of the workers."""
        found: dict[int, Any] = {}
        while busy := [w for w in self._workers if w.busy]:
            for pipe in connection.wait([w.pipe for w in busy]):
                worker = next(w for w in busy if w.pipe is pipe)
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    raise self._died(worker) from None
                if isinstance(message, Told):
                    tell(message.count)
                    continue
                worker.busy = False
                if isinstance(message, Refused):
                    raise message.error
                found[self._workers.index(worker)] = message.result if isinstance(message, Done) else None
        return [found[i] for i in sorted(found)]

    def _died(self, worker: _Worker) -> Unavailable:
        worker.process.join(END_S)
        number, code = self._workers.index(worker) + 1, worker.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
        return Unavailable(
            f"process {number} of {len(self._workers)} (pid {worker.process.pid}) ended {how} before it had answered "
            "its questions; nothing was verified. Each holds a model and its caches: --workers 1 takes the least memory"
        )


def _in_order(parts: Sequence[Sequence[int]], results: Sequence[Sequence[Any]]) -> list[Any]:
    """Every share's results at the places of its questions."""
    found = {i: result for part, own in zip(parts, results, strict=True) for i, result in zip(part, own, strict=True)}
    return [found[i] for i in range(len(found))]
