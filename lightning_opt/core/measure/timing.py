"""Times steps, and functions in turns. `core.numerics.ratios` compares the timings."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

MAX_UNREAD_STEPS = 256
"""Number of unread steps at which the clock reads the finished ones by itself."""


def wait_for(device: torch.device | str) -> None:
    """Wait until ``device`` has finished its queued work; a CPU has none."""
    device = torch.device(device)
    if device.type == "mps":  # takes no device
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class StepClock:
    """Times steps, each from the end of the step before it.

    On CUDA each end is an event in the current stream: the host does not wait for the device until
    :meth:`read` is called with ``wait=True``. On other devices the host's clock is used. If they
    work asynchronously, only totals can be correct: call :func:`wait_for` before and after a block
    of steps.

    Args:
        device: The device that computes the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uses_events = device.type == "cuda"
        self._start: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds: list[float] = []

    def start(self) -> None:
        """Start a step. No effect if the end of the previous step has started it already."""
        if self._start is None:
            self._start = self._mark()

    def pause(self) -> None:
        """Discard the running step; the next one starts at :meth:`start`."""
        self._start = None

    def stop(self, *, keep: bool = True) -> bool:
        """End the running step, record it if ``keep``, and start the next one.

        Returns:
            Whether a step was recorded. False too if none was running.
        """
        end = self._mark()
        keep = keep and self._start is not None
        if keep:
            self._pending.append((self._start, end))
            if len(self._pending) >= MAX_UNREAD_STEPS:
                self._collect()
        self._start = end
        return keep

    def read(self, *, wait: bool = False) -> list[float]:
        """Return the seconds of steps finished since the last call; may ``wait`` for the device."""
        if wait and self._uses_events and self._pending:
            self._pending[-1][1].synchronize()
        self._collect()
        seconds, self._seconds = self._seconds, []
        return seconds

    def _mark(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _collect(self) -> None:
        while self._pending:
            start, end = self._pending[0]
            if self._uses_events and not end.query():
                return
            self._pending.popleft()
            seconds = start.elapsed_time(end) / 1e3 if self._uses_events else end - start
            self._seconds.append(seconds)


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Return ``items`` rotated for round number ``turn``: each round starts one item later."""
    first = turn % len(items) if items else 0
    return [*items[first:], *items[:first]]


def take_turns(
    timers: Mapping[str, Callable[[], float]], *, turns: int = 1, first: int = 0
) -> Iterator[dict[str, float]]:
    """Yield the mean seconds of each timer, round by round, in an order that rotates.

    A slow minute of a shared machine then affects all timers. Compare them by the ratios within
    rounds: :func:`~lightning_opt.core.numerics.ratios.compare_pairs`.

    Args:
        timers: Functions that take one turn and return its seconds, by name. A name that is removed
            takes no further turns.
        turns: Number of turns of each timer in a round. They alternate.
        first: Number of the first round, which determines its order.
    """
    for round_number in itertools.count(first):
        order = rotated(list(timers), round_number)
        taken = [[timers[name]() for name in order] for _ in range(turns)]
        means = map(statistics.fmean, zip(*taken, strict=True))
        yield dict(zip(order, means, strict=True))


def time_calls(
    function: Callable[[], object], calls: int = 1, device: torch.device | str = "cpu"
) -> float:
    """Return the seconds of one call, the mean of ``calls``; waits for the device at both ends."""
    wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait_for(device)
    return (time.perf_counter() - start) / calls


def time_in_turns(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int | Mapping[str, int] = 1,
    device: torch.device | str = "cpu",
    warmup: int = 2,
    after_round: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Time each candidate once a round, in turns as :func:`take_turns` orders them.

    Args:
        candidates: Functions without arguments, by name.
        rounds: Number of timings of each candidate.
        calls: Number of calls within one timing, for all candidates or by name.
        device: The device that the candidates use.
        warmup: Number of earlier rounds whose timings are discarded.
        after_round: Called after each round, outside the timings.

    Returns:
        For each candidate, the seconds of one call in each round.
    """
    counts = calls if isinstance(calls, Mapping) else dict.fromkeys(candidates, calls)
    timers = {
        name: partial(time_calls, function, counts[name], device)
        for name, function in candidates.items()
    }
    taken = []
    for seconds in itertools.islice(take_turns(timers, first=-warmup), warmup + rounds):
        taken.append(seconds)
        if after_round is not None:
            after_round()
    return {name: [seconds[name] for seconds in taken[warmup:]] for name in candidates}
