"""Facts about the model and the machine, among them how the time of a step divides into groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_opt.profiling.steps import step_phases as phases
from lightning_opt.profiling.steps.phase_clock import PhaseClock

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
MEASUREMENT = (f"{phases.CALLBACK}StepGate", f"{phases.CALLBACK}TrialWatch")
"""Phases that exist only because the training is a trial."""

STARVED = 0.5
"""Share of a step from which waiting for data is the first problem to solve."""

OVERHEAD = "Lightning and callbacks"
BOTTLENECKS = {
    WAITING: (WAITING,),
    "computing": (FORWARD, BACKWARD, OPTIMIZER),
    COMMUNICATION: (COMMUNICATION,),
    OVERHEAD: (CALLBACKS, REST),
}
"""Possible bottlenecks, and their groups."""


@dataclass(frozen=True)
class Facts:
    """Facts that the baseline's process has found.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or another type of device.
        no_bf16: Why the device is not fast in bfloat16; empty if it is.
        threads: Threads that torch uses.
        cpus: CPUs that this process may use.
        blocks: Repeated blocks of the model.
        convolutions: Convolutions over two or three dimensions.
        fused: Whether all optimizers are fused already.
        automatic: Whether the module uses automatic optimization.
        samples: Samples in a batch.
        loader: Whether the data come from a ``torch.utils.data.DataLoader``.
        workers: Workers of that loader.
        eager: Whether it trains in float32 without compiled parts.
        account: Seconds of a step by group; empty if unknown.
        busy: Share of the CPUs' time used in these steps.
        room: Bytes of free memory.
        steady: Whether the account is of steps with settled queues of the loaders.
    """

    device: str = "cpu"
    no_bf16: str = ""
    threads: int = 1
    cpus: int = 1
    blocks: int = 0
    convolutions: int = 0
    fused: bool = False
    automatic: bool = True
    samples: int = 0
    loader: bool = True
    workers: int = 0
    eager: bool = True
    account: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    room: float = math.inf
    steady: bool = True

    def share(self, *groups: str) -> float | None:
        total = sum(self.account.values())
        return sum(self.account[group] for group in groups) / total if total else None

    @property
    def starved(self) -> bool:
        return (self.share(WAITING) or 0.0) > STARVED

    @property
    def bottleneck(self) -> tuple[str, float]:
        shares = {part: self.share(*groups) or 0.0 for part, groups in BOTTLENECKS.items()}
        return max(shares.items(), key=lambda item: item[1])


def account(clock: PhaseClock, window: Mapping[int, float], steps: int) -> dict[str, float]:
    """Return the seconds of a step by group.

    On a GPU the device's time counts, plus the host's time that leaves the device idle.

    Args:
        clock: The profiler's clock, for the names of phases and the device's times.
        window: Seconds of each phase in some steps.
        steps: The number of these steps.
    """
    host = dict.fromkeys((*GROUPS, REST), 0.0)
    for phase, seconds in window.items():
        if clock.phases.names[phase] not in MEASUREMENT:
            host[_group(clock, phase)] += seconds / max(1, steps)
    device = {} if clock.device is None else clock.device.durations
    if not device:
        return host
    step = sum(host.values())
    found = dict.fromkeys(host, 0.0)
    for phase, durations in device.items():
        if phase >= 0:
            found[_group(clock, phase)] += durations.quantile(0.5)
    for group in (WAITING, CALLBACKS, REST):
        idle = max(0.0, step - sum(found.values()))
        found[group] += idle if group == REST else min(idle, host[group])
    return found


def _group(clock: PhaseClock, phase: int) -> str:
    if clock.phases.names[phase].startswith(phases.CALLBACK):
        return CALLBACKS
    return next((name for name, members in GROUPS.items() if phase in members), REST)
