"""Measures one run for StepProfiler: the phases of Lightning's actions, and hooks on the model."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_opt.core.modules.batches import samples_in, tokens_in
from lightning_opt.core.modules.compiling import has_compiled_parts, hooks_are_compiled
from lightning_opt.core.modules.patching import replaced, takes_hooks
from lightning_opt.core.modules.sharding import gather_objects
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.profiling.flops import FlopCount
from lightning_opt.profiling.steps import phase_clock as phases
from lightning_opt.profiling.steps.phase_clock import PhaseClock

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_opt.profiling.steps.step_profiler import Measures, StepProfiler

KEY = "lightning_opt/step_profiler/{}"
"""Key in the process group's store. It is set if the rank has a profiler."""


class StepRun:
    """Measures one run: maps each action that Lightning reports to a phase, and finds the steps.

    Args:
        trainer: The Trainer.
        measures: The measurements to fill.
        settings: The ``StepProfiler``. Its attributes are the settings.
    """

    def __init__(self, trainer: Any, measures: Measures, settings: StepProfiler) -> None:
        self.trainer, self.measures, self.clock = trainer, measures, measures.clock
        self._settings = settings
        self._thread = threading.get_ident()
        self._phase_of: dict[str, int] = {}
        self._hooks: EpochHooks | None = None
        self._flop_count: FlopCount | None = None
        self._step_open = False
        self._epoch_depth = 0
        self._store: Any = None
        if measures.stage == "fit" and measures.world_size > 1 and dist.is_initialized():
            # A collective would wait for ranks without a profiler. Setting a key does not wait.
            self._store = dist.distributed_c10d._get_default_store()
            self._store.set(KEY.format(dist.get_rank()), "")

    # --- actions --------------------------------------------------------------------------------

    def start(self, action: str) -> None:
        phase = self._phase_of.get(action)
        if phase is None:
            phase = self._resolve(action)
        if phase >= 0:
            self.clock.enter(phase, action)
        elif phase != phases.IGNORED:
            self._start_loop_action(phase, action)

    def stop(self, action: str) -> None:
        phase = self._phase_of.get(action, phases.OTHER)
        if phase == phases.IGNORED:
            return
        if phase >= 0:
            self.clock.leave(action)
        else:
            self._stop_loop_action(phase, action)

    def _resolve(self, action: str) -> int:
        phase = self.clock.phases.of(action, self.trainer)
        if phase != phases.OTHER:  # such names may never repeat, and would fill the cache
            self._phase_of[action] = phase
        # An evaluation's setup ends when it fetches its first batch.
        if phase == phases.DATA and self.clock.depth == 0:
            self.clock.set_default_phase(phases.LOOP)
        return phase

    def _start_loop_action(self, phase: int, action: str) -> None:
        clock, hooks = self.clock, self._hooks
        if phase == phases.STEP:
            self._count_forward(True)
            separate = hooks is not None and hooks.separates_forward
            clock.enter(phases.LOSS if separate else phases.FORWARD_AND_LOSS, action)
        elif phase == phases.FETCH:
            if self._step_open and clock.depth == self._epoch_depth:
                self._end_step()
            clock.enter(phases.DATA, action)
        elif phase == phases.BATCH:
            if self._step_open:  # no fetch has ended it: `training_step` fetches batches itself
                self._end_step()
            self._start_batch(action)
        elif phase == phases.EPOCH:
            clock.end_step(trained=False)
            if clock.depth == 0:
                clock.set_default_phase(phases.BETWEEN)
            clock.enter(phases.LOOP, action)
            self._epoch_depth = clock.depth
            self._hooks = EpochHooks(clock, self.trainer, self._settings.tokens)

    def _stop_loop_action(self, phase: int, action: str) -> None:
        if phase == phases.STEP:
            self._count_forward(False)
        elif phase == phases.BATCH:
            self._stop_counting()
        elif phase == phases.EPOCH:
            self.end_epoch()
        self.clock.leave(action)
        if phase == phases.TRAIN_END:
            self._end_training()

    # --- a batch --------------------------------------------------------------------------------

    def _start_batch(self, action: str) -> None:
        measures, self._step_open = self.measures, True
        measures.batches += 1
        counting = self._settings.flops and measures.batches == 1
        # If a compiled model first runs under a FLOP counter, torch never compiles it.
        if counting and has_compiled_parts(self.trainer.lightning_module):
            measures.notes.append("FLOPs were not counted: the model is compiled.")
            counting = False
        self.clock.enter(phases.PROFILER if counting else phases.LOOP, action)
        if counting:
            self._flop_count = FlopCount()
            self._count_forward(False)
            self._flop_count.__enter__()  # type: ignore[no-untyped-call]

    def _count_forward(self, counted: bool) -> None:
        """Count forward operators only in ``training_step``, not in the optimizer's update."""
        if self._flop_count is not None:
            self._flop_count.counts_forward = counted

    def _stop_counting(self) -> None:
        counter, self._flop_count = self._flop_count, None
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
        clock, hooks = self.clock, self._hooks
        self._step_open = False
        samples, tokens = (0, 0) if hooks is None else (hooks.samples, hooks.tokens)
        if clock.end_step(True, samples, tokens) >= self._settings.log_every_n_steps > 0:
            self._log()

    # --- the end of epochs and of the run -------------------------------------------------------

    def end_epoch(self) -> None:
        """End the open step, and remove the FLOP counter and all hooks; after an exception too."""
        self._stop_counting()
        if self._store is not None and sys.exc_info()[0] is not None:
            self._store.delete_key(KEY.format(dist.get_rank()))
        if self._hooks is not None:
            self._hooks.remove()
        if self._step_open:
            self._end_step()
        self._hooks = None

    def _end_training(self) -> None:
        if self.clock.depth == 0:
            self.clock.set_default_phase(phases.TEARDOWN)
        if self._store is not None:
            busy = self.clock.busy / max(1, self.clock.work.steps.count)
            if self._store.check([KEY.format(rank) for rank in range(dist.get_world_size())]):
                self.measures.ranks = gather_objects(busy, (dist.group.WORLD,))
            self._store.delete_key(KEY.format(dist.get_rank()))
        self._log()

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
        phase = self.clock.phases.number(name)
        try:
            with self.clock.within(phase):
                yield
        finally:
            if bytes_moved and phase != phases.OTHER:  # OTHER: there are too many phases
                totals = self.measures.bytes
                totals[name] = totals.get(name, 0.0) + bytes_moved


