"""One run under StepProfiler, from the Trainer's first action to its last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.profiling.flops import FlopCount
from lightning_opt.profiling.steps import step_phases as phases
from lightning_opt.profiling.steps.hooks import EpochHooks
from lightning_opt.profiling.steps.phase_clock import DeviceClock, PhaseClock
from lightning_opt.profiling.steps.step_measures import Measures, Ranks

MAX_ACTIONS = 2000
"""Maximum number of action names kept. Without a limit, ever-changing names would fill memory."""


class Trace:
    """Records batches ``first`` to ``last`` with `torch.profiler`, for Perfetto or TensorBoard."""

    def __init__(self, first: int, last: int, folder: Path) -> None:
        self.first, self.last = first, last
        self._path = folder / f"trace_{first}_{last}.json"
        self._profile: Any = None

    @property
    def running(self) -> bool:
        return self._profile is not None

    def start(self) -> None:
        self._profile = torch.profiler.profile()
        self._profile.start()

    def stop(self) -> None:
        """Stop recording and write the file. Does nothing if no recording is active."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))


class StepRun:
    """Measures one run: maps each action that Lightning reports to a phase, and finds the steps.

    Args:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        trainer: The Trainer.
        settings: The ``StepProfiler``. Its attributes are the settings.
        trace: Records some batches with ``torch.profiler``.
    """

    def __init__(self, stage: str, trainer: Any, settings: Any, trace: Trace | None = None) -> None:
        self.trainer = trainer
        root = trainer.strategy.root_device
        device = DeviceClock(root) if root.type == "cuda" else None
        self.clock = PhaseClock(phases.Phases(), phases.SETUP, device)
        self.measures = Measures(stage, self.clock, world_size=trainer.world_size)
        self._settings, self._trace = settings, trace
        self._thread = threading.get_ident()
        self._phase_of: dict[str, int] = {}
        self._hooks: EpochHooks | None = None
        self._counter: FlopCount | None = None
        self._step_open = False
        self._epoch_depth = 0

    # --- actions --------------------------------------------------------------------------------

    def start(self, action: str) -> None:
        phase = self._phase_of.get(action)
        if phase is None:
            phase = self._resolve(action)
        if phase >= 0:
            self.clock.enter(phase, action)
        elif phase != phases.IGNORED:
            self._start_special(phase, action)

    def stop(self, action: str) -> None:
        phase = self._phase_of.get(action)
        if phase is None or phase == phases.IGNORED:
            return
        if phase >= 0:
            self.clock.leave(action)
        else:
            self._stop_special(phase, action)

    def _resolve(self, action: str) -> int:
        if len(self._phase_of) >= MAX_ACTIONS:
            return phases.IGNORED
        phase = self._phase_of[action] = self.clock.phases.of(action, self.trainer)
        # Setup ends when an evaluation fetches its first batch.
        if phase == phases.DATA and self.clock.depth == 0:
            self.clock.set_default_phase(phases.LOOP)
        return phase

    def _start_special(self, phase: int, action: str) -> None:
        clock, hooks = self.clock, self._hooks
        if phase == phases.STEP:
            if hooks is not None:
                hooks.start_training_step()
            separate = hooks is not None and hooks.separates_forward
            clock.enter(phases.LOSS if separate else phases.FORWARD_AND_LOSS, action)
        elif phase == phases.FETCH:
            if self._step_open and clock.depth == self._epoch_depth:
                self._end_step()
            clock.enter(phases.DATA, action)
        elif phase == phases.BATCH:
            if self._step_open:  # no fetch ended it: `training_step` fetches the batches itself
                self._end_step()
            self._start_batch(action)
        elif phase == phases.EPOCH:
            clock.end_step(trained=False)
            if clock.depth == 0:
                clock.set_default_phase(phases.BETWEEN)
            clock.enter(phases.LOOP, action)
            self._epoch_depth = clock.depth
            self._hooks = EpochHooks(clock, self.trainer, self._settings.tokens)

    def _stop_special(self, phase: int, action: str) -> None:
        if phase == phases.BATCH:
            self._stop_counting()
        elif phase == phases.EPOCH:
            self.end_epoch()
        self.clock.leave(action)
        if phase == phases.TRAIN_END:
            self._end_training()

    # --- a batch --------------------------------------------------------------------------------

    def _start_batch(self, action: str) -> None:
        measures, self._step_open = self.measures, True
        if self._trace is not None and measures.batches == self._trace.first:
            with self.clock.within(phases.PROFILER):
                self._trace.start()
        measures.batches += 1
        counting = self._settings.flops and measures.batches == 1
        # If a compiled model first runs under a FLOP counter, torch never compiles it.
        if counting and has_compiled_parts(self.trainer.lightning_module):
            measures.notes.append("FLOPs were not counted: the model is compiled.")
            counting = False
        self.clock.enter(phases.PROFILER if counting else phases.LOOP, action)
        if counting:
            self._counter = FlopCount()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def _stop_counting(self) -> None:
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        measures = self.measures
        measures.flops = counter.flops
        if self._hooks is not None:
            measures.flops_units = self._hooks.tokens or self._hooks.samples
        for operator, reason in counter.failures.items():
            measures.notes.append(f"The FLOPs of {operator} could not be counted ({reason}).")

    def _end_step(self) -> None:
        clock, measures, hooks = self.clock, self.measures, self._hooks
        self._step_open = False
        if hooks is not None and hooks.separates_forward:
            if not hooks.saw_forward:
                clock.move(phases.LOSS, phases.FORWARD_AND_LOSS)
            hooks.saw_forward = False
        if self._trace is not None and measures.batches - 1 == self._trace.last:
            with clock.within(phases.PROFILER):
                self._trace.stop()
        samples, tokens = (0, 0) if hooks is None else (hooks.samples, hooks.tokens)
        if clock.end_step(True, samples, tokens) >= self._settings.log_every_n_steps > 0:
            self._log()

    # --- the end of epochs and of the run -------------------------------------------------------

    def end_epoch(self) -> None:
        """End the open step, and remove all hooks, the FLOP counter and the trace.

        This also runs after an exception.
        """
        self._stop_counting()
        try:
            if self._trace is not None and self._trace.running:
                with self.clock.within(phases.PROFILER):
                    self._trace.stop()
        finally:
            if self._hooks is not None:
                self._hooks.remove()
        if self._step_open:
            self._end_step()
        self._hooks = None

    def _end_training(self) -> None:
        trainer, measures = self.trainer, self.measures
        if self.clock.depth == 0:
            self.clock.set_default_phase(phases.TEARDOWN)
        measures.optimizer_steps = trainer.global_step
        self._compare_ranks()
        self._log()

    def _compare_ranks(self) -> None:
        if self.measures.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        busy = self.clock.busy / max(1, self.clock.work.steps.count)
        device = self.trainer.strategy.root_device
        own = torch.tensor([busy], dtype=torch.float64, device=device)
        gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        # `tolist` waits for the device, once per fit.
        self.measures.ranks = Ranks(torch.cat(gathered).tolist())

    def _log(self) -> None:
        seconds, window_totals = self.clock.end_window()
        steps, names = window_totals.steps.count, self.clock.phases.names
        if not self._settings.log_every_n_steps or not steps:
            return
        scalars = {
            f"time/{names[phase].replace(' ', '_').replace(chr(39), '')}_ms": 1e3 * total / steps
            for phase, total in seconds.items()
        }
        scalars["time/step_ms"] = 1e3 * window_totals.steps.mean
        rates = self.measures.rates_of(window_totals)
        scalars |= {f"time/{key}": value for key, value in rates.items()}
        with self.clock.within(phases.LOGGING):
            log_scalars(self.trainer, scalars)

    def finish(self) -> Measures:
        """End the run, wait for the device, and return the measurements."""
        clock, measures = self.clock, self.measures
        clock.end_step(trained=False)
        measures.wall = clock.elapsed
        self.end_epoch()
        self.trainer = None
        if clock.device is not None:
            clock.device.finish()
        return measures

    @contextmanager
    def region(self, name: str, bytes_moved: float | None) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        name = f"region {name}"
        phase = self.clock.phases.number(name, on_device=True)
        try:
            with self.clock.within(phase):
                yield
        finally:
            if bytes_moved and phase != phases.OTHER:  # OTHER: there are too many phases
                totals = self.measures.bytes
                totals[name] = totals.get(name, 0.0) + bytes_moved
