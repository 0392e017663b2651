"""The phases of a run, and clocks that assign each moment to exactly one phase."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lightning_opt.profiling.durations import Durations, Work
from lightning_opt.trainer.lightning import is_overridden

if TYPE_CHECKING:
    import lightning.pytorch as pl

NAMES = (
    "data wait", "transfer", "forward", "loss", "forward and loss", "backward",
    "gradient communication", "clipping", "optimizer step", "zeroing gradients", "LR scheduler",
    "logging", "hooks of the module", "waiting for ranks", "Lightning's loop", "validation",
    "checkpoint", "setup", "between epochs", "teardown", "profiler", "other",
)  # fmt: skip
(
    DATA, TRANSFER, FORWARD, LOSS, FORWARD_AND_LOSS, BACKWARD, COMMUNICATION, CLIPPING, OPTIMIZER,
    ZEROING, SCHEDULER, LOGGING, HOOKS, RANKS, LOOP, VALIDATION, CHECKPOINT, SETUP, BETWEEN,
    TEARDOWN, PROFILER, OTHER,
) = range(len(NAMES))  # fmt: skip

CALLBACK = "callback "
"""Prefix in the phase names of callbacks."""

IGNORED, EPOCH, BATCH, FETCH, STEP, TRAIN_END = -1, -2, -3, -4, -5, -6
"""Numbers of actions that are not phases. ``IGNORED`` actions are part of the enclosing phase."""

MAX_PHASES = 200
"""Maximum number of phases. Further callbacks, regions and actions count as ``other``."""

NOT_OF_A_STEP = frozenset((VALIDATION, CHECKPOINT, SETUP, BETWEEN, TEARDOWN, PROFILER, OTHER))
"""Phases that are not part of a training step."""

_ON_DEVICE = frozenset(
    (TRANSFER, FORWARD, LOSS, FORWARD_AND_LOSS, BACKWARD, COMMUNICATION, CLIPPING, OPTIMIZER,
     ZEROING, HOOKS, VALIDATION)
)  # fmt: skip
_PRIORITIES = {VALIDATION: 1, CHECKPOINT: 2, PROFILER: 3}
_MODULE_HOOKS = {
    "optimizer_step": OPTIMIZER,
    "optimizer_zero_grad": ZEROING,
    "configure_gradient_clipping": CLIPPING,
    "lr_scheduler_step": SCHEDULER,
    "on_before_batch_transfer": TRANSFER,
    "transfer_batch_to_device": IGNORED,  # within the strategy's `batch_to_device`
    "on_after_batch_transfer": IGNORED,
    "on_validation_model_zero_grad": VALIDATION,
    "on_validation_model_eval": VALIDATION,
    "on_validation_model_train": VALIDATION,
    "on_save_checkpoint": CHECKPOINT,
    "on_load_checkpoint": CHECKPOINT,
    "prepare_data": SETUP,
    "setup": SETUP,
    "configure_model": SETUP,
    "configure_optimizers": SETUP,
    "train_dataloader": SETUP,
    "val_dataloader": SETUP,
}
_STRATEGY_HOOKS = {"training_step": STEP, "batch_to_device": TRANSFER, "on_train_end": TRAIN_END}


class Phases:
    """All phases by number: fixed ones first, then callbacks, regions and the user's own actions.

    Attributes:
        names: The name of each phase.
    """

    def __init__(self) -> None:
        self.names = list(NAMES)
        self._numbers = {name: number for number, name in enumerate(NAMES)}

    def number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            if len(self.names) >= MAX_PHASES:
                return OTHER
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
        return found

    def of(self, action: str, trainer: pl.Trainer) -> int:
        """Return the phase of a Lightning action, or a special number such as ``EPOCH``.

        Args:
            action: Its name, such as ``"[Callback]EarlyStopping{...}.on_fit_start"``.
            trainer: The Trainer. Hooks that its modules and callbacks do not override are
                ``IGNORED``.
        """
        fixed = {
            "run_training_epoch": EPOCH,
            "run_training_batch": BATCH,
            "save_checkpoint": CHECKPOINT,
            "optimizer_step": OPTIMIZER,
        }
        if action in fixed:
            return fixed[action]
        owner, _, rest = action.partition("]")
        if not owner.startswith("[") or "." not in rest:
            return self.number(action)  # `trainer.profiler.profile("my part")`
        name, _, hook = rest.rpartition(".")
        training = trainer.state.fn == "fit"
        if owner == "[Strategy":
            if hook in ("validation_step", "test_step", "predict_step"):
                return VALIDATION if training else FORWARD
            return _STRATEGY_HOOKS.get(hook, IGNORED)  # `EpochHooks` times the backward pass
        if owner == "[Callback":
            return self._of_callback(name, hook, trainer)
        if owner in ("[LightningModule", "[LightningDataModule"):
            return _of_module(owner, hook, trainer)
        if hook == "train_dataloader_next":
            return FETCH
        if hook.endswith("_next"):
            return VALIDATION if training else DATA
        return IGNORED

    def _of_callback(self, key: str, hook: str, trainer: pl.Trainer) -> int:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        owner = next((callback for callback in callbacks if callback.state_key == key), None)
        if owner is not None and not is_overridden(hook, owner):
            return IGNORED
        if hook in ("on_save_checkpoint", "on_load_checkpoint"):
            return CHECKPOINT
        return self.number(f"{CALLBACK}{key.partition('{')[0]}")


def _of_module(owner: str, hook: str, trainer: pl.Trainer) -> int:
    phase = _MODULE_HOOKS.get(hook, HOOKS)
    if phase == VALIDATION and trainer.state.fn != "fit":
        return IGNORED
    if phase not in (HOOKS, CLIPPING, TRANSFER):
        return phase
    if phase == CLIPPING and trainer.gradient_clip_val:
        return phase
    owner_object: Any = (
        trainer.lightning_module if owner == "[LightningModule" else trainer.datamodule  # type: ignore[attr-defined]
    )
    return phase if is_overridden(hook, owner_object) else IGNORED


def _priority(phase: int) -> int:
    """Return a phase's priority. An inner phase of lower priority counts as the outer phase."""
    return _PRIORITIES.get(phase, int(phase >= len(NAMES)))