# --- hooks ---------------------------------------------------------------------------------------


class EpochHooks:
    """Hooks on the model and the Trainer's parts during one epoch.

    They last one epoch, because after an exception Lightning reports only the end of the epoch to
    profilers.

    Args:
        clock: The clock to control.
        trainer: The Trainer.
        tokens: Tokens per sample, or the batch's key of the token tensor. None: do not count.

    Attributes:
        samples: Number of samples in the last training batch that was moved to the device.
        tokens: Number of tokens in that batch.
        separates_forward: Whether the forward pass is timed separately from the other parts of
            ``training_step``.
    """

    def __init__(self, clock: PhaseClock, trainer: pl.Trainer, tokens: int | str | None) -> None:
        self.clock, self._trainer, self._tokens = clock, trainer, tokens
        self._module = trainer.lightning_module
        # The LightningModule and its direct child modules, except losses and metrics.
        modules = [self._module, *_children(self._module)]
        self.separates_forward = not any(map(hooks_are_compiled, modules))
        self.samples = self.tokens = 0
        with ExitStack() as stack:
            self._attach(stack, modules if self.separates_forward else [])
            self.remove = stack.pop_all().close
            """Remove all hooks."""

    def _attach(self, stack: ExitStack, modules: list[nn.Module]) -> None:
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop

        def wrap(owner: Any, name: str, around: Callable[..., Any], *first: Any) -> None:
            inner = getattr(owner, name, None)
            if inner is not None:  # not all versions of Lightning have it
                wrapped = functools.wraps(inner)(functools.partial(around, *first, inner))
                stack.enter_context(replaced(owner, **{name: wrapped}))

        wrap(loop, "on_run_start", self._timed, phases.DATA)  # starts the workers of the loader
        wrap(loop.val_loop, "run", self._timed, phases.VALIDATION)
        for logger in trainer.loggers:
            wrap(logger, "log_metrics", self._timed, phases.LOGGING)
        if trainer.world_size > 1:
            wrap(loop, "_broadcast_sigterm_tensor", self._timed, phases.RANKS)
        wrap(trainer.strategy, "batch_to_device", self._batch_to_device)
        wrap(trainer.precision_plugin, "backward", self._backward)
        enter, leave = _Hook(self._enter_forward), _Hook(self._leave_forward)
        for module in filter(takes_hooks, modules):
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)

    def _timed(self, phase: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.clock.within(phase):
            return inner(*args, **kwargs)

    def _batch_to_device(
        self, inner: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._trainer.training:
            self.samples = samples_in(batch, default=1)
            if self._tokens is not None:
                self.tokens = tokens_in(batch, self._tokens, "StepProfiler")
        return inner(batch, *args, **kwargs)

    # --- forward and loss -----------------------------------------------------------------------

    def _enter_forward(self, module: nn.Module, *_: Any) -> None:
        if self.clock.phase == phases.LOSS:
            if module is self._module and _calls_training_step(module):
                return
            self.clock.enter(phases.FORWARD, module)

    def _leave_forward(self, module: nn.Module, *_: Any) -> None:
        self.clock.leave(module)  # no effect if the module has not entered a phase

    # --- backward and the wait for gradients ----------------------------------------------------

    def _backward(
        self, inner: Callable[..., Any], loss: Any, model: Any, optimizer: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        with self.clock.within(phases.BACKWARD), ExitStack() as stack:
            if self._reduces_gradients() and isinstance(loss, Tensor) and loss.requires_grad:
                stack.callback(loss.register_hook(self._queue_enter_communication).remove)
            return inner(loss, model, optimizer, *args, **kwargs)

    def _reduces_gradients(self) -> bool:
        model = self._trainer.strategy.model
        return self._trainer.world_size > 1 and getattr(model, "require_backward_grad_sync", True)

    def _queue_enter_communication(self, gradient: Tensor) -> None:
        # Autograd runs queued callbacks in order after the backward pass. DDP and FSDP queue their
        # waits for communication later, so this callback runs before them.
        enter = functools.partial(self.clock.enter, phases.COMMUNICATION, self)
        torch.autograd.Variable._execution_engine.queue_callback(enter)


class _Hook:
    """A module hook whose copies do nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:  # for copy.deepcopy too
        return _Hook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if getattr(type(child), "forward", None) is nn.Module.forward:  # a list or a dict
            yield from _children(child)
        elif not _is_loss_or_metric(name, child):
            yield child


def _is_loss_or_metric(name: str, module: nn.Module) -> bool:
    if any(base.__module__.startswith("torchmetrics") for base in type(module).__mro__):
        return True
    words = f"{name} {type(module).__name__}".lower()
    return "loss" in words or "criterion" in words


def _calls_training_step(module: nn.Module) -> bool:
    """Return whether ``forward`` is redirected to ``training_step``, as DDP and others do."""
    name = getattr(module.forward, "__qualname__", "")
    return name.startswith("_ForwardRedirection.")
