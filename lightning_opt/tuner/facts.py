"""Facts about the model and the machine, including the time of each group of phases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_opt.profiling.steps import phase_clock as phases
from lightning_opt.profiling.steps.phase_clock import PhaseClock

WAITING, FORWARD, BACKWARD = "waiting for data", "forward", "backward"
OPTIMIZER, COMMUNICATION, CALLBACKS = "optimizer", "communication", "callbacks"
REST = "Lightning and the rest"

PHASE_GROUPS = {
    WAITING: (phases.DATA,),
    FORWARD: (phases.FORWARD, phases.LOSS, phases.FORWARD_AND_LOSS),
    BACKWARD: (phases.BACKWARD,),
    OPTIMIZER: (phases.CLIPPING, phases.OPTIMIZER, phases.ZEROING, phases.SCHEDULER),
    COMMUNICATION: (phases.COMMUNICATION, phases.RANKS),
    CALLBACKS: (phases.HOOKS, phases.LOGGING),
}
MEASUREMENT_PHASES = (f"{phases.CALLBACK}StepGate", f"{phases.CALLBACK}TrialWatch")
"""Phases of the callbacks that the tuner adds. They are not counted."""

DATA_BOUND_SHARE = 0.5
"""Training is data-bound if it waits for data for more than this share of a step."""

OVERHEAD = "Lightning and callbacks"
BOTTLENECKS = {
    WAITING: (WAITING,),
    "computing": (FORWARD, BACKWARD, OPTIMIZER),
    COMMUNICATION: (COMMUNICATION,),
    OVERHEAD: (CALLBACKS, REST),
}
"""The groups of phases that make up each possible bottleneck."""


@dataclass(frozen=True)
class Facts:
    """Facts measured in the process of the baseline.

    Attributes:
        package: The package of the model's base class, ``"lightning"`` or ``"pytorch_lightning"``.
        device: ``"cpu"``, ``"cuda"`` or another type of device.
        why_no_bf16: The reason why bfloat16 is slow on the device; empty if it is fast.
        threads: Number of threads that torch uses.
        cpus: Number of CPUs that this process may use.
        blocks: Number of repeated blocks in the model.
        convolutions: Number of 2D and 3D convolutions.
        fused: Whether all optimizers are fused already.
        automatic_optimization: Whether the module uses automatic optimization.
        samples: Number of samples in a batch.
        uses_dataloader: Whether the data comes from one ``torch.utils.data.DataLoader``.
        workers: Number of workers of the loader, or the largest number of several loaders.
        eager_float32: Whether the model trains in float32 without compiled parts.
        seconds_by_group: Seconds of a step by group of phases; empty if not measured.
        busy: Share of all CPUs' time that the process uses.
        free_bytes: Bytes of free memory.
        steady: Whether the loaders' queues had filled or emptied before the profile was taken.
    """

    package: str = "lightning"
    device: str = "cpu"
    why_no_bf16: str = ""
    threads: int = 1
    cpus: int = 1
    blocks: int = 0
    convolutions: int = 0
    fused: bool = False
    automatic_optimization: bool = True
    samples: int = 0
    uses_dataloader: bool = True
    workers: int = 0
    eager_float32: bool = True
    seconds_by_group: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    free_bytes: float = math.inf
    steady: bool = True

    def share(self, *groups: str) -> float | None:
        total = sum(self.seconds_by_group.values())
        return sum(self.seconds_by_group[group] for group in groups) / total if total else None

    @property
    def data_bound(self) -> bool:
        return (self.share(WAITING) or 0.0) > DATA_BOUND_SHARE

    @property
    def bottleneck(self) -> tuple[str, float]:
        shares = {part: self.share(*groups) or 0.0 for part, groups in BOTTLENECKS.items()}
        return max(shares.items(), key=lambda item: item[1])


def seconds_by_group(
    clock: PhaseClock, phase_seconds: Mapping[int, float], steps: int
) -> dict[str, float]:
    """Divide the seconds of a step into groups of phases.

    On a GPU, the result is the device's time, plus the host's time while the device is idle.

    Args:
        clock: The profiler's clock. It has the phase names and the device's times.
        phase_seconds: Seconds of each phase in ``steps`` steps.
        steps: The number of steps.
    """
    host = dict.fromkeys((*PHASE_GROUPS, REST), 0.0)
    for phase, seconds in phase_seconds.items():
        if clock.phases.names[phase] not in MEASUREMENT_PHASES:
            host[_group(clock, phase)] += seconds / max(1, steps)
    device = {} if clock.device is None else clock.device.durations
    if not device:
        return host
    step = sum(host.values())
    by_group = dict.fromkeys(host, 0.0)
    for phase, durations in device.items():
        if phase >= 0:
            by_group[_group(clock, phase)] += durations.quantile(0.5)
    for group in (WAITING, CALLBACKS, REST):
        idle = max(0.0, step - sum(by_group.values()))
        by_group[group] += idle if group == REST else min(idle, host[group])
    return by_group


def _group(clock: PhaseClock, phase: int) -> str:
    if clock.phases.names[phase].startswith(phases.CALLBACK):
        return CALLBACKS
    return next((name for name, members in PHASE_GROUPS.items() if phase in members), REST)
