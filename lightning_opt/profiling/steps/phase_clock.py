"""Clocks that assign each moment to exactly one phase. The phases add up to the wall time."""

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
"""Number of steps per window. The CUDA events of a window are read together."""

MAX_WINDOWS = 8
"""Maximum number of windows that wait for the device. Times of further windows are dropped."""

HOST = -1
"""Pseudo-phase: the device is in no phase, because the current phase runs only on the host."""

_END_OF_STEP = -2


class DeviceClock:
    """Times phases on a CUDA device without making the host wait.

    It records an event at each change of phase. A window of steps is read once the device has
    passed the window's last event. The time between two events counts for the phase of the first
    event, even if the device is idle for part of it.

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
        """Assign the work queued from now on to ``phase``. ``HOST`` means no phase."""
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
        """End a step. If it completes a window, read all windows that the device has passed."""
        self._marks.append((None, _END_OF_STEP))
        self._step_start = len(self._marks)
        self._steps += 1
        if self._steps % WINDOW_STEPS == 0:
            self._end_window()
            self._read()

    def _end_window(self) -> None:
        self.mark(self._phase, force=True)  # ends this window and starts the next one
        last = self._marks[-1]
        if len(self._windows) < MAX_WINDOWS:
            self._windows.append(self._marks)
        else:
            self.dropped += WINDOW_STEPS
            # Keep the first event: the previous window ends with it and is still unread.
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
    """Assigns each moment to the innermost open phase, so that no time counts twice.

    Phases are nested like brackets. Leaving a phase also leaves the phases inside it that an
    exception has left open. A step lasts from one :meth:`end_step` to the next. ``durations`` has
    one entry per phase for each step in which the phase ran: its total time in that step.

    Args:
        phases: The phases. They define which phases absorb the phases inside them.
        first: The default phase. Time outside all other phases is assigned to it.
        device: A second clock, for the phases that run on the device. None without CUDA.
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
        """Seconds from the start to the last update: the sum of all phases."""
        return self._since - self.started

    def enter(self, phase: int, key: Any) -> None:
        """Enter a phase. Call :meth:`leave` with the same ``key`` to leave it."""
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
            return  # the phase was entered before this clock started
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
        """Set the phase for time outside all other phases. Call it only while no phase is open."""
        self._charge()
        self.phase = phase

    def move(self, source: int, target: int) -> None:
        """Assign the current step's time in phase ``source`` to phase ``target``."""
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
        """End a step. Training steps in which the profiler spent time are excluded from ``work``.

        Args:
            trained: Whether this step trained on a batch.
            samples: Number of samples in the batch.
            tokens: Number of tokens in the batch.

        Returns:
            The number of steps in ``work`` since the last :meth:`end_window`.
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
