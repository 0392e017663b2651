"""``offload`` and ``compress_saved`` around a LightningModule's training step."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from lightning_opt.core.trial import TrialStep
from lightning_opt.memory.checkpointing.methods.packers import (
    OnHost,
    Packer,
    Rounded,
    gradient_error,
)
from lightning_opt.memory.checkpointing.planning.standing_memory import MIB

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Packing:
    """What is done with saved tensors, if anything.

    Args:
        offload: Whether they go to the host.
        compress_saved: ``"bf16"`` or ``None``.

    Raises:
        ValueError: For another ``compress_saved``, and for both at once.

    Attributes:
        wanted: The setting, or ``""``.
        packer: What does it, during the fit.
        error: Share by which the first batch's gradients are off; ``None`` if that is not known.
    """

    def __init__(self, offload: bool, compress_saved: str | None) -> None:
        if compress_saved not in (None, "bf16"):
            raise ValueError(f"compress_saved must be 'bf16' or None; got {compress_saved!r}.")
        if offload and compress_saved:
            raise ValueError(
                "offload=True and compress_saved='bf16' both replace what is saved. Give one."
            )
        self.wanted = "offload=True" if offload else ""
        self.wanted = "compress_saved='bf16'" if compress_saved else self.wanted
        self._kind = OnHost if offload else Rounded
        self.packer: Packer | None = None
        self.error: float | None = None
        self._note = ""
        self._module: pl.LightningModule | None = None

    def put_on(self, pl_module: pl.LightningModule) -> None:
        """Have the module's ``training_step`` pack what it saves."""
        self.packer, self.error, self._note = None, None, ""
        if not self.wanted:
            return
        devices = self._kind.devices
        if devices and pl_module.device.type not in devices:
            self._note = (
                f"{self.wanted} needs a CUDA device; on {pl_module.device.type} saved tensors are "
                "where they would be moved to, so nothing is moved."
            )
            return
        packer = self.packer = Packer(self._kind)
        original = pl_module.training_step

        @wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with packer.packing(pl_module, (args, kwargs)):
                return original(*args, **kwargs)

        self._module = pl_module
        self._before = vars(pl_module).get("training_step")
        vars(pl_module)["training_step"] = training_step

    def take_off(self) -> None:
        """Put ``training_step`` back; more than once does no harm."""
        if self._module is None:
            return
        if self._before is None:
            del vars(self._module)["training_step"]
        else:
            vars(self._module)["training_step"] = self._before
        self._module = None

    def measure_error(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Compare the gradients of this batch with and without, where they may differ."""
        if self.packer is None or self._kind is not Rounded:
            return
        step = TrialStep(trainer, pl_module, batch, batch_idx)

        def run(remember: Any) -> None:
            def inside(stack: ExitStack) -> None:
                stack.callback(remember)

            step.run(inside)

        try:
            self.error = gradient_error(run, pl_module, self.packer)
        except torch.OutOfMemoryError:
            self.packer.enabled = True
            self._note = "Its error could not be measured: exact gradients do not fit."

    def scalars(self) -> dict[str, float]:
        """Return what is logged after a step."""
        if self.packer is None:
            return {}
        found = {
            "checkpointing/packed_mb": self.packer.original_bytes / MIB,
            "checkpointing/packed_to_mb": self.packer.packed_bytes / MIB,
        }
        if self.error is not None:
            found["checkpointing/gradient_error"] = self.error
        return found

    @property
    def sentence(self) -> str:
        """What was done, in words; ``""`` if nothing was wanted."""
        if self.packer is None or not self.packer.original_bytes:
            return self._note
        original, now = self.packer.original_bytes / MIB, self.packer.packed_bytes / MIB
        error = "" if self.error is None else (
            f" The first batch's gradients are off by {self.error:.1e} of their norm."
        )  # fmt: skip
        return (
            f"{self.wanted}: {original:.1f} MB of saved tensors take {now:.1f} MB on the "
            f"device.{error} {self._note}".rstrip()
        )


def refuse_packing(packing: Packing) -> None:
    """Raise where parameters are gathered for a moment: saved ones must not be held elsewhere.

    Raises:
        ValueError: If anything is to be packed.
    """
    if packing.wanted:
        raise ValueError(
            f"ActivationCheckpointing({packing.wanted}) does not work with sharded parameters "
            "(FSDPStrategy, ModelParallelStrategy), whose memory comes and goes under what "
            "autograd saves. Use a policy that recomputes, such as 'every_layer', or DDP."
        )
