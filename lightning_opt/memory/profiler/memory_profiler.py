"""Where the memory of a run goes: records, peaks by phase, and what was alive at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.measure.memory import MB, live_bytes, live_source, resident_memory
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.output.loggers import log_scalars, save_at_end
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.memory.profiler.gc_pauses import timing_collections
from lightning_opt.memory.profiler.out_of_memory import perform_autopsy
from lightning_opt.memory.profiler.phase_peaks import Holdings, PhaseMeter
from lightning_opt.memory.profiler.plot import draw_profile
from lightning_opt.memory.profiler.record import MemoryProfile, Record
from lightning_opt.memory.profiler.saved_by_module import SavedWatch
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from matplotlib.figure import Figure

FIGURE, DATA = "memory_profile.png", "memory_profile.json"


class MemoryProfiler(RunCallback):
    """Measures where memory goes on some of the steps, and records what was alive if it runs out.

    As a callback, it profiles every ``every_n_steps``-th batch and the first batch of each
    validation: live memory at the turning points of the step, what uses it, and the peak of each
    phase. In your own loop, use it as a context manager, with :meth:`record` and :meth:`phase`. If
    memory runs out, ``out_of_memory.txt`` and ``.json`` name the largest live tensors before the
    error propagates; on CUDA there is also a snapshot for https://pytorch.org/memory_viz.

    Logged at each profiled step:

    ============================= ============================================================
    ``profile/peak_forward_mb``   peak of the forward pass, in MB of live memory
    ``profile/peak_backward_mb``  of the backward pass
    ``profile/peak_optimizer_mb`` of the update
    ``profile/live_mb``           live memory after the step
    ``profile/resident_mb``       physical memory of the process
    ``profile/gc_pause_ms``       time of all garbage collections so far
    ``profile/reserved_mb``       on CUDA: what the allocator holds
    ``profile/fragmentation``     on CUDA: share of that which no tensor uses
    ``profile/alloc_retries``     on CUDA: how often the allocator had to empty its cache
    ============================= ============================================================

    Args:
        every_n_steps: Batches from one profiled step to the next, at least 1.
        modules: Also count, in the first profiled step, what autograd saves in each module.
        figure: Where the timeline goes at the end: True for ``memory_profile.png`` in the logger's
            directory, a path, or None or False for nowhere.
        file: Where the JSON goes: True for ``memory_profile.json``, a path, or None or False.
        history: On CUDA, have the allocator remember who allocated what, so that the snapshot shows
            it. Costs some microseconds an allocation.

    Raises:
        ValueError: In ``__init__`` for a period that is not a whole number of at least 1.

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

    def __init__(
        self,
        every_n_steps: int = 50,
        modules: bool = False,
        figure: bool | str | None = True,
        file: bool | str | None = True,
        history: bool = False,
    ) -> None:
        self._schedule = Schedule(every_n_steps)
        self.modules, self.history = modules, history
        self._figure, self._file = figure, file
        self._watch, self._step = ExitStack(), ExitStack()
        self._begin(torch.device("cpu"))

    def _begin(self, device: torch.device) -> None:
        self.profile = MemoryProfile()
        self._device = device
        self._started = perf_counter()
        self._steps = 0
        self._phase = "start"
        self._stop()

    def _stop(self) -> None:
        """Undo what is on the model, in the process and in the allocator."""
        self._end_step()
        self._watch.close()

    def _end_step(self) -> None:
        self._step.close()
        self._meter: PhaseMeter | None = None
        self._saved: SavedWatch | None = None
        self._holdings: Holdings | None = None
        self._peaks: dict[str, int] = {}

    # --- for a loop of one's own ----------------------------------------------------------------

    def __enter__(self) -> MemoryProfiler:
        """Begin to profile, on the current CUDA device if CUDA is in use, else on the CPU."""
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._begin(torch.device(f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu"))
        self._start_watching()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and is_out_of_memory(error):
            perform_autopsy(error, None, (), self._device, self._phase, Path.cwd())
        self._stop()

    def record(self, name: str) -> Record:
        """Record live memory under a name. Anywhere, as often as needed, in some microseconds."""
        record = Record(
            name,
            self._steps,
            perf_counter() - self._started,
            live_bytes(self._device),
            resident_memory(),
            torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0,
        )
        self.profile.records.append(record)
        return record

    def delta(self, first: str, second: str) -> int:
        """Return by how many bytes live memory has grown between two records.

        The newest ``second`` counts, and the newest ``first`` before it.

        Raises:
            KeyError: If there is no such record.
        """
        return self.profile.delta(first, second)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak of what runs inside, and count it under a name."""
        meter = PhaseMeter(self._device)
        self._phase = name
        try:
            yield
            self.profile.add_peak(name, meter.mark(), meter.exact)
        finally:
            meter.stop()

    # --- as a callback --------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew."""
        self._begin(trainer.strategy.root_device)
        self._start_watching()

    def _start_watching(self) -> None:
        self.profile.source = live_source(self._device)
        self._watch.enter_context(timing_collections(self.profile.pauses))
        if self.history and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._watch.callback(torch.cuda.memory._record_memory_history, enabled=None)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a profiled step, if it is one."""
        self._steps += 1
        self._phase = "forward"
        if not self._schedule.is_due(self._steps):
            return
        self._end_step()
        self._holdings = Holdings(pl_module, trainer.optimizers, self._device)
        if self.modules and not self.profile.modules:
            self._saved = SavedWatch(pl_module)
            self._step.enter_context(self._saved.counting())
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                # By hand, one optimizer's step is followed by the next one's forward pass.
                hook = optimizer.register_step_post_hook(lambda *_: self._turn("forward", None))
                self._step.callback(hook.remove)
        self._note("step_start")
        self._measure(pl_module, self._holdings.tensors())

    def _measure(self, pl_module: pl.LightningModule, held: Iterable[Tensor] = ()) -> None:
        self._meter = PhaseMeter(self._device, pl_module, held)
        self._step.callback(self._meter.stop)

    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take note of the end of the forward pass, when gradients of the last step are there."""
        self._turn("forward", "after_forward")

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Take note of the beginning of the backward pass."""
        self._turn("backward", "before_backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take note of its end."""
        self._turn("forward", "after_backward")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take note of the beginning of an update."""
        self._turn("optimizer", "before_optimizer")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End a profiled step, and log it."""
        if self._meter is None or self._holdings is None:
            return
        self._turn("forward", "step_end")
        exact = self._meter.exact
        for phase, peak in self._peaks.items():
            self.profile.add_peak(phase, peak, exact)
        if self._saved is not None:
            self.profile.modules = self._saved.found()
        peaks = self._peaks
        self._end_step()
        self._log(trainer, peaks)

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Begin to measure the first batch of a validation."""
        if self._watching(trainer) and batch_idx == 0 and dataloader_idx == 0:
            self._phase = "validation"
            self._measure(pl_module)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take its peak."""
        if self._meter is not None and self._watching(trainer):
            self.profile.add_peak("validation", self._meter.mark(), self._meter.exact)
            self._end_step()

    def _watching(self, trainer: pl.Trainer) -> bool:
        return self._steps > 0 and not trainer.sanity_checking and trainer.state.fn == "fit"

    def _turn(self, following: str, name: str | None) -> None:
        """End a phase, and if its step is profiled record its end."""
        ended, self._phase = self._phase, following
        if self._meter is None:
            return
        self._peaks[ended] = max(self._peaks.get(ended, 0), self._meter.mark())
        if name is not None:
            self._note(name)

    def _note(self, name: str) -> None:
        assert self._holdings is not None
        record = self.record(name)
        self.profile.records[-1] = replace(record, parts=self._holdings.read(record.live))

    def _log(self, trainer: pl.Trainer, peaks: dict[str, int]) -> None:
        last = self.profile.records[-1]
        values = {f"peak_{phase}_mb": peak / MB for phase, peak in peaks.items()}
        values["live_mb"], values["resident_mb"] = last.live / MB, last.resident / MB
        values["gc_pause_ms"] = 1e3 * sum(self.profile.pauses)
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            reserved = max(1, last.reserved)
            self.profile.allocator = {
                "reserved_mb": last.reserved / MB,
                "fragmentation": 1 - last.live / reserved,
                "alloc_retries": float(stats.get("num_alloc_retries", 0)),
                "ooms": float(stats.get("num_ooms", 0)),
            }
            values |= {k: v for k, v in self.profile.allocator.items() if k != "ooms"}
        log_scalars(trainer, {f"profile/{key}": value for key, value in values.items()})

    # --- what comes of it -----------------------------------------------------------------------

    @property
    def peaks(self) -> dict[str, int]:
        """The largest peak of each phase, in bytes."""
        return {phase: max(peaks) for phase, peaks in self.profile.peaks.items()}

    def diagnose(self) -> list[Verdict]:
        """Return where the peak of memory was."""
        if not self.peaks:
            finding = "MemoryProfiler has not profiled a step yet."
            return [Verdict("memory", "unknown", finding, "Train longer, or profile more often.")]
        phase, peak = max(self.peaks.items(), key=lambda item: item[1])
        return [Verdict("memory", "ok", f"The peak is {peak / MB:.4g} MB, in the phase {phase!r}.")]

    def report(self) -> Report:
        """Return one row a phase: its peak, and what is held at its end."""
        return self.profile.phase_table()

    def module_report(self, top: int | None = 20) -> Report:
        """Return what autograd saved in one step, one row a module, the largest first."""
        return self.profile.module_table(top)

    def figure(self) -> Figure:
        """Return a matplotlib figure: what memory is taken by over time, and peaks by phase.

        Raises:
            ImportError: Without matplotlib, which the extra ``plots`` brings.
        """
        return draw_profile(self.profile)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the JSON and the figure."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # on all ranks: asks rank zero
        if "forward" not in self.profile.peaks:  # no profiled step
            return
        where = str(folder / FIGURE) if self._figure is True else self._figure
        save_at_end(self.figure, where, trainer, FIGURE)
        if self._file and trainer.is_global_zero:
            path = folder / DATA if self._file is True else Path(str(self._file))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.profile.to_dict(), indent=1))

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write down what was alive if memory has run out, and let go of everything."""
        self._end_step()  # the autopsy is no part of the step, but of what the allocator recorded
        if is_out_of_memory(exception):
            # Not `trainer.log_dir`, which asks rank zero: the other ranks may be anywhere.
            folder = getattr(trainer.logger, "log_dir", None) or trainer.default_root_dir
            perform_autopsy(
                exception, pl_module, trainer.optimizers, self._device, self._phase, Path(folder)
            )
        self.release(trainer)

    def release(self, trainer: pl.Trainer) -> None:
        """Let go of everything."""
        self._stop()
