"""The base class of callbacks, and checks that several callbacks share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

from torch.optim import LBFGS, Optimizer

from lightning_opt.core.modules.patching import Patches, replaced
from lightning_opt.trainer.lightning import BaseCallback, is_param_in_hook_signature

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RunCallback(BaseCallback):
    """A callback with separate hooks for the end of a run, for a new model and for pickling.

    Lightning does not call ``teardown`` after an exception, calls ``setup`` for each stage, and
    pickles callbacks when it spawns processes. A subclass overrides:

    - :meth:`setup_fit` to check the settings and prepare a run;
    - :meth:`release` to drop references when a run ends, after ``super().release(trainer)``;
    - :meth:`reset_for_model` to reset the state that belongs to one model;
    - ``not_pickled``, the attributes that are ``None`` in a pickled copy;
    - ``only_one = True`` to raise for a second instance in the same Trainer.

    An overridden ``setup`` calls ``super().setup(...)`` first. What is entered into ``_patches``
    lasts until the end of the run.

    Raises:
        ValueError: In ``setup``, for a second instance of a class with ``only_one``.
    """

    not_pickled: ClassVar[tuple[str, ...]] = ()
    only_one: ClassVar[bool] = False

    rescales_gradients: ClassVar[bool] = False
    """Whether it changes the gradient norms that later callbacks see."""

    accumulates_by: str = ""
    """The constructor argument that sets how many batches make a step; empty if none does."""

    runs_in_trials: bool = True
    """Whether batch-size trials run a copy of it, because it needs memory or changes steps."""

    _model: ref[pl.LightningModule] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check ``only_one``, and reset the state if this ``fit`` has another model."""
        if stage != "fit":
            return
        kind = type(self)
        if self.only_one and sum(isinstance(other, kind) for other in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"Trainer(callbacks=[...]) has more than one {kind.__name__}, and each would undo "
                "the other's work. Keep only one."
            )
        if self._model is None or self._model() is not pl_module:
            self.reset_for_model(pl_module)
            self._model = ref(pl_module)
        self.setup_fit(trainer, pl_module)

    def setup_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the settings and prepare a run. Called by ``setup`` for ``fit``."""

    @cached_property
    def _patches(self) -> Patches:
        return Patches()

    def _replace(self, owner: Any, **attributes: Any) -> None:
        """Set attributes of an object until the run ends."""
        self._patches.enter_context(replaced(owner, **attributes))

    @property
    def needs_operators(self) -> str:
        """The setting that needs to see individual operators; empty if none does."""
        return ""

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Reset the state that belongs to one model. Also called before the first run."""

    def release(self, trainer: pl.Trainer) -> None:
        """Undo patches and drop references to the model. Called once or more when a run ends."""
        self._patches.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.release(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.release(trainer)

    def __getstate__(self) -> dict[str, Any]:
        # Lightning sets `log` and `log_dict`, which hold the model.
        return self.__dict__ | dict.fromkeys(("_model", "log", "log_dict", *self.not_pickled))


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether torch's hooks work: the class calls ``Optimizer.__init__``."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def raise_if_lbfgs(name: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for LBFGS, which evaluates the loss several times per step."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            f"{name} does not work with torch.optim.LBFGS, which evaluates the loss and its "
            "gradient several times within one step. Use a first-order optimizer such as AdamW "
            "or SGD."
        )


def raise_if_dataloader_iter(name: str, module: pl.LightningModule, use: str) -> None:
    """Raise ValueError if ``training_step`` fetches batches itself.

    Args:
        name: The callback's name.
        module: The model.
        use: The last words of the message, such as ``"to split."``.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name} needs training_step(self, batch, ...): with dataloader_iter there is no batch "
            f"{use}"
        )
