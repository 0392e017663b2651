"""Agreements between ranks, so that out-of-memory on one rank never leaves the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    Args:
        group: The process group of the ranks that must agree; None for a single process.
        device: The device on which the group reduces.

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

        Args:
            parts: Parts that this rank needs.
            count_samples: Returns the number of samples in this rank's batch.
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
        """Reset the per-batch state; see :class:`PassedBatches` for the description."""

    def begin_attempt(self) -> None:
        """Prepare the first forward pass of an attempt."""

    def last_backward(
        self, backward: Backward, loss: Tensor, gradients: HeldGradients | None, keep: bool
    ) -> None:
        """Run the last backward pass of a batch and complete the gradients.

        Args:
            backward: Runs the pass.
            loss: The loss from which it starts.
            gradients: Gradients of the window's earlier batches.
            keep: Whether this is the middle of an accumulation window, so nothing is reduced.
        """
        backward()
        if gradients is not None:
            gradients.add_up()

    def finish(self) -> None:
        """Agree that no rank has failed. For a batch without a backward pass."""

    def fail(self) -> None:
        """Report to the other ranks that this rank ran out of memory."""

    def record_success(self, description: tuple[str, int, int] | None) -> None:
        """Record the micro-batches of a batch that is through."""

    def close(self) -> None:
        """Destroy the process group, if it is a gloo group that was created for this run."""


class HostRanks(Ranks):
    """FSDP2's ranks. Their forward passes are collectives, so a batch cannot be rolled back.

    Args:
        timeout: Timeout of the gloo group; None for torch's default.
        size: Neighbouring ranks per group; None for all ranks.

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
        """Destroy the gloo group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class DDPRanks(HostRanks):
    """DDP's ranks, which roll a batch back together.

    Up to the last backward pass ranks run on their own. Then they exchange in one all-reduce over
    gloo whether any of them failed. The last pass usually reduces gradients while it runs, and a
    rank that failed there would leave the others in a reduction that never ends. So micro-batches
    that are not known to fit run it without reduction; the ranks agree again and then reduce.

    Args:
        model: DDP's wrapper.
        timeout: Timeout of the gloo group; None for torch's default.
    """

    reduces = True

    def __init__(self, model: DistributedDataParallel, timeout: timedelta | None) -> None:
        super().__init__(timeout, dist.get_world_size(model.process_group))
        self._model = model
        self._passed = PassedBatches()
        self._cautious = 0
        self._risky = False

    def agree_on_parts(self, parts: int, count_samples: Callable[[], int]) -> int:
        """Return the largest number of parts of any rank, at most one per sample of this rank."""
        (most,) = self.largest(parts)
        return parts if most == parts else min(most, max(parts, count_samples()))

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks. Every rank must call this."""
        items: list[Any] = [None] * dist.get_world_size(self._group)
        with _explained_errors():
            dist.all_gather_object(items, item, group=self._group)
        return items

    def begin_batch(self, description: tuple[str, int, int] | None) -> None:
        """Decide whether this rank may run out of memory in the backward pass."""
        self._cautious -= 1
        passed = description is not None and self._passed.covers(*description)
        self._risky = self._cautious > 0 or not passed
        self.committed = False
        self._broadcasts = self._model.require_forward_param_sync

    def begin_attempt(self) -> None:
        """Make the first forward pass broadcast buffers if the first attempt's did."""
        self._model.require_forward_param_sync = self._broadcasts

    def last_backward(
        self, backward: Backward, loss: Tensor, gradients: HeldGradients | None, keep: bool
    ) -> None:
        """Run the last backward pass; reduce gradients after all ranks have reached it.

        Raises:
            OtherRankFailedError: If another rank ran out of memory.
        """
        assert gradients is not None
        if keep:
            backward()
            self.finish()
            gradients.add_up()
        elif self._any_is_risky():
            with _recorded_order(self._model) as order:
                backward()
            self.finish()
            gradients.add_up()
            reduce_gradients(self._model, order)
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
        """Report the failure to the other ranks, which are or will be at their next agreement."""
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
        """Record which micro-batches are known to fit."""
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
    """Make DDP reduce gradients in the next backward pass, as after a forward pass.

    Args:
        model: DDP's wrapper.
        outputs: Tensors from which the pass starts; unused parameters are found from them.
    """
    with replaced(model, require_backward_grad_sync=True):
        prepare_for_backward(model, outputs)


@contextmanager
def _recorded_order(model: DistributedDataParallel) -> Iterator[list[nn.Parameter]]:
    """Record the order in which parameters get gradients, until DDP has sorted its buckets by it.

    DDP sorts its buckets once, after its first reduction.
    """
    order: list[nn.Parameter] = []
    with ExitStack() as stack:
        if not getattr(model, "_has_rebuilt_buckets", False):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(order.append)
                    stack.callback(handle.remove)
        yield order


def reduce_gradients(model: DistributedDataParallel, order: Sequence[nn.Parameter]) -> None:
    """Reduce every ``Parameter.grad`` through DDP's reducer, with its communication hooks.

    The reducer acts when autograd adds to a gradient. So a backward pass adds zeros, which take no
    memory, to one parameter after another. The parameters' own hooks are removed meanwhile: they
    have run already.

    Args:
        model: DDP's wrapper, whose last forward and backward passes ran under ``no_sync``.
        order: Order of the parameters; all others follow in reverse order.
    """
    rest = [p for p in reversed(list(model.parameters())) if all(p is not own for own in order)]
    parameters = [p for p in (*order, *rest) if p.requires_grad and p.grad is not None]
    if not parameters:
        return
    carrier = torch.zeros((), device=parameters[0].device, requires_grad=True)
    loss: Tensor = carrier
    add_zero: Callable[..., Tensor] = _AddZero.apply
    for parameter in reversed(parameters):
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
