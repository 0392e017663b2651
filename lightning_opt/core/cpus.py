"""How many CPUs this process may really use, which is often fewer than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_opt.core.cgroups import find_cpu_quota


def available_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs that the affinity of the process and its control groups allow, at least 1.

    Args:
        root: Where ``proc`` and ``sys`` are found.
    """
    known = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
    cpus = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    quota = find_cpu_quota(root)
    return max(1, cpus if quota is None else min(cpus, int(quota)))
