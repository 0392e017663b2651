"""Where the time of a step goes, in the groups that a change of the Trainer bears on."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_opt.profiling.steps import step_phases as phases
from lightning_opt.profiling.steps.step_clock import StepClock

WAITING, FORWARD, BACKWARD = "waiting for data", "forward", "backward"
OPTIMIZER, COMMUNICATION, CALLBACKS = "optimizer", "communication", "callbacks"
REST = "Lightning and the rest"

GROUPS = {
    WAITING: (phases.DATA,),
    FORWARD: (phases.FORWARD, phases.LOSS, phases.FORWARD_AND_LOSS),
    BACKWARD: (phases.BACKWARD,),
    OPTIMIZER: (phases.CLIPPING, phases.OPTIMIZER, phases.ZEROING, phases.SCHEDULER),
    COMMUNICATION: (phases.COMMUNICATION, phases.RANKS),
    CALLBACKS: (phases.HOOKS, phases.LOGGING),
}
OURS = (f"{phases.CALLBACK}StepGate", f"{phases.CALLBACK}TrialWatch")
"""Phases that are there because the training is a trial."""


def account(clock: StepClock, window: Mapping[int, float], steps: int) -> dict[str, float]:
    """Return the seconds of a step by group.

    On a GPU the host runs ahead, so what the device does counts there, and of what the host does
    only as much as leaves the device idle.

    Args:
        clock: Of the profiler, for the names of phases and the device's times.
        window: Seconds of each phase in some steps.
        steps: How many.
    """
    found = dict.fromkeys((*GROUPS, REST), 0.0)
    for phase, seconds in window.items():
        if clock.phases.names[phase] not in OURS:
            found[_group(clock, phase)] += seconds / max(1, steps)
    device = {} if clock.device is None else clock.device.durations
    if not device:
        return found
    step, host = sum(found.values()), found
    found = dict.fromkeys(host, 0.0)
    for phase, durations in device.items():
        if phase >= 0:
            found[_group(clock, phase)] += durations.quantile(0.5)
    for group in (WAITING, CALLBACKS, REST):
        idle = max(0.0, step - sum(found.values()))
        found[group] += idle if group == REST else min(idle, host[group])
    return found


def _group(clock: StepClock, phase: int) -> str:
    if clock.phases.names[phase].startswith(phases.CALLBACK):
        return CALLBACKS
    return next((name for name, members in GROUPS.items() if phase in members), REST)
