"""Looks at the processes of a run and at its GPU, from a thread beside the run."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from lightning_opt.core.measure.memory import MB
from lightning_opt.profiling.monitor.gpu import GpuReader

if TYPE_CHECKING:
    import psutil

log = logging.getLogger(__name__)

KEPT = 4096
"""Samples that wait for a report; older ones are lost."""

JOIN = 5.0
"""Seconds that the end of a run waits for the thread, should the driver hang."""

NAME = "lightning_opt.PerformanceMonitor"
"""Of the thread."""


class Processes:
    """This process and all below it: their CPU time and their memory."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self.look()

    def look(self) -> tuple[float, int, int]:
        """Return CPU percent since the last look, resident bytes, and the number of children."""
        import psutil

        known, self._known = self._known, {}
        percent, resident = 0.0, 0
        for pid in (os.getpid(), *children_of(os.getpid())):
            with contextlib.suppress(psutil.Error):  # it has ended in between
                process = known.get(pid) or psutil.Process(pid)
                percent += process.cpu_percent()
                resident += process.memory_info().rss
                self._known[pid] = process
        return percent, resident, len(self._known) - 1


def children_of(pid: int) -> list[int]:
    """Return the processes below ``pid``, at any depth.

    Linux lists them by thread, mostly. Elsewhere psutil has to look at each process there is.
    """
    try:
        direct = [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - and this is quicker
            for child in _read(f"/proc/{pid}/task/{task}/children").split()
        ]
    except OSError:
        import psutil

        with contextlib.suppress(psutil.Error):  # it has ended
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    return direct + [below for child in direct for below in children_of(child)]


def _read(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - pathlib takes twice as long
        return file.read()


class Sampler:
    """A thread that takes a sample every so often, until it is stopped.

    A sample is a dict by the names under which its values are logged: the CPU time of the process
    and its children since the last look over the time passed (100 is one core), their resident
    memory (what they share counts in each), how many children there are at any depth (workers of a
    DataLoader, most often), and what a GPU tells.

    Args:
        seconds: From one sample to the next.
        gpu: What to ask of the GPU; None for a run without one, or without NVML.

    Attributes:
        failure: Why it has stopped by itself; empty if it has not.
    """

    def __init__(self, seconds: float, gpu: GpuReader | None) -> None:
        self.failure = ""
        self._seconds, self._gpu = seconds, gpu
        self._samples: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            processes = Processes()
            while not self._ended.wait(self._seconds):
                percent, resident, children = processes.look()
                sample = {
                    "cpu_percent": percent,
                    "rss_mb": resident / MB,
                    "child_processes": float(children),
                }
                self._samples.append(sample | (self._gpu.read() if self._gpu is not None else {}))
        except Exception as error:  # noqa: BLE001 - a look at the machine must not end a run
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("PerformanceMonitor samples no more: %s", self.failure)

    def take(self) -> list[dict[str, float]]:
        """Return the samples since the last call, oldest first."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def stop(self) -> None:
        """End the thread, and wait for that."""
        self._ended.set()
        self._thread.join(timeout=JOIN)
