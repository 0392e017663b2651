"""Step times with callbacks, in real Trainers that take turns, and the share of the hooks."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.harness import median_ratio
from benchmarks.models import Regression, quiet_trainer
from lightning_opt.core.measure.timing import StepClock, rotated

UNTIMED_STEPS = 5

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


EXPLANATION = [
    "Steps of a real Trainer, timed from the end of one step to the end of the next. `ms a step`: "
    "mean wall time within a round, median over rounds. `time / bare`: the time as a ratio to the "
    "bare step, median over rounds; a row `bare step again` shows the noise of this ratio. "
    "`time / bare, hooks only`: 1 plus the time in the callbacks' hooks as a share of the rest of "
    "the step, in CPU time on a CPU and in wall time of the host on a GPU."
]


@dataclass
class StepTimes:
    """Step times of one candidate, one element per round.

    Attributes:
        seconds: Mean wall time of a step.
        hooks: 1 plus the time in hooks relative to the rest of the same steps: CPU time on a CPU.
    """

    seconds: list[float] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)

    def row(self, bare: StepTimes) -> dict[str, float]:
        """Return the columns of a table; ``bare`` has the steps without callbacks."""
        return {
            "ms a step": round(1e3 * statistics.median(self.seconds), 3),
            "time / bare": round(median_ratio(self.seconds, bare.seconds), 3),
            "time / bare, hooks only": round(statistics.median(self.hooks), 4),
        }


class Stopwatch(L.Callback):
    """Times steps and the hooks of other callbacks. Must be the Trainer's last callback."""

    def __init__(self, device: torch.device) -> None:
        self._clock = StepClock(device)
        self._now = time.perf_counter if device.type == "cuda" else time.thread_time
        self._in_hooks = 0.0

    def watch(self, callback: L.Callback) -> None:
        """Time the overridden hooks of a callback, until :meth:`unwatch`."""
        for name in STEP_HOOKS:
            if getattr(type(callback), name) is not getattr(L.Callback, name):
                setattr(callback, name, self._timed(getattr(callback, name)))

    def unwatch(self, callback: L.Callback) -> None:
        for name in STEP_HOOKS:
            vars(callback).pop(name, None)

    def _timed(self, hook: Callable[..., object]) -> Callable[..., object]:
        @wraps(hook)
        def timed(*arguments: Any) -> object:
            start = self._now()
            result = hook(*arguments)
            self._in_hooks += self._now() - start
            return result

        return timed

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index < UNTIMED_STEPS:
            self._clock.read(wait=True)
            self._in_hooks, self._start = 0.0, self._now()
        self._clock.stop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Delete the optimizer's state, which Lightning would copy to the CPU."""
        for optimizer in trainer.optimizers:
            optimizer.state.clear()

    def times(self) -> tuple[float, float]:
        """Return the mean wall time of a step, and 1 plus the hooks' share."""
        whole = self._now() - self._start
        seconds = statistics.fmean(self._clock.read(wait=True))
        return seconds, 1 + self._in_hooks / (whole - self._in_hooks)


def fit(module: Regression, callbacks: Sequence[L.Callback], steps: int, **options: Any) -> None:
    """Train on the module's batch for some steps, in a Trainer without output."""
    device = str(module.batch.device)
    trainer = quiet_trainer(device, max_steps=steps, callbacks=[*callbacks], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader([module.batch] * steps, batch_size=None))


def time_steps(
    module: Regression,
    candidates: Mapping[str, Sequence[L.Callback]],
    *,
    rounds: int,
    steps: int,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    after_round: Callable[[dict[str, StepTimes]], object] | None = None,
) -> dict[str, StepTimes]:
    """Fit with each candidate's callbacks once a round, in an order that rotates.

    Every fit starts from the same weights: a model that has fitted its only batch computes with
    denormal numbers, at a tenth of the speed.

    Args:
        module: The model; its batch is on the device of the training.
        candidates: Callbacks by name.
        rounds: Fits of each candidate that are kept; one more is made first.
        steps: Timed steps of a fit.
        options: More arguments of the Trainer, by candidate.
        after_round: Called with the times so far after each round.
    """
    start = {name: value.clone() for name, value in module.state_dict().items()}
    times = {name: StepTimes() for name in candidates}
    for number in range(-1, rounds):
        for name in rotated(list(candidates), number):
            module.load_state_dict(start)
            stopwatch = Stopwatch(module.batch.device)
            for callback in candidates[name]:
                stopwatch.watch(callback)
            more = (options or {}).get(name, {})
            fit(module, [*candidates[name], stopwatch], steps + UNTIMED_STEPS, **more)
            for callback in candidates[name]:
                stopwatch.unwatch(callback)
            seconds, hooks = stopwatch.times()
            if number >= 0:
                times[name].seconds.append(seconds)
                times[name].hooks.append(hooks)
        if number >= 0 and after_round is not None:
            after_round(times)
    return times
