"""Seconds of a step by group of phases, from given times of phases."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_opt.profiling.durations import Durations
from lightning_opt.profiling.steps import phase_clock as phases
from lightning_opt.profiling.steps.phase_clock import Phases
from lightning_opt.tuner import facts as parts
from lightning_opt.tuner.facts import seconds_by_group


def clock(device: dict[int, float] | None = None) -> Any:
    found = SimpleNamespace(phases=Phases(), device=None)
    if device is not None:
        durations = {phase: Durations() for phase in device}
        for phase, seconds in device.items():
            durations[phase].add(seconds)
        found.device = SimpleNamespace(durations=durations)
    return found


def test_phases_are_grouped_without_those_of_the_measurement() -> None:
    of = clock()
    own = of.phases.number("callback EarlyStopping", False)
    gate = of.phases.number("callback StepGate", False)
    watch = of.phases.number("callback TrialWatch", True)
    window = {
        phases.DATA: 4.0, phases.FORWARD: 2.0, phases.LOSS: 1.0, phases.BACKWARD: 6.0,
        phases.OPTIMIZER: 2.0, phases.ZEROING: 1.0, phases.LOGGING: 0.5, own: 0.5,
        phases.COMMUNICATION: 1.0, phases.LOOP: 3.0, gate: 100.0, watch: 50.0,
    }  # fmt: skip
    assert seconds_by_group(of, window, 2) == {
        parts.WAITING: 2.0, parts.FORWARD: 1.5, parts.BACKWARD: 3.0, parts.OPTIMIZER: 1.5,
        parts.COMMUNICATION: 0.5, parts.CALLBACKS: 0.5, parts.REST: 1.5,
    }  # fmt: skip


HOST = {phases.DATA: 3.0, phases.FORWARD: 1.0, phases.BACKWARD: 1.0, phases.LOOP: 5.0}


@pytest.mark.parametrize(
    ("device", "waiting", "rest"),
    [
        ({phases.FORWARD: 3.0, phases.BACKWARD: 7.0}, 0.0, 0.0),  # nothing leaves it idle
        ({phases.FORWARD: 3.0, phases.BACKWARD: 5.0}, 2.0, 0.0),
        ({phases.FORWARD: 1.0, phases.BACKWARD: 2.0, -1: 9.0}, 3.0, 4.0),
    ],
)
def test_host_time_counts_on_gpu_only_while_the_device_is_idle(
    device: dict[int, float], waiting: float, rest: float
) -> None:
    found = seconds_by_group(clock(device), HOST, 1)
    assert found[parts.BACKWARD] == pytest.approx(device[phases.BACKWARD], rel=0.1)
    assert found[parts.WAITING] == pytest.approx(waiting, rel=0.2, abs=0.2)
    assert found[parts.REST] == pytest.approx(rest, rel=0.2, abs=0.2)
    assert sum(found.values()) == pytest.approx(10.0, rel=0.05)
