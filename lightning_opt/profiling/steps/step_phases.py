"""The phases of a run, and the map from Lightning's profiled actions to phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
"""Actions that are not phases. The enclosing phase includes ``IGNORED``; others are special."""

MAX_PHASES = 200
"""Maximum number of phases. Further callbacks, regions and actions count as ``other``."""

NOT_OF_A_STEP = frozenset((VALIDATION, CHECKPOINT, SETUP, BETWEEN, TEARDOWN, PROFILER, OTHER))
"""Phases that are not part of a training step."""

WAITS = frozenset((COMMUNICATION, RANKS))
"""Phases in which a rank waits for other ranks."""

_ON_DEVICE = frozenset(
    (TRANSFER, FORWARD, LOSS, FORWARD_AND_LOSS, BACKWARD, COMMUNICATION, CLIPPING, OPTIMIZER,
     ZEROING, HOOKS, VALIDATION)
)  # fmt: skip
_OWN_HOOKS = {
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
_GRADIENT_HOOKS = frozenset(
    ("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step")
)
_EVALUATION = ("validation_step", "test_step", "predict_step")


class Phases:
    """All phases by number: fixed ones first, then callbacks, regions and the user's own actions.

    Attributes:
        names: The name of each phase.
        on_device: Whether each phase runs on the device.
        level: The level of each phase. It is compared with the ``cap`` of the enclosing phase.
        cap: A phase absorbs the phases inside it whose level is lower than its cap.
    """

    def __init__(self) -> None:
        self.names = list(NAMES)
        self.on_device = [phase in _ON_DEVICE for phase in range(len(NAMES))]
        self.level = [{CHECKPOINT: 2, PROFILER: 3}.get(phase, 0) for phase in range(len(NAMES))]
        self.cap = [
            {VALIDATION: 1, CHECKPOINT: 2, PROFILER: 3}.get(phase, 0) for phase in range(len(NAMES))
        ]
        self._numbers = {name: number for number, name in enumerate(NAMES)}

    def number(self, name: str, on_device: bool) -> int:
        found = self._numbers.get(name)
        if found is None:
            if len(self.names) >= MAX_PHASES:
                return OTHER
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
            self.on_device.append(on_device)
            self.level.append(1)
            self.cap.append(1)  # a forward pass inside a region counts for the region
        elif on_device:
            self.on_device[found] = True
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
            return self.number(action, on_device=True)  # `trainer.profiler.profile("my part")`
        name, _, hook = rest.rpartition(".")
        training = trainer.state.fn == "fit"
        if owner == "[Strategy":
            return self._of_strategy(hook, training)
        if owner == "[Callback":
            return self._of_callback(name, hook, trainer)
        if owner in ("[LightningModule", "[LightningDataModule"):
            return _of_module(owner, hook, trainer)
        if hook == "train_dataloader_next":
            return FETCH
        if hook.endswith("_next"):
            return VALIDATION if training else DATA
        return IGNORED

    @staticmethod
    def _of_strategy(hook: str, training: bool) -> int:
        known = {"training_step": STEP, "batch_to_device": TRANSFER, "on_train_end": TRAIN_END}
        if hook in _EVALUATION:
            return VALIDATION if training else FORWARD
        return known.get(hook, IGNORED)  # `EpochHooks` times the backward pass

    def _of_callback(self, key: str, hook: str, trainer: pl.Trainer) -> int:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        owner = next((callback for callback in callbacks if callback.state_key == key), None)
        if owner is not None and not is_overridden(hook, owner):
            return IGNORED
        if hook in ("on_save_checkpoint", "on_load_checkpoint"):
            return CHECKPOINT
        return self.number(f"{CALLBACK}{key.partition('{')[0]}", hook in _GRADIENT_HOOKS)


def _of_module(owner: str, hook: str, trainer: pl.Trainer) -> int:
    phase = _OWN_HOOKS.get(hook, HOOKS)
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
