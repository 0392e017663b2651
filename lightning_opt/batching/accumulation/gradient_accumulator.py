"""Gradient accumulation for hand-written loops."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_opt.batching.accumulation.counting import quotient, sum_over_ranks
from lightning_opt.core.modules.sharding import local_part, pending_groups, summed_part
from lightning_opt.core.numerics.norms import HALVES


class GradientAccumulator:
    """Averages the gradients of several batches by their weights, for a plain training loop.

    Gradients of bfloat16 and float16 parameters are summed in ``dtype``: with 8 bits of mantissa, a
    sum of 256 similar terms stops growing. The sum is rounded once, at the end. Gradients of other
    parameters stay in ``Parameter.grad`` and take no further memory.

    With DDP and FSDP2, the average is correct across ranks if all ranks call :meth:`average`.

    Args:
        module: The model whose gradients are accumulated. Parameters are identified by name.
        dtype: Precision in which low-precision gradients are summed: float32 or float64.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulator = lo.GradientAccumulator(model)
        >>> for batch in (torch.randn(8, 4), torch.randn(3, 4)):  # means over 8 and over 3 samples
        ...     accumulator.backward(model(batch).square().mean(), weight=len(batch))
        >>> accumulator.average()
        11.0
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        if not dtype.is_floating_point or dtype in HALVES:
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}.")
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._dtype = dtype
        self._sums: dict[str, Tensor] = {}
        self._total: float | Tensor = 0.0
        self.batches = 0

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0) -> None:
        """Run the backward pass of a loss that is a mean over ``weight`` samples or tokens.

        Args:
            loss: A 0-dimensional tensor.
            weight: Number of samples or tokens. A tensor is never read, so the CPU does not
                wait for its device.

        Raises:
            ValueError: For a negative number.
        """
        if not isinstance(weight, Tensor) and weight < 0:
            raise ValueError(f"weight must not be negative, got {weight!r}.")
        weight = weight.detach() if isinstance(weight, Tensor) else float(weight)
        (loss * weight).backward()
        self._total = self._total + weight
        self.batches += 1
        self._widen()

    @torch.no_grad()
    def _widen(self) -> None:
        for name, parameter in self._named.items():
            gradient = parameter.grad
            # Gradients with a pending sum over ranks are moved too: `average` creates plain ones.
            if gradient is None or not (gradient.dtype in HALVES or pending_groups(gradient)):
                continue
            local = summed_part(gradient)
            if name in self._sums:
                self._sums[name] += local
            else:
                self._sums[name] = local.to(torch.promote_types(local.dtype, self._dtype))
            parameter.grad = None

    @torch.no_grad()
    def average(self) -> float | Tensor:
        """Replace each ``Parameter.grad`` by the average, and reset.

        Returns:
            The sum of the weights of all batches of all ranks.

        Raises:
            RuntimeError: If no rank had a batch, or if weights that are numbers sum to 0. The sum
                of weights that are tensors is not read; if it is 0, gradients are not divided.
        """
        device = next(iter(self._named.values())).device
        groups = (dist.group.WORLD,) if dist.is_available() and dist.is_initialized() else ()
        total, world = sum_over_ranks(self._total, device, groups)
        # A tensor is read only on a rank without batches.
        if (not self.batches or not isinstance(total, Tensor)) and total <= 0:
            raise RuntimeError("There is nothing to average: no batches, or weights that sum to 0.")
        # Strategies have averaged gradients over `world` ranks, but `total` is a sum over them.
        factor = quotient(world, total)
        for name, parameter in self._named.items():
            gradient = self._sums.get(name)
            if gradient is not None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                local = local_part(parameter.grad)
                local.copy_((local if gradient is None else gradient).mul_(factor))
        self.reset()
        return total

    def reset(self) -> None:
        """Reset sums and weights. ``Parameter.grad`` is kept."""
        self._sums, self._total, self.batches = {}, 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return weights and gradients so far. For sharded parameters, these are local shards."""
        return {
            "total": float(self._total),
            "batches": self.batches,
            "sums": {name: value.clone() for name, value in self._sums.items()},
            "gradients": {
                name: local_part(parameter.grad).detach().clone()
                for name, parameter in self._named.items()
                if self.batches and parameter.grad is not None
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        Raises:
            KeyError: For a parameter that the module does not have.
        """
        self._sums = {
            name: value.to(self._named[name].device, copy=True)
            for name, value in state_dict["sums"].items()
        }
        for name, gradient in state_dict["gradients"].items():
            parameter = self._named[name]
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(gradient)
        self._total, self.batches = state_dict["total"], state_dict["batches"]
