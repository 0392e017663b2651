"""Copies the next batch to the device while the device still computes the last one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class DevicePrefetcher(Callback):
    """On CUDA, copies each batch on a stream of its own, beside the computation.

    Lightning queues the copy of a batch behind the step before it. Here it is queued on a side
    stream, so that it runs while that step still computes; the next step waits for the copy alone.
    No batch is taken from the loader earlier than before, so order, checkpoints and resume stay as
    they are.

    It needs pinned memory (``DataLoader(pin_memory=True)``, which
    :class:`~lightning_opt.DataPipelineTuner` tries) and a host that runs ahead of its device: a
    step that reads a value of the device at its end (``loss.item()``) leaves nothing to overlap.

    On other devices it does nothing, and says so. A model or data module with a
    ``transfer_batch_to_device`` of its own is left alone too: what that does must not run on a side
    stream unseen. A batch with things in it that are neither tensors nor plain values is copied as
    usual, because tensors inside could not be kept from being reused too early.

    Raises:
        ValueError: In ``setup`` if there are two.

    Args:
        validation: Do so for batches of validation, test and prediction too.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.DevicePrefetcher()], logger=False)
    """

    def __init__(self, validation: bool = True) -> None:
        self.validation = validation
        self._undo: Callable[[], None] | None = None
        self._copies = self._plain = 0
        self._pageable = False

    @property
    def copies(self) -> int:
        """Batches of the last run that were copied on the side stream."""
        return self._copies

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a second one."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, DevicePrefetcher) for callback in callbacks) > 1:
            raise ValueError("Two DevicePrefetcher callbacks do no more than one; keep one.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the copy, if there is one to take over."""
        self._release()
        self._copies = self._plain = 0
        self._pageable = False
        device = trainer.strategy.root_device
        if device.type != "cuda":
            log.info("DevicePrefetcher does nothing on %s: there is no copy to overlap.", device)
            return
        selector = trainer._data_connector._datahook_selector
        owner = selector.get_instance("transfer_batch_to_device") if selector else pl_module
        if _overrides(owner):
            log.warning(
                "DevicePrefetcher does nothing: %s has a transfer_batch_to_device of its own.",
                type(owner).__name__,
            )
            return
        self._install(trainer, owner, torch.cuda.Stream(device))

    def _install(self, trainer: pl.Trainer, owner: Any, side: Any) -> None:
        plain = owner.transfer_batch_to_device
        cuda: Any = torch.cuda

        def transfer_batch_to_device(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            if not (self.validation or trainer.training) or not is_transparent(batch):
                self._plain += 1
                return plain(batch, device, dataloader_idx)
            self._copies += 1
            self._look_at(batch)
            return copy_beside(
                lambda: plain(batch, device, dataloader_idx),
                side,
                cuda.current_stream(device),
                cuda.stream,
            )

        vars(owner)["transfer_batch_to_device"] = transfer_batch_to_device
        self._undo = lambda: vars(owner).pop("transfer_batch_to_device", None) and None

    def _look_at(self, batch: Any) -> None:
        """Say once that memory is not pinned, and the host therefore waits for each copy."""
        if self._copies > 1 or self._pageable:
            return
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == "cpu" and not tensor.is_pinned() for tensor in tensors):
            self._pageable = True
            log.warning(
                "DevicePrefetcher: batches are not in pinned memory, so copies overlap with "
                "nothing. Use DataLoader(pin_memory=True)."
            )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put everything back; Lightning calls no ``teardown`` after an exception."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put everything back."""
        self._release()

    def _release(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


def copy_beside(
    copy: Callable[[], Any],
    side: Any,
    current: Any,
    use: Callable[[Any], Any],
) -> Any:
    """Run ``copy`` on the stream ``side`` and let the stream ``current`` wait for it, not the host.

    Args:
        copy: Queues the copy and returns the batch on the device.
        side: The stream to copy on.
        current: The stream that computes.
        use: A context in which work is queued on a stream (``torch.cuda.stream``).
    """
    with use(side):
        batch = copy()
    current.wait_stream(side)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            # Made on one stream and used on another: without this the allocator of the first
            # could give its memory to the next copy while the second still reads it.
            leaf.record_stream(current)
    return batch


def is_transparent(batch: Any) -> bool:
    """Return whether every tensor of ``batch`` can be found in it."""
    plain = (Tensor, str, bytes, bool, int, float, complex, type(None))
    return all(isinstance(leaf, plain) for leaf in tree_leaves(batch))


def _overrides(owner: Any) -> bool:
    from lightning.pytorch.core.hooks import DataHooks

    own = getattr(owner.transfer_batch_to_device, "__func__", None)
    return own is not DataHooks.transfer_batch_to_device
