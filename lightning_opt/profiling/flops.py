"""Floating-point operations of a forward and a backward pass, counted and not estimated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.preserve import isolated_random, preserved


class Flops(NamedTuple):
    """Floating-point operations, a multiplication and an addition counting as two.

    Attributes:
        forward: Of the forward pass.
        backward: Of the backward pass, without what it has computed again.
        recomputed: Of forward passes within the backward pass, as activation checkpointing makes.
    """

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """What the model needs: forward and backward. The numerator of MFU."""
        return self.forward + self.backward


class FlopCount(TorchDispatchMode):
    """Counts by torch's formulas (matrix products, convolutions, attention) what runs within it.

    Unlike torch's ``FlopCounterMode`` it sorts nothing by module, which needs hooks on all of them;
    it tells recomputation apart, counts what this process does of a sharded product, and stops
    nothing where a formula fails. Within a backward pass autograd makes no graph, so what runs
    there with gradients enabled is a forward pass again; a backward pass with ``create_graph=True``
    looks the same.

    Attributes:
        failures: Operators whose formula failed, and why; they are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failures: dict[str, str] = {}
        self._counts = [0, 0, 0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # DTensor runs operations on this process's part: count those
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            in_backward = torch._C._current_graph_task_id() != -1
            part = (2 if torch.is_grad_enabled() else 1) if in_backward else 0
            try:
                self._counts[part] += formula(*args, **kwargs, out_val=result)
            except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
                self.failures[str(func.overloadpacket)] = f"{type(error).__name__}: {error}"
        return result

    @property
    def flops(self) -> Flops:
        """What was counted."""
        return Flops(*self._counts)


def count_flops(
    model: nn.Module,
    *batch: Any,
    backward: bool = True,
    loss: Callable[[Any], Tensor] | None = None,
    **inputs: Any,
) -> Flops:
    """Count the floating-point operations of a model on a batch, without changing either.

    The model runs once. Parameters may be on the ``meta`` device, which takes no memory. Matrix
    products, convolutions and attention are counted, as :mod:`torch.utils.flop_counter` does; the
    elementwise rest is a few percent at most. Your own operators count if you register them with
    ``torch.utils.flop_counter.register_flop_formula``.

    Args:
        model: What is called as ``model(*batch, **inputs)``.
        *batch: Its inputs.
        backward: Whether to count a backward pass too.
        loss: Makes a scalar of the output; by default the sum of every floating-point tensor in it.
        **inputs: Its named inputs.

    Returns:
        The operations of the forward and the backward pass.

    Raises:
        ValueError: If there is nothing to go backward from, or an operator could not be counted.

    Example:
        >>> import torch
        >>> flops = count_flops(torch.nn.Linear(10, 5), torch.ones(2, 10))
        >>> flops.forward, flops.backward  # 2 * 2 * 10 * 5, and the weight's gradient
        (200, 200)
    """
    devices = {tensor.device for tensor in (*model.parameters(), *tensors_of(batch))}
    device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
    counter = FlopCount()
    with isolated_random(device), preserved(model), torch.set_grad_enabled(backward), counter:
        output = model(*batch, **inputs)
        if backward:
            _loss_of(output, loss).backward()
    if counter.failures:
        raise ValueError(f"The FLOPs of these operators could not be counted: {counter.failures}.")
    return counter.flops


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    parts = [t.sum() for t in tensors_of(output) if t.requires_grad]
    if not parts:
        raise ValueError(
            "The output has no tensor with a gradient, so there is no backward pass to count: pass "
            "backward=False, or a loss that makes a scalar of the output."
        )
    return sum(parts[1:], parts[0])
