"""The floating-point operations of one batch, counted while the Trainer runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    import lightning.pytorch as pl


class OperationCount(TorchDispatchMode):
    """Counts by torch's formulas (matrix products, convolutions, attention) what runs within it.

    Unlike torch's ``FlopCounterMode`` it sorts nothing by module, which needs hooks on all of them;
    it counts what this process does of a sharded product; and a formula that fails stops nothing.

    Attributes:
        flops: So far, forward and backward. A multiplication and an addition are two.
        recomputed: Of forward passes within the backward pass, as activation checkpointing makes.
        failure: The last formula that failed, and why; empty if none did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.recomputed = 0
        self.failure = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # DTensor runs operations on this process's part: count those
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            try:
                flops = formula(*args, **kwargs, out_val=result)
            except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
                self.failure = f"{func}: {type(error).__name__}: {error}"
            else:
                # Autograd makes no graph of a backward pass: what has one is a forward pass again.
                if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
                    self.recomputed += flops
                else:
                    self.flops += flops
        return result


def count_next_batch(
    trainer: pl.Trainer, tell: Callable[[OperationCount], None]
) -> Callable[[], None]:
    """Count the batch that the Trainer is about to run: forward, backward and update.

    Args:
        trainer: In ``on_train_batch_start``.
        tell: Gets the count when the batch is done.

    Returns:
        What calls it off.
    """
    loop = trainer.fit_loop.epoch_loop
    automatic = trainer.lightning_module.automatic_optimization
    part: Any = loop.automatic_optimization if automatic else loop.manual_optimization
    run = part.run

    def call_off() -> None:
        vars(part).pop("run", None)

    def counted(*args: Any, **kwargs: Any) -> Any:
        call_off()
        # Around the call, so that modes which others enter and leave in hooks stay nested.
        with OperationCount() as count:
            result = run(*args, **kwargs)
        tell(count)
        return result

    vars(part)["run"] = counted
    return call_off
