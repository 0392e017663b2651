"""Base of the strategies that replace DDP's exchange of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_opt.core.modules.sharding import CustomExchange, flat_parameter_groups, is_dtensor
from lightning_opt.trainer.lightning import BaseDDPStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class OwnExchangeStrategy(CustomExchange, BaseDDPStrategy):
    """DDP with its own exchange, whose state is saved in checkpoints.

    Args:
        **kwargs: Arguments of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Attributes:
        title: Name in messages.
        checkpoint_key: Key of the state in checkpoints.
        forbidden: Arguments of DDP that cannot be given.
    """

    title: ClassVar[str]
    checkpoint_key: ClassVar[str]
    forbidden: ClassVar[tuple[str, ...]] = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")

    def __init__(self, **kwargs: Any) -> None:
        for name in self.forbidden:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(self).__name__} has its own exchange, so {name} cannot be given. Use "
                    "lightning.pytorch.strategies.DDPStrategy for yours."
                )
        super().__init__(**kwargs)
        self._resumed: Mapping[str, Any] | None = None
        self._undo = ExitStack()

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def raise_if_sharded(self) -> None:
        """Raise ValueError if the model is sharded: each process holds only part of it."""
        if any(map(is_dtensor, self._module.parameters())) or flat_parameter_groups(self._module):
            raise ValueError(
                f"{self.title} needs whole parameters on every process, but this model's are "
                "sharded. Use it without FSDP or tensor parallelism, or use their strategies."
            )

    def state_to_save(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint. All processes must call it."""
        raise NotImplementedError

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with the state of the exchange. All processes must call it."""
        # A checkpoint of only weights cannot be resumed from.
        if "optimizer_states" in checkpoint and (state := self.state_to_save()) is not None:
            checkpoint[self.checkpoint_key] = state
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and store the state of the exchange until training starts."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == "fit":
            self._resumed = checkpoint.get(self.checkpoint_key)
            if self._resumed is None:
                rank_zero_warn(
                    f"This checkpoint was written without {self.title}, which starts from scratch."
                )
        return checkpoint

    def teardown(self) -> None:
        """Undo all changes to the run, and release the model."""
        self._undo.close()
        super().teardown()
