"""The callback and context manager that profiles memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.measure.memory import MB, live_bytes, live_source, resident_memory
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.modules.patching import Patches
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.memory.profiler.out_of_memory import write_out_of_memory_report
from lightning_opt.memory.profiler.profile import (
    MemoryCategories,
    MemoryProfile,
    PhaseMeter,
    Record,
    SavedTensorCounter,
)
from lightning_opt.trainer.run_callback import RunCallback, has_step_hooks

if TYPE_CHECKING:
    import lightning.pytorch as pl


class MemoryProfiler(RunCallback):
    """Measures memory in some of the steps, and records the live tensors if memory runs out.

    As a callback, it profiles every ``every_n_steps``-th batch and the first batch of each
    validation: live memory between the phases of the step, its categories, and the peak of each
    phase. In your own loop, use it as a context manager, with :meth:`record` and :meth:`phase`. If
    memory runs out, ``out_of_memory.txt`` and ``.json`` name the largest live tensors before the
    error propagates; on CUDA there is also a snapshot for https://pytorch.org/memory_viz.

    Logged at each profiled step:

    ============================= ============================================================
    ``profile/peak_forward_mb``   peak of the forward pass, in MB of live memory
    ``profile/peak_backward_mb``  peak of the backward pass
    ``profile/peak_optimizer_mb`` peak of the update
    ``profile/live_mb``           live memory after the step
    ``profile/<category>_mb``     live memory by category at its largest reading between phases:
                                  parameters, gradients, optimizer, activations, other
    ``profile/resident_mb``       physical memory of the process
    ``profile/gc_pause_ms``       time of all garbage collections so far
    ``profile/reserved_mb``       on CUDA: memory that the allocator holds
    ``profile/fragmentation``     on CUDA: share of the reserved memory that no tensor uses
    ``profile/alloc_retries``     on CUDA: number of times the allocator emptied its cache
    ============================= ============================================================

    Args:
        every_n_steps: Batches from one profiled step to the next, at least 1.
        modules: Also count, in the first profiled step, the tensors that autograd saves in each
            module.

    Raises:
        ValueError: In ``__init__`` if ``every_n_steps`` is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> with lo.MemoryProfiler() as profiler:
        ...     _ = profiler.record("before")
        ...     kept = torch.zeros(10_000_000)
        ...     _ = profiler.record("after")
        >>> round(profiler.delta("before", "after") / 1e6)
        40

    References:
        PyTorch documentation, *Understanding CUDA Memory Usage*.
    """

    not_pickled = ("_meter", "_saved", "_categories")

    def __init__(self, every_n_steps: int = 50, modules: bool = False) -> None:
        self._schedule = Schedule(every_n_steps)
        self.modules = modules
        self._run_stack, self._step_stack = Patches(), Patches()
        self._reset(torch.device("cpu"))

    def _reset(self, device: torch.device) -> None:
        self.profile = MemoryProfile()
        self._device = device
        self._steps = 0
        self._phase = "start"
        self._stop()

    def _stop(self) -> None:
        self._end_step()
        self._run_stack.close()

    def _end_step(self) -> None:
        self._step_stack.close()
        self._meter: PhaseMeter | None = None
        self._saved: SavedTensorCounter | None = None
        self._categories: MemoryCategories | None = None
        self._peaks: dict[str, int] = {}

    # --- as a context manager -------------------------------------------------------------------

    def __enter__(self) -> MemoryProfiler:
        """Start profiling, on the current CUDA device if CUDA is in use, else on the CPU."""
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._start(torch.device(f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu"))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and is_out_of_memory(error):
            write_out_of_memory_report(error, None, (), self._device, self._phase, Path.cwd())
        self._stop()

    def record(self, name: str) -> Record:
        """Record live memory under a name; within a profiled step also its categories."""
        live = live_bytes(self._device)
        parts = None if self._categories is None else self._categories.divide(live)
        record = Record(name, self._steps, live, resident_memory(), parts)
        self.profile.records.append(record)
        return record

    def delta(self, first: str, second: str) -> int:
        """Return the growth of live memory in bytes between the newest records of two names.

        Raises:
            KeyError: If there is no such record.
        """
        return self.profile.latest(second).live - self.profile.latest(first).live

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak of the enclosed code as a phase called ``name``."""
        meter = PhaseMeter(self._device)
        self._phase = name
        try:
            yield
            self.profile.peaks[name].append(meter.mark())
        finally:
            meter.stop()

    # --- as a callback --------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset all data and start profiling."""
        self._start(trainer.strategy.root_device)

    def _start(self, device: torch.device) -> None:
        self._reset(device)
        self.profile.source = live_source(device)
        gc.callbacks.append(self.profile.pauses.record)
        self._run_stack.callback(gc.callbacks.remove, self.profile.pauses.record)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start a profiled step, if one is due."""
        self._steps += 1
        self._phase = "forward"
        if not self._schedule.is_due(self._steps):
            return
        self._end_step()
        self._categories = MemoryCategories(pl_module, trainer.optimizers, self._device)
        if self.modules and not self.profile.modules:
            self._saved = SavedTensorCounter(pl_module)
            self._saved.start(until=self._step_stack)
        for optimizer in trainer.optimizers:
            if has_step_hooks(optimizer):
                # With manual optimization, another forward pass may follow the step.
                hook = optimizer.register_step_post_hook(lambda *_: self._enter("forward", None))
                self._step_stack.callback(hook.remove)
        self.record("step_start")
        self._start_meter(pl_module, self._categories.replaceable())

    def _start_meter(self, pl_module: pl.LightningModule, held: Iterable[Tensor] = ()) -> None:
        self._meter = PhaseMeter(self._device, pl_module, held)
        self._step_stack.callback(self._meter.stop)
        self.profile.exact = self._meter.exact

    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Record the end of the forward pass, before old gradients are freed."""
        self._enter("forward", "after_forward")

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        """Record the start of the backward pass."""
        self._enter("backward", "before_backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the end of the backward pass."""
        self._enter("forward", "after_backward")

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Record the start of an update."""
        self._enter("optimizer", "before_optimizer")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """End a profiled step, and log it."""
        if self._meter is None or self._categories is None:
            return
        self._enter("forward", "step_end")
        for phase, peak in self._peaks.items():
            self.profile.peaks[phase].append(peak)
        if self._saved is not None:
            self.profile.modules = self._saved.found()
        self._log(trainer)
        self._end_step()

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start measuring the first batch of a validation."""
        if self._is_fitting(trainer) and batch_idx == 0 and dataloader_idx == 0:
            self._phase = "validation"
            self._start_meter(pl_module)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Record the peak of the first batch."""
        if self._meter is not None and self._is_fitting(trainer):
            self.profile.peaks["validation"].append(self._meter.mark())
            self._end_step()

    def _is_fitting(self, trainer: pl.Trainer) -> bool:
        return self._steps > 0 and not trainer.sanity_checking and trainer.state.fn == "fit"

    def _enter(self, next_phase: str, record_name: str | None) -> None:
        ended, self._phase = self._phase, next_phase
        if self._meter is None:
            return
        self._peaks[ended] = max(self._peaks.get(ended, 0), self._meter.mark())
        if record_name is not None:
            self.record(record_name)

    def _log(self, trainer: pl.Trainer) -> None:
        last = self.profile.records[-1]
        values = {f"peak_{phase}_mb": peak / MB for phase, peak in self._peaks.items()}
        values["live_mb"], values["resident_mb"] = last.live / MB, last.resident / MB
        records = (r for r in self.profile.records if r.step == last.step and r.parts is not None)
        largest = max(records, key=lambda record: record.live)
        values |= {f"{name}_mb": part / MB for name, part in (largest.parts or {}).items()}
        values["gc_pause_ms"] = 1e3 * self.profile.pauses.total
        if self._device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self._device)
            values["reserved_mb"] = reserved / MB
            values["fragmentation"] = 1 - last.live / max(1, reserved)
            stats = torch.cuda.memory_stats(self._device)
            values["alloc_retries"] = float(stats.get("num_alloc_retries", 0))
        log_scalars(trainer, {f"profile/{key}": value for key, value in values.items()})

    # --- results --------------------------------------------------------------------------------

    @property
    def peaks(self) -> dict[str, int]:
        """The largest peak of each phase, in bytes."""
        return {phase: max(peaks) for phase, peaks in self.profile.peaks.items()}

    def diagnose(self) -> list[Verdict]:
        """Return a verdict that names the phase with the highest peak."""
        if not self.peaks:
            finding = "MemoryProfiler has not profiled a step yet."
            return [Verdict("memory", "unknown", finding, "Train longer, or profile more often.")]
        phase, peak = max(self.peaks.items(), key=lambda item: item[1])
        return [Verdict("memory", "ok", f"The peak is {peak / MB:.4g} MB, in the phase {phase!r}.")]

    def report(self) -> Report:
        """Return one row per phase: its peak, and memory at its end by category."""
        return self.profile.phase_table()

    def module_report(self, top: int | None = 20) -> Report:
        """Return one row per module with the tensors that autograd saved, the largest first."""
        return self.profile.module_table(top)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Report the live tensors if memory has run out, and stop profiling."""
        self._stop()
        if is_out_of_memory(exception):
            # Not `trainer.log_dir`: it broadcasts, and other ranks may not take part.
            folder = getattr(trainer.logger, "log_dir", None) or trainer.default_root_dir
            write_out_of_memory_report(
                exception, pl_module, trainer.optimizers, self._device, self._phase, Path(folder)
            )

    def release(self, trainer: pl.Trainer) -> None:
        """Stop profiling."""
        self._stop()
