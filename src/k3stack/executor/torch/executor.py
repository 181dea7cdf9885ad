"""``TorchExecutor``: runs ``StepPlan``s with the network, one worker thread, two plans in flight."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from k3stack.errors import BugError, K3Error
from k3stack.estimate.pools import PoolPlan
from k3stack.executor.torch.arena import DeviceArena
from k3stack.executor.torch.batch import Batch, build_batch
from k3stack.executor.torch.graphs import GraphedModel
from k3stack.executor.torch.results import Launched
from k3stack.executor.torch.rows import RowTables
from k3stack.executor.torch.sampler import Sampler
from k3stack.memory.ops import ClearState, CopyPage, CopyState, Op, SetPage, SetState
from k3stack.models.batch import ForwardBatch
from k3stack.scheduler.plan import PLAN_VERSION, GroupPlan, StepPlan, StepResult
from k3stack.scheduler.seams import StepHandle

log = logging.getLogger(__name__)


class DeviceLost(K3Error):
    """The device has failed in a way that ends every later operation of this process on it."""


class Network(Protocol):
    """What the executor needs of a model: logits [N, vocab] for the positions that ``batch.logit_index`` names."""

    def forward(self, batch: ForwardBatch, views: Any) -> torch.Tensor: ...


class Handle:
    """A submitted step: first launched (by the worker), then finished (by whoever waits)."""

    def __init__(self, plan: StepPlan) -> None:
        self.step = plan.step
        self.plan = plan
        self.done = threading.Event()
        self.launched: Launched | None = None
        self.error: str | None = None
        self.lost: DeviceLost | None = None
        self.needs_masks = any(work.masked for group in plan.groups for work in group.work)
        self.masks: Mapping[int, bytes] | None = None
        self.masks_given = threading.Event()
        self.free: tuple[tuple[int, ...], tuple[int, ...]] = (), ()


class TorchExecutor:
    """Executor over one network and one device arena; serves plans of one data-parallel group.

    ``views_of`` turns the arena's flat buffer into what the network reads and writes (``ArenaViews``).
    ``submit`` checks version and numbering (BugError), queues the plan and returns; a worker thread carries plans out
    in order. Whatever goes wrong inside a step becomes the result's ``error``; later plans fail too until one says
    ``reset``.

    For tests: ``poison`` overwrites cache rows with NaN when a page is given to a row, so that reading what nobody
    wrote shows in the answers; ``free()``, asked at every ``submit``, names pages and state blocks that nobody owns
    once that plan has run, and they are overwritten then.
    """

    def __init__(
        self,
        network: Network,
        plan: PoolPlan,
        views_of: Callable[[torch.Tensor], Any],
        *,
        vocab: int,
        device: torch.device,
        max_in_flight: int = 2,
        poison: bool = False,
        free: Callable[[], tuple[Iterable[int], Iterable[int]]] | None = None,
    ) -> None:
        self.arena = DeviceArena(plan, device)
        self._network = network
        self._views = views_of(self.arena.buffer)
        self._device = device
        self._layout = plan.layout
        self._max_in_flight = max_in_flight
        self._poison = poison
        self._free = free
        self._rows = RowTables(device, max(plan.max_running, 1))
        self._sampler = Sampler(vocab, device, max(plan.max_running, 1))
        self._tails: dict[int, torch.Tensor] = {}
        """Logits at the last position computed of a row whose prompt is being scored; they score its next token."""
        self._next_step = 0
        self._failed: str | None = None
        self._flying: list[Handle] = []
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._closing = False
        # The thread must not keep a forgotten executor and its gigabytes alive.
        self._worker = threading.Thread(
            target=_work, args=(self._queue, weakref.ref(self), device), name="k3-executor", daemon=True
        )
        self._worker.start()
        weakref.finalize(self, self._queue.put, None)

    def capture_graphs(self, progress: bool = False) -> None:
        """Capture the network's decode steps, where it has graphs; before the first plan."""
        if isinstance(self._network, GraphedModel):
            taken = self._network.capture(self._views, progress)
            sizes = self._network.sizes
            log.info("CUDA graphs of %d batch sizes up to %d rows: %.2f GiB", len(sizes), sizes[-1], taken / (1 << 30))

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step; returns at once. Raises BugError for a plan that may not come now."""
        if self._closing:
            raise BugError(f"step {plan.step} was submitted to a closed executor")
        if plan.version != PLAN_VERSION:
            raise BugError(f"step {plan.step} has plan version {plan.version}; this executor reads {PLAN_VERSION}")
        if plan.step != self._next_step and not plan.reset:
            raise BugError(f"step {plan.step} was submitted; step {self._next_step} comes next")
        if len(plan.groups) != 1:
            raise BugError(f"step {plan.step} is for {len(plan.groups)} groups; this executor serves one")
        if len(self._flying) >= self._max_in_flight:
            raise BugError(f"step {plan.step} came with {len(self._flying)} in flight; wait for one first")
        self._next_step = plan.step + 1
        handle = Handle(plan)
        if self._free is not None:
            pages, blocks = self._free()
            handle.free = tuple(pages), tuple(blocks)
        self._flying.append(handle)
        self._queue.put(handle)
        return handle

    def masks(self, step: int, masks: Mapping[int, bytes]) -> None:
        """Allowed-token bits by row, for a step in flight."""
        for handle in self._flying:
            if handle.step == step:
                handle.masks = masks
                handle.masks_given.set()
                return
        raise BugError(f"masks came for step {step}, which is not in flight")

    def ready(self, handle: StepHandle) -> bool:
        """True when ``wait`` would not block."""
        assert isinstance(handle, Handle)
        return handle.done.is_set() and (handle.launched is None or handle.launched.ready())

    def wait(self, handle: StepHandle) -> StepResult:
        """Block until the step is done. Handles must be waited for in the order submitted (BugError).

        Raises DeviceLost where no later step could succeed in this process.
        """
        assert isinstance(handle, Handle)
        if not self._flying or self._flying[0] is not handle:
            raise BugError(f"step {handle.step} is waited for out of turn")
        if handle.needs_masks and not handle.masks_given.is_set():
            raise BugError(f"step {handle.step} is waited for before its masks were given")
        handle.done.wait()
        del self._flying[0]
        if handle.lost is not None:
            raise handle.lost
        if handle.launched is None:
            return StepResult(step=handle.step, error=handle.error)
        try:
            seconds = handle.launched.seconds()
            return StepResult(step=handle.step, groups=(handle.launched.group_result(),), seconds=seconds)
        except torch.AcceleratorError as error:  # an asynchronous fault shows when results are fetched
            raise DeviceLost(f"step {handle.step}: {error}") from error

    def close(self) -> None:
        """End the worker. No plan may be in flight any more (BugError), except after a failure."""
        if self._closing:
            return
        if self._flying and self._failed is None:
            raise BugError(f"the executor is closed with {len(self._flying)} steps in flight")
        self._closing = True
        for handle in self._flying:
            handle.masks_given.set()
        self._queue.put(None)
        self._worker.join()

    def run(self, handle: Handle) -> None:
        """Carry a submitted step out; the worker's business. Never raises: a fault is the step's result."""
        if handle.plan.reset:
            self._reset()
        if self._failed is not None:
            handle.error = f"{self._failed}; this step came after it"
            return
        try:
            handle.launched = self._launch(handle)
        except Exception as error:  # noqa: BLE001  any fault inside a step is the step's result, not the worker's end
            if isinstance(error, torch.AcceleratorError):
                handle.lost = DeviceLost(f"step {handle.step}: {error}")
            kind = "" if isinstance(error, K3Error) else f"{type(error).__name__}: "
            handle.error = self._failed = f"step {handle.step} failed: {kind}{error}"

    def _reset(self) -> None:
        for row in self._rows.live_rows():
            self._sampler.end(row)
        self._rows.reset()
        self._tails.clear()
        self._failed = None

    def _launch(self, handle: Handle) -> Launched:
        begun = time.perf_counter()
        group = handle.plan.groups[0]
        self._apply_rows(group)
        for op in group.before:
            self._apply(op)
        if self._poison:
            self._poison_fresh(group)
        self._rows.flush()
        launched = Launched(group, self._device, begun)
        if group.decode or group.work:
            batch = build_batch(group, self._rows, self._layout.page_tokens, self._device, self._tails)
            logits = self._network.forward(batch.forward, self._views)
            self._sample(handle, batch, logits, launched)
        for op in group.after:
            self._apply(op)
        for page in handle.free[0]:
            self.arena.poison_rows(page, 0)
        for block in handle.free[1]:
            self.arena.poison_block(block)
        launched.mark_end()
        return launched

    def _sample(self, handle: Handle, batch: Batch, logits: torch.Tensor, launched: Launched) -> None:
        """Score, wait for masks, sample, and bring lengths and last outputs up to date."""
        launched.take_scores(batch, logits, self._tails)
        if len(batch.sample_rows):
            chosen = logits if batch.sample_index is None else logits.index_select(0, batch.sample_index)
            masks = self._masks_of(handle, batch) if handle.needs_masks else None
            sampled = self._sampler.sample(chosen, batch.sample_rows, masks, overwrite=not batch.logprobs)
            self._rows.set_last(batch.sample_device_rows, sampled.tokens)
            launched.take_samples(batch, chosen, sampled)
        self._rows.length[batch.rows] = batch.ends

    def _masks_of(self, handle: Handle, batch: Batch) -> dict[int, bytes]:
        handle.masks_given.wait()
        masks = handle.masks
        if masks is None:
            raise BugError("the executor was closed before the masks of this step came")
        missing = [row for row in batch.masked if row not in masks]
        if missing:
            raise BugError(f"no mask was given for rows {missing}")
        return {index: masks[row] for row, index in batch.masked.items() if masks[row]}

    def _apply_rows(self, group: GroupPlan) -> None:
        for row in group.ended:
            self._rows.end(row)
            self._sampler.end(row)
            self._tails.pop(row, None)
        for add in group.added:
            self.arena.check_pages(add.pages)
            self._rows.add(add)
            self._sampler.add(add)
        for append in group.pages:
            self._rows.check_live(append.row)
            self.arena.check_pages(append.pages)
            self._rows.append_pages(append.row, append.pages)

    def _apply(self, op: Op) -> None:
        match op:
            case ClearState(block):
                self.arena.clear_state(block)
            case CopyState(src, dst):
                self.arena.copy_state(src, dst)
            case CopyPage(src, dst, rows):
                self.arena.copy_page(src, dst, rows)
            case SetPage(row, index, page):
                self.arena.check_pages((page,))
                self._rows.set_page(row, index, page)
            case SetState(row, block):
                self._rows.set_state(row, block)

    def _poison_fresh(self, group: GroupPlan) -> None:
        """Overwrite the rows that this plan's new pages offer and that nobody has written yet."""
        fresh = [(add.row, len(add.pages)) for add in group.added]
        fresh += [(append.row, len(append.pages)) for append in group.pages]
        rows = self._layout.page_rows
        for row, count in fresh:
            length, total = int(self._rows.length[row]), int(self._rows.page_count[row])
            table = self._rows.pages_of(np.array([row]), torch.tensor([row], device=self._device), total)[0].tolist()
            for index in range(total - count, total):
                first = min(max(length - index * rows, 0), rows)
                self.arena.poison_rows(table[index], first)


def _work(steps: queue.SimpleQueue[Handle | None], executor: weakref.ref[TorchExecutor], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread's own: events and streams belong to the current device
    with torch.inference_mode():
        while (handle := steps.get()) is not None:
            owner = executor()
            if owner is None:
                return
            owner.run(handle)
            del owner
            handle.done.set()
