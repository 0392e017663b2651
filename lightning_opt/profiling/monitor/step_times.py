"""How long steps take: on the host's clock, or on the device's without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

WAITING = 256
"""Steps that wait to be read before some are, where a report is far away."""


class StepTime(NamedTuple):
    """One step.

    Attributes:
        seconds: From the end of the step before to its own.
        samples: How many samples it had.
        tokens: How many tokens; 0 where they are not counted.
    """

    seconds: float
    samples: int
    tokens: int


class StepTimer:
    """Takes the time of steps, each from the end of the last one.

    On CUDA each mark is an event in the stream, which costs the host microseconds and which is read
    when it has passed. Elsewhere it is the host's clock.

    Args:
        device: Where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type == "cuda"
        self._start: Any = None
        self._pending: deque[tuple[Any, Any, int, int]] = deque()
        self._times: list[StepTime] = []

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def interrupt(self) -> None:
        """Something else comes now (an epoch's end, validation): the next step begins anew."""
        self._start = None

    def begin(self) -> None:
        """A batch is there. Its step has begun when the last one ended, if nothing was between."""
        if self._start is None:
            self._start = self._mark()

    def end(self, samples: int, tokens: int, *, keep: bool = True) -> None:
        """The step has ended, with so many samples and tokens; without ``keep`` it is dropped."""
        now = self._mark()
        if self._start is not None and keep:
            self._pending.append((self._start, now, samples, tokens))
            if len(self._pending) >= WAITING:
                self._read()
        self._start = now

    def take(self, *, wait: bool = False) -> list[StepTime]:
        """Return the steps that are over and were not returned before.

        Args:
            wait: For the device, so that these are all.
        """
        if wait and self._on_device and self._pending:
            self._pending[-1][1].synchronize()
        self._read()
        times, self._times = self._times, []
        return times

    def _read(self) -> None:
        while self._pending:
            start, end, samples, tokens = self._pending[0]
            if self._on_device and not end.query():
                return
            self._pending.popleft()
            seconds = start.elapsed_time(end) / 1000 if self._on_device else end - start
            self._times.append(StepTime(seconds, samples, tokens))
