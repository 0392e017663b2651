"""A clock that always runs for exactly one phase, so that the phases sum up to the wall time."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lightning_opt.profiling.durations import Durations
from lightning_opt.profiling.steps.device_clock import DeviceClock
from lightning_opt.profiling.steps.step_phases import NOT_OF_A_STEP, PROFILER, WAITS, Phases
from lightning_opt.profiling.work import Work


class StepClock:
    """Charges each moment to the innermost phase that is running: nothing counts twice.

    Phases are entered and left like brackets. What is left without what lies within it having been
    left, after an exception, closes those too. A phase's durations are its times in one step, from
    one :meth:`end_step` to the next, in those steps in which it ran at all.

    Args:
        phases: Their numbers, and which of them belong to what encloses them.
        first: The phase at the start, to which also belongs what no other phase claims.
        device: Takes marks at the changes between phases that give a device work.
    """

    def __init__(self, phases: Phases, first: int, device: DeviceClock | None = None) -> None:
        self.phases, self.device = phases, device
        self.phase = first
        self.started = self._since = perf_counter()
        self._stack: list[tuple[int, Any]] = []
        self._seconds: list[float] = []
        self._grow()
        self.durations: dict[int, Durations] = {}
        self.work, self._window_work = Work(), Work()
        self.busy = 0.0
        self._window: dict[int, float] = {}

    def _grow(self) -> None:
        self._seconds += [0.0] * (len(self.phases.names) - len(self._seconds))

    @property
    def depth(self) -> int:
        """How many phases are open."""
        return len(self._stack)

    @property
    def elapsed(self) -> float:
        """Seconds from the start to what was charged last: the sum of all phases."""
        return self._since - self.started

    def enter(self, phase: int, key: Any) -> None:
        """Begin a phase; ``key`` is what :meth:`leave` will be given."""
        now = perf_counter()
        current = self.phase
        self._seconds[current] += now - self._since
        self._since = now
        self._stack.append((current, key))
        phases = self.phases
        if phase != current and phases.level[phase] >= phases.cap[current]:
            if phase >= len(self._seconds):
                self._grow()
            self.phase = phase
            if self.device is not None:
                self.device.mark(phase if phases.on_device[phase] else -1)

    def leave(self, key: Any) -> None:
        """End the innermost phase with this key, and what is open within it."""
        stack = self._stack
        if not stack:
            return
        if stack[-1][1] != key and all(entry[1] != key for entry in stack):
            return  # it began before this clock did
        now = perf_counter()
        self._seconds[self.phase] += now - self._since
        self._since = now
        before, found = stack.pop()
        while found != key:
            before, found = stack.pop()
        if before != self.phase:
            self.phase = before
            if self.device is not None:
                self.device.mark(before if self.phases.on_device[before] else -1)

    def rest(self, phase: int) -> None:
        """Let what no other phase claims belong to another one from now on; none may be open."""
        self._charge()
        self.phase = phase

    def move(self, source: int, target: int) -> None:
        """Count the time of one phase in the running step under another one."""
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
        """End a step, which counts for training unless the profiler itself took part in it.

        Args:
            trained: Whether a batch was trained on since the last end.
            samples: Of that batch.
            tokens: Likewise.

        Returns:
            How many steps were counted since the last :meth:`end_window`.
        """
        self._charge()
        counted = trained and not self._seconds[PROFILER]
        window = self._window if counted else {}
        total = waits = 0.0
        all_durations = self.durations
        for phase, value in enumerate(self._seconds):
            if not value:
                continue
            self._seconds[phase] = 0.0
            durations = all_durations.get(phase)
            if durations is None:
                durations = all_durations[phase] = Durations()
            durations.add(value)
            if counted and phase not in NOT_OF_A_STEP:
                total += value
                window[phase] = window.get(phase, 0.0) + value
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
        """Return the seconds of each phase, and the steps, since the last call."""
        window, work = self._window, self._window_work
        self._window, self._window_work = {}, Work()
        return window, work