HOST = -1
"""The device clock's phase number while the current phase runs only on the host."""


class DeviceClock:
    """Times phases on a CUDA device without making the host wait.

    It records an event at each change of phase. At the end of each step, it reads the events that
    the device has passed. The time between two events counts for the phase of the first event, even
    if the device is idle for part of it. If the device's queue is full, CUDA makes the host wait.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.durations: defaultdict[int, Durations] = defaultdict(Durations)
        self._unread: deque[tuple[Any, int] | None] = deque()  # None ends a step
        self._last_read: tuple[Any, int] | None = None
        self._phase = HOST
        self._seconds: dict[int, float] = {}
        self._record_event()

    def mark(self, phase: int) -> None:
        """Assign the work queued from now on to ``phase``, or to ``HOST``."""
        if phase != self._phase:
            self._phase = phase
            self._record_event()

    def _record_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._unread.append((event, self._phase))
        return event

    def end_step(self) -> None:
        """End a step, and read all events that the device has passed."""
        self._unread.append(None)
        while self._unread:
            entry = self._unread[0]
            if entry is None:
                for key, value in self._seconds.items():
                    self.durations[key].add(value)
                self._seconds = {}
            elif entry[0].query():
                self._end_interval(*entry)
            else:
                return
            self._unread.popleft()

    def _end_interval(self, event: Any, phase: int) -> None:
        """Add the time from the last event to this one."""
        if self._last_read is not None:
            before, running = self._last_read
            passed = before.elapsed_time(event) / 1e3
            if passed > 0:
                self._seconds[running] = self._seconds.get(running, 0.0) + passed
        self._last_read = event, phase

    def finish(self) -> None:
        """Wait for the device and read all events."""
        self._record_event().synchronize()
        self.end_step()


class PhaseClock:
    """Assigns each moment to the innermost open phase, so that no time counts twice.

    Phases are nested like brackets. Leaving a phase also closes inner phases that are still open
    after an exception. A step lasts from one :meth:`end_step` to the next. ``durations`` has
    one entry per phase for each step in which the phase ran: its total time in that step.

    Args:
        phases: The phases.
        first: The initial default phase, for time outside all other phases.
        device: A second clock, for the phases that run on the device. None without CUDA.
    """

    def __init__(self, phases: Phases, first: int, device: DeviceClock | None = None) -> None:
        self.phases, self.device = phases, device
        self.phase = first
        self.started = self._since = perf_counter()
        self._stack: list[tuple[int, Any]] = []
        self._seconds = [0.0] * len(phases.names)
        self.durations: defaultdict[int, Durations] = defaultdict(Durations)
        self.work, self._window_work = Work(), Work()
        self.busy = 0.0
        self._window: dict[int, float] = {}

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def elapsed(self) -> float:
        """Seconds from the start to the last update: the sum of all phases."""
        return self._since - self.started

    def enter(self, phase: int, key: Any) -> None:
        """Enter a phase. Call :meth:`leave` with the same ``key`` to leave it."""
        self._add_elapsed()
        current = self.phase
        self._stack.append((current, key))
        if phase != current and _priority(phase) >= _priority(current):
            self._seconds += [0.0] * (phase + 1 - len(self._seconds))
            self._switch(phase)

    def leave(self, key: Any) -> None:
        """Leave the innermost phase with this key, and the phases inside it."""
        stack = self._stack
        if not stack or (stack[-1][1] != key and all(entry[1] != key for entry in stack)):
            return  # it was entered before this clock started
        self._add_elapsed()
        before, found = stack.pop()
        while found != key:
            before, found = stack.pop()
        if before != self.phase:
            self._switch(before)

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """Enter a phase, and leave it at the end of the ``with`` block."""
        key = object()
        self.enter(phase, key)
        try:
            yield
        finally:
            self.leave(key)

    def _switch(self, phase: int) -> None:
        self.phase = phase
        if self.device is not None:
            on_device = phase in _ON_DEVICE or phase >= len(NAMES)
            self.device.mark(phase if on_device else HOST)

    def set_default_phase(self, phase: int) -> None:
        """Set the phase for time outside all other phases. Call it only while no phase is open."""
        self._add_elapsed()
        self.phase = phase

    def _add_elapsed(self) -> None:
        now = perf_counter()
        self._seconds[self.phase] += now - self._since
        self._since = now

    def end_step(self, trained: bool, samples: int = 0, tokens: int = 0) -> int:
        """End a step. Training steps in which the profiler spent time are excluded from ``work``.

        Args:
            trained: Whether this step trained on a batch.
            samples: Number of samples in the batch.
            tokens: Number of tokens in the batch.

        Returns:
            The number of steps in ``work`` since the last :meth:`end_window`.
        """
        self._add_elapsed()
        counted = trained and not self._seconds[PROFILER]
        total = waits = 0.0
        for phase, value in enumerate(self._seconds):
            if not value:
                continue
            self._seconds[phase] = 0.0
            self.durations[phase].add(value)
            if counted and phase not in NOT_OF_A_STEP:
                total += value
                self._window[phase] = self._window.get(phase, 0.0) + value
                if phase in (COMMUNICATION, RANKS):
                    waits += value
        if counted:
            self.work.add(total, samples, tokens)
            self._window_work.add(total, samples, tokens)
            self.busy += total - waits
        if self.device is not None:
            self.device.end_step()
        return self._window_work.steps.count

    def end_window(self) -> tuple[dict[int, float], Work]:
        window, work = self._window, self._window_work
        self._window, self._window_work = {}, Work()
        return window, work
