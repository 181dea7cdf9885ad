"""How many cores there are for this process."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its control group's share where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    words = quota.read_text().split() if quota.exists() else ["max"]
    if words[0] != "max":
        cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return max(cores, 1)
