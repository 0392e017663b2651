"""The step clock and timing in turns, on a made-up clock and with made-up events."""

import pytest
import torch

from lightning_opt.core.measure import timing
from lightning_opt.core.measure.timing import StepClock, time_in_turns
from tests.profiling.clock import Clock, simulate_device


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_discarded_step_is_not_returned(clock):
    steps = StepClock(torch.device("cpu"))
    steps.start()
    for keep, seconds in ((False, 9.0), (True, 2.0)):
        clock.now += seconds
        steps.stop(keep=keep)
    assert steps.read() == [2.0]


def test_device_is_not_waited_for_between_reads(monkeypatch):
    device = simulate_device(monkeypatch)
    steps = StepClock(torch.device("cuda", 0))
    steps.start()
    for _ in range(4):
        device.work(2)
        steps.stop()
    assert steps.read() == []
    device.done = 5.0
    assert steps.read() == [2.0, 2.0]
    assert device.waits == 0
    assert steps.read(wait=True) == [2.0, 2.0]


def test_candidates_are_timed_once_a_round_without_the_warmup(clock):
    order = []

    def candidate(name, seconds):
        def run():
            order.append(name)
            clock.now += seconds

        return run

    candidates = {"a": candidate("a", 1.0), "b": candidate("b", 3.0)}
    seconds = time_in_turns(
        candidates,
        rounds=2,
        calls={"a": 2, "b": 1},
        warmup=1,
        after_round=lambda: order.append("|"),
    )
    assert seconds == {"a": [1.0, 1.0], "b": [3.0, 3.0]}
    assert "".join(order) == "baa|aab|baa|"
