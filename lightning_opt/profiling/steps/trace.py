"""A trace by torch.profiler of some batches of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Trace:
    """Records batches ``first`` to ``last``, and writes them down for Perfetto or TensorBoard.

    Args:
        first: Number of the first batch, from 0.
        last: Of the last one.
        folder: Where ``trace_<first>_<last>.json`` goes.
    """

    def __init__(self, first: int, last: int, folder: Path) -> None:
        self.first, self.last = first, last
        self.path = folder / f"trace_{first}_{last}.json"
        self._profile: Any = None

    @property
    def running(self) -> bool:
        """Whether it records."""
        return self._profile is not None

    def start(self) -> None:
        """Begin to record."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.__enter__()

    def stop(self) -> None:
        """End, and write the file; nothing happens if it is not running."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.__exit__(None, None, None)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.path))
