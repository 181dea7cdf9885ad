"""What the executor keeps of each row: state block, page table, length, last output. Updated by plan deltas only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from k3stack.config.sampling import SamplingParams
from k3stack.errors import BugError
from k3stack.kernels.upload import upload
from k3stack.scheduler.plan import RowAdd

Ints = npt.NDArray[np.int64]


class RowTables:
    """Tables indexed by row number. Host arrays are the master; on a CPU the device tensors are the same memory.

    On a GPU the page table and the last outputs live there: pages are written through by ``flush`` (one indexed
    write a plan), outputs never leave the device to come back as inputs.
    """

    def __init__(self, device: torch.device, rows: int = 256, pages: int = 16) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self.live = np.zeros(rows, bool)
        self.length = np.zeros(rows, np.int64)
        self.state_block = np.zeros(rows, np.int64)
        self.page_count = np.zeros(rows, np.int64)
        self.sampling: dict[int, SamplingParams] = {}
        self._table = np.zeros((rows, pages), np.int64)
        self._last = torch.zeros(rows, dtype=torch.int64, device=device)
        self._device_table = torch.from_numpy(self._table).to(device)
        self._changes: list[tuple[int, int, int]] = []

    def reset(self) -> None:
        """Forget every row."""
        self.live[:] = False
        self.sampling.clear()

    def add(self, add: RowAdd) -> None:
        """A row begins. Raises BugError when its number is taken."""
        while add.row >= len(self.live):
            self._more_rows()
        if self.live[add.row]:
            raise BugError(f"row {add.row} is added but has not ended")
        self.live[add.row] = True
        self.sampling[add.row] = add.sampling
        self.length[add.row] = add.length
        self.state_block[add.row] = add.state_block
        self.page_count[add.row] = 0
        self.append_pages(add.row, add.pages)

    def end(self, row: int) -> None:
        """A row is gone. Raises BugError when there is none."""
        self.check_live(row)
        self.live[row] = False
        del self.sampling[row]

    def append_pages(self, row: int, pages: tuple[int, ...]) -> None:
        """``pages`` join the end of the row's table."""
        first = int(self.page_count[row])
        last = first + len(pages)
        while last > self._table.shape[1]:
            self._more_pages()
        self._table[row, first:last] = pages
        self.page_count[row] = last
        if not self._on_host:
            self._changes.extend((row, first + i, page) for i, page in enumerate(pages))

    def set_page(self, row: int, index: int, page: int) -> None:
        """One entry changes. Raises BugError when the row has no such entry."""
        self.check_live(row)
        if not 0 <= index < self.page_count[row]:
            raise BugError(f"page {index} of row {row} is set, but it has {self.page_count[row]}")
        self._table[row, index] = page
        if not self._on_host:
            self._changes.append((row, index, page))

    def set_state(self, row: int, block: int) -> None:
        """The row's state lies elsewhere now."""
        self.check_live(row)
        self.state_block[row] = block

    def check_live(self, row: int) -> None:
        """Raise BugError unless ``row`` is a live row."""
        if not (0 <= row < len(self.live) and self.live[row]):
            raise BugError(f"row {row} is named in a plan but is not live")

    def check_room(self, rows: Ints, ends: Ints, page_tokens: int) -> int:
        """Pages that the longest of ``rows`` needs to reach position ``ends``; BugError where one has too few."""
        needed = -(-ends // page_tokens)
        short = np.flatnonzero((needed > self.page_count[rows]) | ~self.live[rows])
        if len(short):
            i = short[0]
            self.check_live(int(rows[i]))
            raise BugError(f"row {rows[i]} is to reach {ends[i]} tokens with {self.page_count[rows[i]]} pages")
        return int(needed.max())

    def flush(self) -> None:
        """Bring the device's page table up to date."""
        if self._changes:
            where = upload(np.array(self._changes, np.int64), self._device)
            self._device_table[where[:, 0], where[:, 1]] = where[:, 2]
            self._changes.clear()

    def pages_of(self, rows: Ints, device_rows: torch.Tensor, width: int) -> torch.Tensor:
        """Page table [R, width] of ``rows``, on the device."""
        if self._on_host:
            return torch.from_numpy(self._table[rows, :width])
        return self._device_table[:, :width].index_select(0, device_rows)

    def last_outputs(self, device_rows: torch.Tensor) -> torch.Tensor:
        """Last sampled token [R] of each row, on the device."""
        return self._last.index_select(0, device_rows)

    def set_last(self, device_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """``tokens`` [R] are the rows' last outputs."""
        self._last[device_rows] = tokens

    def live_rows(self) -> Iterable[int]:
        """Numbers of the live rows."""
        return np.flatnonzero(self.live).tolist()

    def _more_rows(self) -> None:
        for name in ("live", "length", "state_block", "page_count", "_table"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self._last = torch.cat((self._last, torch.zeros_like(self._last)))
        self._renew_device_table()

    def _more_pages(self) -> None:
        self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        self._renew_device_table()

    def _renew_device_table(self) -> None:
        self._device_table = torch.from_numpy(self._table).to(self._device)
        self._changes.clear()
