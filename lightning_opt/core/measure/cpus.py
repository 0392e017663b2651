"""Which CPUs this process may really use, often fewer than the machine has, and how many."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_opt.core.measure.cgroups import find_cpu_quota


def allowed_cpus() -> list[int]:
    """Return the CPUs that this thread may run on; all of them where that is not known."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs that the affinity of the process and its control groups allow, at least 1.

    Args:
        root: Where ``proc`` and ``sys`` are found.
    """
    cpus = len(allowed_cpus())
    quota = find_cpu_quota(root)
    return max(1, cpus if quota is None else min(cpus, int(quota)))
