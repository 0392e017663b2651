"""What strategies share that exchange something else than DDP does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_opt.core.modules.sharding import CustomExchange, flat_parameter_groups, is_dtensor


class OwnExchangeStrategy(CustomExchange, DDPStrategy):
    """DDP with an exchange of its own, whose state is kept in checkpoints to resume from.

    Args:
        **kwargs: What :class:`~lightning.pytorch.strategies.DDPStrategy` takes.

    Attributes:
        title: What it is called in messages.
        checkpoint_key: Where a checkpoint keeps its state.
        brought: What of DDP it brings itself.
    """

    title: ClassVar[str]
    checkpoint_key: ClassVar[str]
    brought: ClassVar[tuple[str, ...]] = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")

    def __init__(self, **kwargs: Any) -> None:
        for name in self.brought:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(self).__name__} has an exchange of its own, so {name} cannot be given. "
                    "Use lightning.pytorch.strategies.DDPStrategy for one of yours."
                )
        super().__init__(**kwargs)
        self._resumed: Mapping[str, Any] | None = None
        self._undo = ExitStack()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def refuse_shards(self) -> None:
        """Refuse a model of which a process has but parts.

        Raises:
            ValueError: If it is one.
        """
        if any(map(is_dtensor, self._module.parameters())) or flat_parameter_groups(self._module):
            raise ValueError(
                f"{self.title} needs whole parameters on every process, but this model's are "
                "sharded. Use it without FSDP or tensor parallelism, or use their strategies."
            )

    def state_to_save(self) -> dict[str, Any] | None:
        """Return what to resume from. All processes must call it."""
        raise NotImplementedError

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with the state of the exchange. All processes take part."""
        # A checkpoint of weights alone is no place to resume from.
        if "optimizer_states" in checkpoint and (state := self.state_to_save()) is not None:
            checkpoint[self.checkpoint_key] = state
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and keep what it says of the exchange."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = checkpoint.get(self.checkpoint_key)
            if self._resumed is None:
                rank_zero_warn(
                    f"This checkpoint was written without {self.title}, which begins anew."
                )
        return checkpoint

    def teardown(self) -> None:
        """Undo what was done to the run, and let go of the model."""
        self._undo.close()
        super().teardown()
