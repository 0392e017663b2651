"""Synchronizes ranks, so that no rank waits forever for one that has run out of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import gather_objects, largest_over_ranks
from lightning_opt.trainer.lightning import prepare_for_backward

CPU = torch.device("cpu")

MAX_KNOWN = 256
"""Maximum number of micro-batches that are stored as known to fit."""

CAUTIOUS_BATCHES = 200
"""Number of batches after an out-of-memory error in which no size is assumed to fit."""

REDUCTION_ERROR = (
    "Out of memory on this rank while gradients were being reduced, although a batch as large had "
    "fit before. The other ranks may be waiting in that reduction, so the batch is not retried: "
    "resume from the last checkpoint, with a smaller batch. The allocator's message: "
)

COLLECTIVE_ERROR = (
    "Out of memory on a rank in the middle of a batch. With sharded parameters other ranks wait "
    "for it in a collective, so the batch cannot be retried and the run ends on all ranks: "
    "resume from the last checkpoint, with MicroBatching(size=...) or a smaller batch. The "
    "allocator's message: "
)


class OtherRankFailedError(Exception):
    """Another rank ran out of memory, so this rank rolls its batch back too."""


class Ranks:
    """The ranks that run the same number of micro-batches; a single process without a group.

    Under FSDP2, forward passes contain collectives, so a batch cannot be rolled back.

    Attributes:
        reduces: Whether :meth:`last_backward` reduces gradients over ranks.
        committed: Whether the batch can no longer be rolled back.
    """

    reduces = False
    committed = False

    def __init__(self, group: Any = None, device: torch.device = CPU) -> None:
        self._group, self._device = group, device

    def agree_on_parts(self, parts: int, count_samples: Callable[[], int]) -> int:
        """Return the number of parts for all ranks. Every rank of the group must call this.

        The result is the largest number that any rank needs, limited to the number of samples of
        the rank with the fewest samples.
        """
        if self._group is None:
            return parts
        max_parts, negative_samples = self.largest(parts, -count_samples())
        if negative_samples > 0:
            raise RuntimeError("Another rank failed to split its batch.")
        return min(max_parts, -negative_samples)

    def largest(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over the ranks. Every rank must call this."""
        with _explain_errors():
            return [int(n) for n in largest_over_ranks(numbers, self._device, self._group)]

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks. Every rank must call this."""
        with _explain_errors():
            return gather_objects(item, () if self._group is None else (self._group,))

    def begin_attempt(self, largest_part: tuple[str, int, int] | None) -> None:
        pass

    def last_backward(self, backward: Callable[[], None], loss: Tensor, accumulating: bool) -> None:
        """Run the last backward pass of a batch.

        If ``accumulating``, more batches of the window follow and gradients are not reduced yet.
        """
        backward()

    def commit(self) -> None:
        pass

    def exchange_failures(self, failed: bool = False) -> bool:
        return False

    def record_success(self) -> None:
        pass


@contextmanager
def gloo_group(size: int, timeout: timedelta | None) -> Iterator[Any]:
    """Create one gloo group per ``size`` neighbouring ranks, and yield this rank's one."""
    group, _ = dist.new_subgroups(size, backend="gloo", timeout=timeout)
    yield group
    if dist.is_initialized():
        dist.destroy_process_group(group)


class DDPRanks(Ranks):
    """The ranks of DDP, which roll a batch back together.

    Micro-batches run without communication until the last backward pass. Then one all-reduce over
    gloo exchanges whether any rank has failed. The last pass usually reduces gradients while it
    runs, so a rank that fails in it leaves the others waiting. If the micro-batches of any rank are
    not known to fit, all ranks run the last pass without reduction, exchange failures again, and
    then reduce the gradients.
    """

    reduces = True

    def __init__(self, model: DistributedDataParallel, group: Any) -> None:
        super().__init__(group)
        self._model = model
        self._known_to_fit: deque[tuple[str, int, int]] = deque(maxlen=MAX_KNOWN)
        self._cautious_batches = 0

    def agree_on_parts(self, parts: int, count_samples: Callable[[], int]) -> int:
        (max_parts,) = self.largest(parts)
        return parts if max_parts == parts else min(max_parts, max(parts, count_samples()))

    def begin_attempt(self, largest_part: tuple[str, int, int] | None) -> None:
        self._largest_part, self._is_known = largest_part, False
        if largest_part is not None:
            pattern, elements, samples = largest_part
            known = self._known_to_fit
            self._is_known = any(
                p == pattern and e >= elements and s >= samples for p, e, s in known
            )
        self.committed = False
        self._forward_param_sync = self._model.require_forward_param_sync

    def last_backward(self, backward: Callable[[], None], loss: Tensor, accumulating: bool) -> None:
        """Run the last backward pass, and exchange failures between ranks.

        Gradients are reduced unless ``accumulating``.
        """
        if accumulating or self.exchange_failures():
            backward()
            self.commit()
            if not accumulating:
                reduce_gradients(self._model)
        else:
            self.committed = True
            _expect_backward(self._model, loss)
            backward()

    def commit(self) -> None:
        """Exchange failures. If no rank has failed, the batch can no longer be rolled back."""
        self.exchange_failures()
        self.committed = True

    def exchange_failures(self, failed: bool = False) -> bool:
        """Return whether the micro-batches of any rank are not known to fit.

        Raises:
            OtherRankFailedError: If another rank has failed, and this one has not.
        """
        may_run_out = self._cautious_batches > 0 or not self._is_known
        any_failed, any_may_run_out = self.largest(failed, may_run_out)
        if any_failed:
            self._known_to_fit.clear()
            self._cautious_batches = CAUTIOUS_BATCHES
            self._model.require_forward_param_sync = self._forward_param_sync
        if any_failed and not failed:
            raise OtherRankFailedError
        return bool(any_may_run_out)

    def record_success(self) -> None:
        self._cautious_batches -= 1
        if self._largest_part is not None and not self._is_known:
            self._known_to_fit.append(self._largest_part)


@contextmanager
def _explain_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "Another rank exited or did not reach this synchronization point of MicroBatching "
            "within the strategy's timeout. That rank's own error gives the reason. A collective "
            f"within your training_step can also block it. ({error})"
        ) from error


def _expect_backward(model: DistributedDataParallel, outputs: Any) -> None:
    """Prepare DDP to reduce gradients in the next backward pass, as its forward pass would."""
    with replaced(model, require_backward_grad_sync=True):
        prepare_for_backward(model, outputs)


def reduce_gradients(model: DistributedDataParallel) -> None:
    """Reduce every ``Parameter.grad`` through DDP's reducer, with its communication hooks.

    The reducer runs when autograd accumulates a gradient. Therefore an extra backward pass adds
    zeros, which take no memory, to each gradient, from the last parameter to the first. The
    parameters' hooks have run already, so they are removed during this pass. The model's last
    forward and backward passes must have run under ``no_sync``.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    if not parameters:
        return
    loss = torch.zeros((), device=parameters[0].device, requires_grad=True)
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
    """Returns its input. Its backward pass adds a gradient of zeros to a parameter."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, parameter: nn.Parameter) -> Tensor:
        ctx.gradient = parameter.grad
        return carrier.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        existing = ctx.gradient
        if existing.is_sparse:
            return gradient, torch.zeros_like(existing)
        zero = torch.zeros((), dtype=existing.dtype, device=existing.device)
        return gradient, zero.expand(existing.shape)
