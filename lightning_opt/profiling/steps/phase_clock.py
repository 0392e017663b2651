"""Clocks that always run for exactly one phase, so that the phases add up to the wall time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from lightning_opt.profiling.durations import Durations, Work
from lightning_opt.profiling.steps.step_phases import NOT_OF_A_STEP, PROFILER, WAITS, Phases

WINDOW_STEPS = 16
"""Steps whose CUDA events are read together."""

MAX_WINDOWS = 8
"""Most windows that wait for the device; further steps are dropped until it catches up."""

HOST = -1
"""Pseudo-phase of the device outside all phases that run on it."""

_END_OF_STEP = -2


class DeviceClock:
    """Times phases on a CUDA device, by events at the changes of phase, without waiting for them.

    A window of steps is read once the device has passed its last event. The time between two events
    counts for the phase of the first one, including any time in which the device waits.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.durations: dict[int, Durations] = {}
        self.dropped = 0
        self._free: list[Any] = []
        self._marks: list[tuple[Any, int]] = []
        self._windows: deque[list[tuple[Any, int]]] = deque()
        self._steps = self._step_start = 0
        self._phase = HOST
        self._seconds: dict[int, float] = {}
        self.mark(HOST, force=True)

    def mark(self, phase: int, force: bool = False) -> None:
        """Count work that is queued from now on for ``phase``, which may be ``HOST``."""
        if phase == self._phase and not force:
            return
        self._phase = phase
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((event, phase))

    def move(self, source: int, target: int) -> None:
        for place in range(self._step_start, len(self._marks)):
            event, phase = self._marks[place]
            if phase == source:
                self._marks[place] = event, target

    def end_step(self) -> None:
        """End a step; at the end of a window, read the windows that the device has passed."""
        self._marks.append((None, _END_OF_STEP))
        self._step_start = len(self._marks)
        self._steps += 1
        if self._steps % WINDOW_STEPS == 0:
            self._end_window()
            self._read()

    def _end_window(self) -> None:
        self.mark(self._phase, force=True)  # the end of this window and the start of the next
        last = self._marks[-1]
        if len(self._windows) < MAX_WINDOWS:
            self._windows.append(self._marks)
        else:
            self.dropped += WINDOW_STEPS
            # The first event is also the end of a window that will be read.
            self._free += [event for event, _ in self._marks[1:-1] if event is not None]
        self._marks, self._step_start = [last], 1

    def _read(self, wait: bool = False) -> None:
        while self._windows:
            last = self._windows[0][-1][0]
            if wait:
                last.synchronize()
            elif not last.query():
                return
            self._add(self._windows.popleft())

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
        if self._marks:
            self._marks.append((None, _END_OF_STEP))
            self._end_window()
        self._read(wait=True)
        self._free, self._marks = [], []


class PhaseClock:
    """Counts each moment for the innermost open phase, so that nothing counts twice.

    Phases are entered and left like brackets. Leaving a phase also closes the phases inside it that
    an exception has left open. A phase's durations are its times per step, from one
    :meth:`end_step` to the next, over the steps in which it ran.

    Args:
        phases: The phases, and the phases that absorb others inside them.
        first: The initial phase. It also gets the time outside all other phases.
        device: Also times the phases that run on the device.
    """

    def __init__(self, phases: Phases, first: int, device: DeviceClock | None = None) -> None:
        self.phases, self.device = phases, device
        self.phase = first
        self.started = self._since = perf_counter()
        self._stack: list[tuple[int, Any]] = []
        self._seconds = [0.0] * len(phases.names)
        self.durations: dict[int, Durations] = {}
        self.work, self._window_work = Work(), Work()
        self.busy = 0.0
        self._window: dict[int, float] = {}

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def elapsed(self) -> float:
        """Seconds from the start to the last change: the sum of all phases."""
        return self._since - self.started

    def enter(self, phase: int, key: Any) -> None:
        """Enter a phase; :meth:`leave` with the same ``key`` leaves it."""
        self._charge()
        current, phases = self.phase, self.phases
        self._stack.append((current, key))
        if phase != current and phases.level[phase] >= phases.cap[current]:
            if phase >= len(self._seconds):
                self._seconds += [0.0] * (len(phases.names) - len(self._seconds))
            self._switch(phase)

    def leave(self, key: Any) -> None:
        """Leave the innermost phase with this key, and the phases inside it."""
        stack = self._stack
        if not stack or (stack[-1][1] != key and all(entry[1] != key for entry in stack)):
            return  # it was entered before this clock started
        self._charge()
        before, found = stack.pop()
        while found != key:
            before, found = stack.pop()
        if before != self.phase:
            self._switch(before)

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """Enter a phase, and leave it at the end of the ``with`` block."""
        key = object()
        self.enter(phase, key)
        try:
            yield
        finally:
            self.leave(key)

    def _switch(self, phase: int) -> None:
        self.phase = phase
        if self.device is not None:
            self.device.mark(phase if self.phases.on_device[phase] else HOST)

    def set_default_phase(self, phase: int) -> None:
        """Count the time outside all other phases for ``phase`` from now on; none may be open."""
        self._charge()
        self.phase = phase

    def move(self, source: int, target: int) -> None:
        """Move the time of one phase in the current step to another one."""
        self._charge()
        self._seconds[target] += self._seconds[source]
        self._seconds[source] = 0.0
        if self.device is not None:
            self.device.move(source, target)

    def _charge(self) -> None:
        now = perf_counter()
        self._seconds[self.phase] += now - self._since
        self._since = now

    def end_step(self, trained: bool, samples: int = 0, tokens: int = 0) -> int:
        """End a step. It counts for training unless the profiler itself took time in it.

        Args:
            trained: Whether a batch was trained on since the last end.
            samples: Samples of that batch.
            tokens: Its tokens.

        Returns:
            The number of steps counted since the last :meth:`end_window`.
        """
        self._charge()
        counted = trained and not self._seconds[PROFILER]
        total = waits = 0.0
        for phase, value in enumerate(self._seconds):
            if not value:
                continue
            self._seconds[phase] = 0.0
            durations = self.durations.get(phase)
            if durations is None:
                durations = self.durations[phase] = Durations()
            durations.add(value)
            if counted and phase not in NOT_OF_A_STEP:
                total += value
                self._window[phase] = self._window.get(phase, 0.0) + value
                if phase in WAITS:
                    waits += value
        if counted:
            self.work.add(total, samples, tokens)
            self._window_work.add(total, samples, tokens)
            self.busy += total - waits
        if self.device is not None:
            self.device.end_step()
        return self._window_work.steps.count

    def end_window(self) -> tuple[dict[int, float], Work]:
        window, work = self._window, self._window_work
        self._window, self._window_work = {}, Work()
        return window, work
