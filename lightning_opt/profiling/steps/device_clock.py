"""What a CUDA device spends its time on, by events that nobody waits for."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from lightning_opt.profiling.durations import Durations

STEPS_A_WINDOW = 16
MOST_WINDOWS = 8
"""Windows whose events have not come to pass; beyond those nothing is marked until some have."""

_END_OF_STEP = -2


class DeviceClock:
    """Records an event at each change of phase, and reads them once the device is past them.

    A window of some steps is read when the device has passed its last event, which is asked without
    waiting. Between two events the device's clock runs for the phase that was entered at the first;
    that includes time in which the device idles because the host has not given it work yet.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream_of = device
        self.durations: dict[int, Durations] = {}
        self.dropped = 0
        self._free: list[Any] = []
        self._marks: list[tuple[Any, int]] = []
        self._windows: deque[list[tuple[Any, int]]] = deque()
        self._phase, self._steps, self._step_start = -1, 0, 0
        self._seconds: dict[int, float] = {}
        self.mark(-1, force=True)

    def mark(self, phase: int, force: bool = False) -> None:
        """Say that what is queued from now on belongs to ``phase``; -1 is the host's own."""
        if phase == self._phase and not force:
            return
        self._phase = phase
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._stream_of))
        self._marks.append((event, phase))

    def move(self, source: int, target: int) -> None:
        """Rename a phase within the running step."""
        for place in range(self._step_start, len(self._marks)):
            event, phase = self._marks[place]
            if phase == source:
                self._marks[place] = event, target

    def end_step(self) -> None:
        """End a step, and read what the device has passed, every so many steps."""
        self._marks.append((None, _END_OF_STEP))
        self._step_start = len(self._marks)
        self._steps += 1
        if self._steps % STEPS_A_WINDOW == 0:
            self._end_window()
            self._read()

    def _end_window(self) -> None:
        self.mark(self._phase, force=True)  # the end of this window and the start of the next
        last = self._marks[-1]
        if len(self._windows) < MOST_WINDOWS:
            self._windows.append(self._marks)
        else:
            self.dropped += STEPS_A_WINDOW
            # The first is also the end of a window that is still to be read.
            self._free += [event for event, _ in self._marks[1:-1] if event is not None]
        self._marks, self._step_start = [last], 1

    def _read(self, wait: bool = False) -> None:
        while self._windows:
            window = self._windows[0]
            last = window[-1][0]
            if wait:
                last.synchronize()
            elif not last.query():
                return
            self._windows.popleft()
            self._add(window)

    def _add(self, window: list[tuple[Any, int]]) -> None:
        before, running = window[0]
        for event, phase in window[1:]:
            if event is None:
                for key, value in self._seconds.items():
                    self.durations.setdefault(key, Durations()).add(value)
                self._seconds = {}
                continue
            passed = before.elapsed_time(event) / 1e3
            if passed > 0:
                self._seconds[running] = self._seconds.get(running, 0.0) + passed
            self._free.append(before)
            before, running = event, phase

    def finish(self) -> None:
        """Wait for the device and read the rest. At the end of a run, never in a step."""
        if self._marks:
            self._marks.append((None, _END_OF_STEP))
            self._end_window()
        self._read(wait=True)
        self._free, self._marks = [], []
