"""In tests the machine has 1 TB of memory, half of it free, and no control groups.

Otherwise other processes would decide which batch sizes fit. ``RLIMIT_AS`` stays real. Trials of a
batch size end after a few steps, because no test depends on their times.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_opt.batching.batch_size import trials
from lightning_opt.core.measure import memory


def ample_memory() -> memory.Usage:
    return memory.Usage("system", 2**39, 2**40)


def memory_groups(root: Path, find: Callable[[Path], Any] = memory.find_memory_groups) -> Any:
    return [] if root == Path("/") else find(root)


memory.system_memory, memory.find_memory_groups = ample_memory, memory_groups
trials.MEMORY_TRIAL, trials.TIMED_TRIAL = (4, 0.0, 30), (6, 0.0, 2000)
