"""One run under StepProfiler, from the Trainer's first action to its last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.profiling.flops import FlopCount
from lightning_opt.profiling.steps.device_clock import DeviceClock
from lightning_opt.profiling.steps.hooks import Watch
from lightning_opt.profiling.steps.step_clock import StepClock
from lightning_opt.profiling.steps.step_measures import Measures, Ranks
from lightning_opt.profiling.steps.step_phases import (
    BATCH,
    BETWEEN,
    DATA,
    EPOCH,
    FETCH,
    FORWARD_AND_LOSS,
    IGNORED,
    LOGGING,
    LOOP,
    LOSS,
    OTHER,
    PROFILER,
    SETUP,
    STEP,
    TEARDOWN,
    TRAIN_END,
    Phases,
)
from lightning_opt.profiling.steps.trace import Trace

MOST_ACTIONS = 2000
"""So many names of actions are known; a name that is new each time would fill the memory."""


class StepRun:
    """Turns Lightning's actions into phases and steps, and looks at the batches.

    Args:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        trainer: The Trainer.
        log_every_n_steps: Batches from one logging to the next; 0 for none.
        tokens: How tokens are counted, if they are.
        flops: Whether to count those of the first batch.
        trace: What records some batches, or None.
    """

    def __init__(
        self,
        stage: str,
        trainer: Any,
        *,
        log_every_n_steps: int,
        tokens: int | str | None,
        flops: bool,
        trace: Trace | None,
    ) -> None:
        self.trainer = trainer
        root = trainer.strategy.root_device
        device = DeviceClock(root) if root.type == "cuda" else None
        self.clock = StepClock(Phases(), SETUP, device)
        self.measures = Measures(stage, self.clock, world_size=trainer.world_size)
        self._every, self._tokens, self._flops = log_every_n_steps, tokens, flops
        self._trace = trace
        self._thread = threading.get_ident()
        self._phase_of: dict[str, int] = {}
        self._watch: Watch | None = None
        self._counter: FlopCount | None = None
        self._trained = False
        self._epoch_depth = 0

    # --- actions --------------------------------------------------------------------------------

    def start(self, action: str) -> None:
        """Begin an action."""
        phase = self._phase_of.get(action)
        if phase is None:
            phase = self._resolve(action)
        if phase >= 0:
            self.clock.enter(phase, action)
        elif phase != IGNORED:
            self._begin(phase, action)

    def stop(self, action: str) -> None:
        """End an action."""
        phase = self._phase_of.get(action)
        if phase is None or phase == IGNORED:
            return
        if phase >= 0:
            self.clock.leave(action)
        else:
            self._end(phase, action)

    def _resolve(self, action: str) -> int:
        if len(self._phase_of) >= MOST_ACTIONS:
            return IGNORED
        phase = self._phase_of[action] = self.clock.phases.of(action, self.trainer)
        if phase == DATA and self.clock.depth == 0:  # the first batch of an evaluation
            self.clock.rest(LOOP)
        return phase

    def _begin(self, phase: int, action: str) -> None:
        clock, watch = self.clock, self._watch
        if phase == STEP:
            if watch is not None:
                watch.begin_step()
            separate = watch is not None and watch.separate
            clock.enter(LOSS if separate else FORWARD_AND_LOSS, action)
        elif phase == FETCH:
            if self._trained and clock.depth == self._epoch_depth:
                self._end_step()
            clock.enter(DATA, action)
        elif phase == BATCH:
            if self._trained:  # batches are fetched within `training_step`
                self._end_step()
            self._begin_batch(action)
        elif phase == EPOCH:
            clock.end_step(trained=False)
            if clock.depth == 0:
                clock.rest(BETWEEN)
            clock.enter(LOOP, action)
            self._epoch_depth = clock.depth
            self._watch = Watch(clock, self.trainer, self._tokens)

    def _end(self, phase: int, action: str) -> None:
        if phase == BATCH:
            self._end_counting()
        elif phase == EPOCH:
            self.end_epoch()
        self.clock.leave(action)
        if phase == TRAIN_END:
            self._end_training()

    # --- a batch --------------------------------------------------------------------------------

    def _begin_batch(self, action: str) -> None:
        measures, self._trained = self.measures, True
        if self._trace is not None and measures.batches == self._trace.first:
            self._count_for(PROFILER, self._trace.start)
        measures.batches += 1
        counting = self._flops and measures.batches == 1
        # Under a counter torch would leave the first call uncompiled, and then all others too.
        if counting and has_compiled_parts(self.trainer.lightning_module):
            measures.notes.append("FLOPs were not counted: the model is compiled.")
            counting = False
        self.clock.enter(PROFILER if counting else LOOP, action)
        if counting:
            self._counter = FlopCount()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def _end_counting(self) -> None:
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        measures = self.measures
        measures.flops = counter.flops
        if self._watch is not None:
            measures.flops_samples = self._watch.tokens or self._watch.samples
        for operator, why in counter.failures.items():
            measures.notes.append(f"The FLOPs of {operator} could not be counted ({why}).")

    def _end_step(self) -> None:
        clock, measures, watch = self.clock, self.measures, self._watch
        self._trained = False
        if watch is not None and watch.separate:
            if not watch.seen:
                clock.move(LOSS, FORWARD_AND_LOSS)
            watch.seen = False
        if self._trace is not None and measures.batches - 1 == self._trace.last:
            self._count_for(PROFILER, self._trace.stop)
        samples, tokens = (0, 0) if watch is None else (watch.samples, watch.tokens)
        if clock.end_step(True, samples, tokens) >= self._every > 0:
            self._log()

    def _count_for(self, phase: int, function: Callable[..., Any], *args: Any) -> None:
        """Do something that takes time, and count it for a phase."""
        self.clock.enter(phase, self)
        try:
            function(*args)
        finally:
            self.clock.leave(self)

    # --- the end of epochs and of the run -------------------------------------------------------

    def end_epoch(self) -> None:
        """Take everything off the model, the Trainer and the process; also after an exception."""
        self._end_counting()
        try:
            if self._trace is not None and self._trace.running:
                self._count_for(PROFILER, self._trace.stop)
        finally:
            if self._watch is not None:
                self._watch.detach()
        if self._trained:
            self._end_step()
        self._watch = None

    def _end_training(self) -> None:
        trainer, measures = self.trainer, self.measures
        if self.clock.depth == 0:
            self.clock.rest(TEARDOWN)
        measures.optimizer_steps = trainer.global_step
        self._compare_ranks()
        self._log()

    def _compare_ranks(self) -> None:
        if self.measures.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        busy = self.clock.busy / max(1, self.clock.work.steps.count)
        device = self.trainer.strategy.root_device
        own = torch.tensor([busy], dtype=torch.float64, device=device)
        everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        # Waits for the device, once, when training has ended.
        self.measures.ranks = Ranks(torch.cat(everyone).tolist())

    def _log(self) -> None:
        seconds, work = self.clock.end_window()
        steps, names = work.steps.count, self.clock.phases.names
        if not self._every or not steps:
            return
        scalars = {
            f"time/{names[phase].replace(' ', '_').replace(chr(39), '')}_ms": 1e3 * total / steps
            for phase, total in seconds.items()
        }
        scalars["time/step_ms"] = 1e3 * work.steps.mean
        rates = self.measures.rates_of(work)
        scalars |= {f"time/{key}": value for key, value in rates.items()}
        self._count_for(LOGGING, log_scalars, self.trainer, scalars)

    def finish(self) -> Measures:
        """End the run and return what it came to. This waits for the device."""
        clock, measures = self.clock, self.measures
        clock.end_step(trained=False)
        measures.wall = clock.elapsed
        self.end_epoch()
        self.trainer = None
        if clock.device is not None:
            clock.device.finish()
        return measures

    @contextmanager
    def region(self, name: str, size: float | None) -> Iterator[None]:
        """Measure a user's region; see ``StepProfiler.region``."""
        if threading.get_ident() != self._thread:
            yield
            return
        clock, key, name = self.clock, object(), f"region {name}"
        phase = clock.phases.number(name, on_device=True)
        clock.enter(phase, key)
        try:
            yield
        finally:
            clock.leave(key)
            if size and phase != OTHER:  # which it is if there are too many names
                moved = self.measures.bytes
                moved[name] = moved.get(name, 0.0) + size
