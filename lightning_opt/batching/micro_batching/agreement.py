"""What ranks agree on, so that one that runs out of memory alone does not leave the others waiting.

Between two reductions of gradients the ranks of DDP have nothing to do with each other. So each one
runs its batch up to there on its own, and then they tell each other how it went, over a process
group of the hosts: nobody waits for a device. If one ran out of memory, all take the batch back.

The last backward pass of a batch is where DDP reduces, bucket by bucket while it goes on. A rank
that ran out in there would leave the others in a reduction that never ends. So where a rank has
not yet seen a batch of that size pass, that backward pass is run without reducing, on all ranks.
They agree once more, and then the reducer reduces everything at once, with the communication hooks
that are there.

Under FSDP2 each forward pass is a collective as well, so there is nothing to take back: see
:class:`Sharded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_opt.batching.micro_batching.ddp_reduction import (
    expect_backward,
    noted_order,
    reduce_gradients,
)
from lightning_opt.batching.micro_batching.held_gradients import HeldGradients

Backward = Callable[[], None]


class OtherRankFailedError(Exception):
    """Another rank has run out of memory, so this one takes its batch back as well."""


class NoHostNetworkError(RuntimeError):
    """The hosts cannot talk to each other beside the devices."""


class Alone:
    """One process, or ranks that do nothing about out-of-memory: there is nobody to ask.

    Attributes:
        several: Whether there are others, and :meth:`last_backward` reduces gradients with them.
        committed: Whether the batch can no longer be taken back.
    """

    several = False
    committed = False
    _group: Any = None

    def begin(self, risky: bool) -> None:
        """Begin a batch."""

    def begin_attempt(self) -> None:
        """Begin an attempt at it."""

    def most(self, number: int) -> int:
        """Return the largest number of any rank."""
        return number

    def gather(self, item: Any) -> list[Any]:
        """Return what each rank has given."""
        return [item]

    def last_backward(
        self, backward: Backward, loss: Tensor, gradients: HeldGradients | None, keep: bool
    ) -> None:
        """Run the last backward pass of a batch, after which gradients are whole.

        Args:
            backward: Runs it.
            loss: What it begins with.
            gradients: Those of earlier batches.
            keep: Whether they are not reduced yet, in the middle of an accumulation window.
        """
        backward()
        if gradients is not None:
            gradients.add_up()

    def finish(self) -> None:
        """End a batch that has no backward pass."""

    def fail(self) -> None:
        """Tell the others that this rank has run out of memory."""

    def close(self) -> None:
        """Let go of the process group."""
        _close(self._group)


class Replicas(Alone):
    """The ranks of DDP.

    Args:
        model: DDP's wrapper.
        timeout: How long to wait for a rank that does not come; None for torch's default.
    """

    several = True

    def __init__(self, model: DistributedDataParallel, timeout: timedelta | None) -> None:
        self._model = model
        self._group = _group_of_hosts(timeout, dist.get_world_size(model.process_group))
        self._risky = False

    def begin(self, risky: bool) -> None:
        """Begin a batch.

        Args:
            risky: Whether this rank may run out of memory in the backward pass.
        """
        self._risky, self.committed = risky, False
        self._broadcasts = self._model.require_forward_param_sync

    def begin_attempt(self) -> None:
        """Have the first forward pass broadcast buffers if that of the first attempt did so."""
        self._model.require_forward_param_sync = self._broadcasts

    def most(self, number: int) -> int:
        """Return the largest number of any rank."""
        return _largest(self._group, number)[0]

    def gather(self, item: Any) -> list[Any]:
        """Return what each rank has given."""
        items: list[Any] = [None] * dist.get_world_size(self._group)
        with _patience():
            dist.all_gather_object(items, item, group=self._group)
        return items

    def last_backward(
        self, backward: Backward, loss: Tensor, gradients: HeldGradients | None, keep: bool
    ) -> None:
        """Run the last backward pass, and reduce gradients once all ranks have come that far.

        Raises:
            OtherRankFailedError: If one has run out of memory.
        """
        assert gradients is not None
        if keep:
            backward()
            self.finish()
            gradients.add_up()
        elif self._agree():
            with noted_order(self._model) as order:
                backward()
            self.finish()
            gradients.add_up()
            reduce_gradients(self._model, order)
        else:
            gradients.add_up()
            self.committed = True
            expect_backward(self._model, loss)
            backward()

    def finish(self) -> None:
        """Agree that no rank has failed; from here on the batch stands."""
        self._agree()
        self.committed = True

    def fail(self) -> None:
        """Tell the others, who are or will be at their next agreement."""
        _largest(self._group, True, self._risky)

    def _agree(self) -> bool:
        """Return whether the backward pass is a risk for any rank, if none has failed."""
        failed, risky = _largest(self._group, False, self._risky)
        if failed:
            raise OtherRankFailedError
        return bool(risky)


class Sharded(Alone):
    """The ranks of FSDP2, whose forward passes are collectives: what one begins, all must end.

    So a batch is not taken back. The ranks agree on its micro-batches before it begins. One that
    runs out of memory nevertheless ends; the others do when their collective fails.

    Args:
        timeout: How long to wait for a rank that does not come; None for torch's default.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._group = _group_of_hosts(timeout, dist.get_world_size())

    def agree(self, parts: int, samples: int) -> int:
        """Return the most parts that any rank wants, but no more than the fewest samples."""
        most, fewest = _largest(self._group, parts, -samples)
        return min(most, -fewest)


def _group_of_hosts(timeout: timedelta | None, size: int) -> Any:
    """Return a process group over gloo, in which nobody waits for a device.

    Args:
        timeout: How long to wait there.
        size: How many neighbouring ranks it is for: those that reduce gradients with this one.

    Raises:
        NoHostNetworkError: On all ranks, if one has none.
    """
    group, problem = None, ""
    try:
        group, _ = dist.new_subgroups(size, backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        _close(group)
        raise NoHostNetworkError(next(filter(None, problems)))
    return group


def _largest(group: Any, *numbers: int) -> list[int]:
    """Return the largest of each number over the ranks of a process group of the hosts."""
    largest = torch.tensor(numbers, dtype=torch.int64)
    with _patience():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


@contextmanager
def _patience() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "Another rank has ended, or has not come to where ranks agree on micro-batches "
            "within the timeout of the strategy. Its own error says why; a collective of "
            f"yours within training_step may also be what it waits in. ({error})"
        ) from error


def _close(group: Any) -> None:
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
