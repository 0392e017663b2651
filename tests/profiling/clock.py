"""A clock and a CUDA device whose time advances only where a test says so."""

from collections import defaultdict
from typing import Any

import pytest
import torch


class Clock:
    """A simulated ``time.perf_counter``, and a stand-in for the module ``time``.

    Attributes:
        now: The time in seconds.
        tick: Seconds that pass at each reading.
        spent: The seconds given to :meth:`spend`, by name.
    """

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick
        self.spent: dict[Any, float] = defaultdict(float)

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    __call__ = perf_counter

    def spend(self, seconds: float, name: Any = None) -> None:
        self.now += seconds
        self.spent[name] += seconds


class Device:
    """A device that works behind the host, and counts waits."""

    def __init__(self) -> None:
        self.queued = 0.0  # the time at which all queued work ends
        self.done = 0.0
        self.waits = 0

    def work(self, seconds: float) -> None:
        self.queued += seconds


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: Any) -> None:
        self.time = self.device.queued

    def query(self) -> bool:
        return self.time <= self.device.done

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.done = max(self.device.done, self.time)

    def elapsed_time(self, other: "Event") -> float:
        assert self.query()
        assert other.query(), "an event was read before the device passed it"
        return 1e3 * (other.time - self.time)


def simulate_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Make CUDA events those of the returned device."""
    device = Device()

    def event(enable_timing: bool) -> Event:
        assert enable_timing
        return Event(device)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return device
