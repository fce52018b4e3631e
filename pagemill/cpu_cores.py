"""How many cores this process may use: affinity and the container's CPU quota, not what the machine has."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores(quota_file: Path = _CGROUP_V2_QUOTA) -> int:
    """Usable cores, at least 1. A quota of 1.5 cores counts as 2."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Without cgroup v2, or where the file has a form unknown here, affinity alone counts.
    with contextlib.suppress(OSError, ValueError):
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)
