"""Agreements between ranks, so that out-of-memory on one rank never leaves the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_opt.batching.micro_batching.rollback import HeldGradients
from lightning_opt.batching.micro_batching.sizes import PassedBatches
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import largest_over_ranks

Backward = Callable[[], None]

CPU = torch.device("cpu")

CAUTIOUS_BATCHES = 200
"""Batches after an out-of-memory error for which no size counts as proven."""


class OtherRankFailedError(Exception):
    """Another rank ran out of memory, so this rank rolls its batch back too."""


class NoHostGroupError(RuntimeError):
    """No gloo process group could be created."""


class Ranks:
    """Ranks that run the same number of micro-batches. Without a group: a single process.

    Attributes:
        reduces: Whether :meth:`last_backward` reduces gradients over ranks.
        committed: Whether the batch can no longer be rolled back.
    """

    reduces = False
    committed = False

    def __init__(self, group: Any = None, device: torch.device = CPU) -> None:
        self._group, self._device = group, device

    def agree_on_parts(self, parts: int, count_samples: Callable[[], int]) -> int:
        """Return the largest number of parts of any rank, at most the fewest samples of any.

        Every rank of the group must call this.
        """
        if self._group is None:
            return parts
        most, fewest = self.largest(parts, -count_samples())
        return min(most, -fewest)

    def largest(self, *numbers: int) -> list[int]:
        """Return the largest of each number over the ranks. Every rank must call this."""
        with _explained_errors():
            return [int(n) for n in largest_over_ranks(numbers, self._device, self._group)]

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks. Every rank must call this."""
        return [item]

    def begin_batch(self, description: tuple[str, int, int] | None) -> None:
        pass

    def begin_attempt(self) -> None:
        pass

    def last_backward(
        self, backward: Backward, loss: Tensor, gradients: HeldGradients | None, accumulating: bool
    ) -> None:
        """Run the last backward pass of a batch and add the window's earlier gradients.

        Nothing is reduced while ``accumulating``, in the middle of a window.
        """
        backward()
        if gradients is not None:
            gradients.add_up()

    def finish(self) -> None:
        pass

    def fail(self) -> None:
        pass

    def record_success(self, description: tuple[str, int, int] | None) -> None:
        pass

    def close(self) -> None:
        pass


class HostRanks(Ranks):
    """FSDP2's ranks. Their forward passes are collectives, so a batch cannot be rolled back.

    Each gloo group has ``size`` neighbouring ranks; None for all.

    Raises:
        NoHostGroupError: On all ranks, if a rank could not create its group.
    """

    def __init__(self, timeout: timedelta | None, size: int | None = None) -> None:
        group, problem = None, ""
        try:
            size = size or dist.get_world_size()
            group, _ = dist.new_subgroups(size, backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        super().__init__(group)
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.close()
            raise NoHostGroupError(next(filter(None, problems)))

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class DDPRanks(HostRanks):
    """DDP's ranks, which roll a batch back together.

    Up to the last backward pass ranks run on their own. Then they exchange in one all-reduce over
    gloo whether any of them failed. The last pass usually reduces gradients while it runs, and a
    rank that failed there would leave the others in a reduction that never ends. So micro-batches
    that are not known to fit run it without reduction; the ranks agree again and then reduce.
    """

    reduces = True

    def __init__(self, model: DistributedDataParallel, timeout: timedelta | None) -> None:
        super().__init__(timeout, dist.get_world_size(model.process_group))
        self._model = model
        self._passed = PassedBatches()
        self._cautious = 0
        self._risky = False

    def agree_on_parts(self, parts: int, count_samples: Callable[[], int]) -> int:
        (most,) = self.largest(parts)
        return parts if most == parts else min(most, max(parts, count_samples()))

    def gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * dist.get_world_size(self._group)
        with _explained_errors():
            dist.all_gather_object(items, item, group=self._group)
        return items

    def begin_batch(self, description: tuple[str, int, int] | None) -> None:
        self._cautious -= 1
        passed = description is not None and self._passed.covers(*description)
        self._risky = self._cautious > 0 or not passed
        self.committed = False
        self._broadcasts = self._model.require_forward_param_sync

    def begin_attempt(self) -> None:
        self._model.require_forward_param_sync = self._broadcasts

    def last_backward(
        self, backward: Backward, loss: Tensor, gradients: HeldGradients | None, accumulating: bool
    ) -> None:
        """Run the last backward pass; reduce gradients after all ranks have reached it."""
        assert gradients is not None
        if accumulating:
            backward()
            self.finish()
            gradients.add_up()
        elif self._any_is_risky():
            backward()
            self.finish()
            gradients.add_up()
            reduce_gradients(self._model)
        else:
            gradients.add_up()
            self.committed = True
            _expect_backward(self._model, loss)
            backward()

    def finish(self) -> None:
        """Agree that no rank has failed; the batch can then no longer be rolled back."""
        self._any_is_risky()
        self.committed = True

    def fail(self) -> None:
        self.largest(True, self._risky)
        self._trust_no_size()

    def _any_is_risky(self) -> bool:
        failed, risky = self.largest(False, self._risky)
        if failed:
            self._trust_no_size()
            raise OtherRankFailedError
        return bool(risky)

    def _trust_no_size(self) -> None:
        self._passed = PassedBatches()
        self._cautious = CAUTIOUS_BATCHES

    def record_success(self, description: tuple[str, int, int] | None) -> None:
        if description is not None:
            self._passed.add(*description)


@contextmanager
def _explained_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "Another rank exited or did not reach this synchronization point of micro-batches "
            "within the strategy's timeout. That rank's own error gives the reason. A collective "
            f"within your training_step can also block it. ({error})"
        ) from error


def _expect_backward(model: DistributedDataParallel, outputs: Any) -> None:
    """Make DDP reduce gradients in the next backward pass, as after a forward pass."""
    with replaced(model, require_backward_grad_sync=True):
        prepare_for_backward(model, outputs)


def reduce_gradients(model: DistributedDataParallel) -> None:
    """Reduce every ``Parameter.grad`` through DDP's reducer, with its communication hooks.

    The reducer acts when autograd adds to a gradient. So a backward pass adds zeros, which take no
    memory, to one parameter after another, the last one first. The parameters' own hooks are
    removed meanwhile: they have run already. The model's last forward and backward passes must have
    run under ``no_sync``.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    if not parameters:
        return
    carrier = torch.zeros((), device=parameters[0].device, requires_grad=True)
    loss: Tensor = carrier
    add_zero: Callable[..., Tensor] = _AddZero.apply
    for parameter in parameters:  # the backward pass runs in reverse
        loss = add_zero(loss, parameter)
    _expect_backward(model, loss)
    with ExitStack() as stack:
        for parameter in parameters:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(parameter, name, None)
                if hooks:
                    stack.callback(hooks.update, dict(hooks))
                    hooks.clear()
        loss.backward()


class _AddZero(torch.autograd.Function):
    """An identity whose backward pass gives a parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, parameter: nn.Parameter) -> Tensor:
        ctx.gradient = parameter.grad
        return carrier.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        own = ctx.gradient
        if own.is_sparse:
            return gradient, torch.zeros_like(own)
        return gradient, torch.zeros((), dtype=own.dtype, device=own.device).expand(own.shape)
