"""Base of the strategies that replace DDP's exchange of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_opt.core.modules.sharding import CustomExchange, flat_parameter_groups, is_dtensor
from lightning_opt.trainer.lightning import BaseDDPStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

FutureType = TypeVar("FutureType")

TAG = 23_063
"""Tag of all messages. User code is unlikely to use the same one."""


def all_to_all(rows: Tensor, out: Tensor, group: dist.ProcessGroup | None) -> None:
    """Send row ``i`` to process ``i``, and write the row of process ``i`` to ``out[i]``."""
    if rows.device.type == "cpu":
        start_all_to_all(rows, out, group)()
    else:
        dist.all_to_all_single(out, rows.contiguous(), group=group)  # NCCL takes no expanded rows


def start_all_to_all(
    rows: Tensor, out: Tensor, group: dist.ProcessGroup | None = None
) -> Callable[[], object]:
    """Start :func:`all_to_all` on a CPU. Return a function that waits for its end."""
    # gloo's own all-to-all copies rows, and sends in one direction at a time.
    group = group or dist.group.WORLD
    own, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    works: list[Any] = []
    for distance in range(1, len(ranks)):
        source, target = own - distance, (own + distance) % len(ranks)
        works.append(dist.irecv(out[source], ranks[source], group, TAG))
        works.append(dist.isend(rows[target], ranks[target], group, TAG))
    out[own].copy_(rows[own])
    return lambda: [work.wait() for work in works]


class ExchangeThread:
    """Runs functions one after the other in a daemon thread.

    Unlike for an executor's threads, Python does not wait for it at exit. So an exception on one
    rank ends its process, even if an exchange still waits for another rank.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Any, Callable[[], Any]] | None] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def submit(self, function: Callable[[], Any], future: FutureType) -> FutureType:
        """Call the function in the thread, and set its result or exception on ``future``."""
        self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """End the thread after the submitted functions, without waiting for it."""
        self._tasks.put(None)

    def _run(self) -> None:
        for future, function in iter(self._tasks.get, None):
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)
            del future, function  # they hold tensors of the model's size


class OwnHookStrategy(BaseDDPStrategy):
    """DDP that raises if the user gives a communication hook.

    Args:
        **kwargs: Arguments of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Attributes:
        forbidden: Arguments of DDP that cannot be given.
    """

    forbidden: ClassVar[tuple[str, ...]] = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")

    def __init__(self, **kwargs: Any) -> None:
        for name in self.forbidden:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(self).__name__} has its own exchange, so {name} cannot be given. Use "
                    "lightning.pytorch.strategies.DDPStrategy for yours."
                )
        super().__init__(**kwargs)


class OwnExchangeStrategy(CustomExchange, OwnHookStrategy):
    """DDP with its own exchange, whose state is saved in checkpoints.

    Args:
        **kwargs: Arguments of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Attributes:
        title: Name in messages.
        checkpoint_key: Key of the state in checkpoints.
    """

    title: ClassVar[str]
    checkpoint_key: ClassVar[str]

    def __init__(self, **kwargs: Any) -> None:
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
        # A checkpoint that contains only weights cannot be resumed.
        if "optimizer_states" in checkpoint and (state := self.state_to_save()) is not None:
            checkpoint[self.checkpoint_key] = state
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and store the state of the exchange until training starts."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == "fit":
            self._resumed = checkpoint.get(self.checkpoint_key)
            if self._resumed is None and self.world_size > 1:  # else there is nothing to exchange
                rank_zero_warn(
                    f"This checkpoint was written without {self.title}, which starts from scratch."
                )
        return checkpoint

    def teardown(self) -> None:
        """Undo all changes to the run, and release the model."""
        self._undo.close()
        super().teardown()
