"""Cost of health, guard and clipping in a step of a GPT of 124M parameters.

Supports: on a GPU the three together add at most a few dozen launches to a step, and no wait
between reports. Trainers without callbacks, with torch's ``clip_grad_norm_`` and with the callbacks
take turns. Launches are the operators that torch dispatches during a step, without views. On CUDA
every wait between the start and the end of a step is listed. On a CPU a tiny model replaces the
GPT.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_opt as lo
from benchmarks.gpt import GPT, size_for
from benchmarks.harness import parse_arguments, publish, recorded_waits
from benchmarks.models import Regression
from benchmarks.trainer_steps import EXPLANATION, StepTimes, fit, time_steps

GPU = True

NEVER = 10**9
"""Steps between reports: more than there are."""

WATCHED_STEP = 4

LAUNCHES_NOTE = (
    "`launches`: operators that torch dispatches in a step, except views. `launches added`: "
    "launches minus those of the bare step. `waits`: torch's warnings that the host waits for the "
    "GPU; empty if it never does."
)


class Language(Regression):
    """A GPT as the module of the benchmark."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            return self.network(batch)


class Launches(TorchDispatchMode):
    """Counts operators without views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.total += not func.is_view
        return func(*args, **(kwargs or {}))


class StepStart(L.Callback):
    """Starts counting launches and recording waits in one step. Must be the first callback."""

    def __init__(self) -> None:
        self.launches, self.waits = Launches(), list[str]()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int
    ) -> None:
        if index == WATCHED_STEP:
            self.recording = recorded_waits(str(pl_module.device), self.waits)
            self.recording.__enter__()
            self.launches.__enter__()


class StepEnd(L.Callback):
    """Stops what ``StepStart`` started. Must be the last callback."""

    def __init__(self, start: StepStart) -> None:
        self._start = start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == WATCHED_STEP:
            self._start.launches.__exit__(None, None, None)
            self._start.recording.__exit__(None, None, None)


def main() -> None:
    """Measure and publish."""
    arguments = parse_arguments(__doc__ or "")
    device = arguments.device
    size = size_for(device, "124M")
    with torch.device(device):
        network = GPT(size)
    module = Language(network, network.batch(8, device), fused=device == "cuda")
    candidates: dict[str, list[L.Callback]] = {
        "bare": [],
        "clip_grad_norm_": [],
        "AdaptiveClipping": [lo.AdaptiveClipping(every_n_steps=NEVER)],
        "NonFiniteGuard": [lo.NonFiniteGuard(every_n_steps=NEVER)],
        "GradientHealth": [lo.GradientHealth(every_n_steps=NEVER)],
        "all three": [
            lo.GradientHealth(every_n_steps=NEVER),
            lo.NonFiniteGuard(every_n_steps=NEVER),
            lo.AdaptiveClipping(every_n_steps=NEVER),
        ],
    }
    options = {"clip_grad_norm_": {"gradient_clip_val": 1.0}}
    starts = {kind: StepStart() for kind in candidates}
    for kind, callbacks in candidates.items():
        start = starts[kind]
        watched = [start, *callbacks, StepEnd(start)]
        fit(module, watched, WATCHED_STEP + 2, **options.get(kind, {}))
    rounds, steps = (1, 5) if arguments.quick else (5, 10) if device == "cuda" else (10, 20)
    bare = starts["bare"].launches.total
    notes = [*EXPLANATION, LAUNCHES_NOTE]
    title = f"Cost of gradient callbacks in a GPT ({size}, bf16 autocast, 8 samples)"

    def write(times: dict[str, StepTimes]) -> None:
        rows = [
            {
                "step": kind,
                **timed.row(times["bare"]),
                "launches": starts[kind].launches.total,
                "launches added": starts[kind].launches.total - bare,
                "waits": " ".join(starts[kind].waits),
            }
            for kind, timed in times.items()
        ]
        complete = len(times["bare"].seconds) == rounds
        publish("gpt_step", lo.Report(title, rows, notes), arguments, complete=complete)

    settings = {"rounds": rounds, "steps": steps, "options": options}
    time_steps(module, candidates, **settings, after_round=write)
    waits = {kind: start.waits for kind, start in starts.items() if start.waits}
    if waits:
        sys.exit(f"The host waits for the device: {waits}")


if __name__ == "__main__":
    main()
