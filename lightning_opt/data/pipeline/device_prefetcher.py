"""Copies the next batch to the device while the device computes the previous step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_opt.core.modules.batches import leaves_of, tensors_of
from lightning_opt.trainer.lightning import is_overridden
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class DevicePrefetcher(RunCallback):
    """Copies batches to a CUDA device on a separate stream, during computation.

    Lightning queues the copy of a batch behind the previous step. Here it is queued on a side
    stream, so it runs while that step computes, and the next step waits only for the copy. Batches
    are not fetched earlier than before, so order, checkpoints and resume stay the same.

    It needs pinned memory (``DataLoader(pin_memory=True)``, which
    :class:`~lightning_opt.DataPipelineTuner` tries) and a host that runs ahead of its device: if a
    step ends with reading a value from the device (``loss.item()``), nothing overlaps.

    On other devices, and for a model or data module with its own ``transfer_batch_to_device``, it
    does nothing, and logs a message. A batch with objects other than tensors and plain values is
    copied as usual: tensors hidden in an object cannot be protected from early reuse of their
    memory.

    Raises:
        ValueError: In ``setup`` for a second instance.

    Args:
        None.

    Attributes:
        copies: Batches of the last run that were copied on the side stream.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.DevicePrefetcher()], logger=False)
    """

    only_one = True
    copies = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the model's ``transfer_batch_to_device``, if batches are copied to a GPU."""
        self.release(trainer)
        self.copies = 0
        device = trainer.strategy.root_device
        if device.type != "cuda":
            log.info("DevicePrefetcher does nothing on %s: there is no copy to overlap.", device)
            return
        for owner in (pl_module, trainer.datamodule):  # type: ignore[attr-defined]
            if owner is not None and is_overridden("transfer_batch_to_device", owner):
                log.warning(
                    "DevicePrefetcher does nothing: %s defines its own transfer_batch_to_device.",
                    type(owner).__name__,
                )
                return
        side: Any = torch.cuda.Stream(device)
        original_transfer = pl_module.transfer_batch_to_device

        def transfer_batch_to_device(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            if not is_transparent(batch):
                return original_transfer(batch, device, dataloader_idx)
            self._warn_if_not_pinned(batch)
            self.copies += 1
            with torch.cuda.stream(side):
                moved = original_transfer(batch, device, dataloader_idx)
            current = torch.cuda.current_stream(device)
            current.wait_stream(side)  # the host does not wait
            for tensor in tensors_of(moved):
                # Otherwise the allocator could reuse the memory for the next copy while `current`
                # still reads it.
                tensor.record_stream(current)
            return moved

        self._replace(pl_module, transfer_batch_to_device=transfer_batch_to_device)

    def _warn_if_not_pinned(self, batch: Any) -> None:
        on_cpu = (tensor for tensor in tensors_of(batch) if tensor.device.type == "cpu")
        if not self.copies and not all(tensor.is_pinned() for tensor in on_cpu):
            log.warning(
                "DevicePrefetcher: batches are not in pinned memory, so the host waits for each "
                "copy. Use DataLoader(pin_memory=True)."
            )


def is_transparent(batch: Any) -> bool:
    """Return whether ``batch`` has only tensors and plain values, so that no tensor is hidden."""
    plain = (Tensor, str, bytes, bool, int, float, complex, type(None))
    return all(isinstance(leaf, plain) for leaf in leaves_of(batch))
