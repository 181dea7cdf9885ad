"""Host numbers to a device without making the host wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``. On a CPU they share memory with the argument.

    To a GPU the copy goes through pinned memory and is ordered like a kernel on the current stream: a copy from
    ordinary memory would make the host wait for everything launched before. The argument may be changed at once.
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_ints(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A list of numbers as a tensor on ``device``; see ``upload``."""
    return upload(torch.tensor(values, dtype=dtype), device)
