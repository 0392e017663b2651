"""One training batch of automatic optimisation, run as micro-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt.batching.loader_sizes import has_several_loaders
from lightning_opt.batching.micro_batching.agreement import Alone, OtherRankFailedError
from lightning_opt.batching.micro_batching.held_gradients import HeldGradients
from lightning_opt.batching.micro_batching.hooks import HookGuard
from lightning_opt.batching.micro_batching.logs_and_outputs import LogRecorder, merge_outputs
from lightning_opt.core.measure.exhaustion import CAUGHT, is_out_of_memory, recover_memory
from lightning_opt.core.modules.batches import (
    UnsplittableBatchError,
    copy_containers,
    split_into,
    tensors_of,
)
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.preserve import CannotUndoError, StepState

if TYPE_CHECKING:
    import lightning.pytorch as pl

TOO_LATE = (
    "Out of memory on this rank while gradients were being reduced, although a batch as large had "
    "passed before. The other ranks may be waiting in that reduction, so the batch is not tried "
    "again: resume from the last checkpoint, with a smaller batch. The allocator said: "
)

Split = Callable[[Any, int], Sequence[tuple[Any, int]]]
Weigh = Callable[[Any], Any]
LOSSES = ("mean_over_samples", "mean_over_tokens", "sum")


def split_with(split: Split | None, batch: Any, parts: int) -> Sequence[tuple[Any, int]]:
    """Return ``parts`` parts of the batch, each with its number of samples.

    Raises:
        ValueError: If the user's function returns something else.
    """
    if split is None:
        return split_into(batch, parts)
    pieces = list(split(batch, parts))
    if len(pieces) != parts or any(len(piece) != 2 or piece[1] < 1 for piece in pieces):
        raise ValueError(
            f"split(batch, {parts}) must return {parts} pairs `(part, samples)` with at least one "
            f"sample each, got {len(pieces)}: {[str(piece)[:60] for piece in pieces]}."
        )
    return pieces


class Workshop:
    """What all batches of a run share.

    Args:
        trainer: The Trainer, when its training starts.
        module: Its module.
        split: The user's function.
        loss: What the loss is, one of ``LOSSES``.
        count: Of the tokens that it is a mean over.
        retrying: Whether a batch that runs out of memory is taken back.
        ranks: Who has to agree to that.
        hooks: What keeps callbacks from being told twice.
        sums: Names of logged values that add up over samples.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        split: Split | None,
        loss: str,
        count: Weigh | None,
        retrying: bool,
        ranks: Alone,
        hooks: HookGuard,
        sums: set[str],
    ) -> None:
        self.ranks, self.hooks = ranks, hooks
        self.trainer, self.module = trainer, module
        self.split, self._loss, self._count = split, loss, count
        self.optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        self._warned = False
        self.sums, self.recorder = sums, LogRecorder(module, sums)
        self.device = trainer.strategy.root_device
        self.parameters: list[nn.Parameter] = list(module.parameters())
        self.before = StepState(module, self.device) if retrying else None

    def samples(self, batch: Any) -> int:
        """Return how many samples a batch has; 1 for one that is not to be split.

        Where there are several loaders, their batches are of different sizes at the end of one.
        """
        try:
            [(_, samples)] = split_with(self.split, batch, 1)
        except UnsplittableBatchError as error:
            if not has_several_loaders(self.trainer):
                raise
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"MicroBatching runs a batch of several loaders whole. {error}")
            return 1
        return samples

    def shares(self, pieces: Sequence[tuple[Any, int]]) -> list[Any]:
        """Return what the loss of each micro-batch is multiplied with."""
        if len(pieces) == 1 or self._loss == "sum":
            return [1.0] * len(pieces)
        weights: list[Any] = [samples for _, samples in pieces]
        if self._count is not None:
            weights = [self._count(piece) for piece, _ in pieces]
            weights = [w.detach() if isinstance(w, Tensor) else w for w in weights]
        total = sum(weights[1:], weights[0])
        return [weight / total for weight in weights]


class MicroBatchClosure(Closure):
    """Stands in for Lightning's closure: forward and backward passes of one batch, in parts.

    Callbacks and the module have their hooks called as for one batch: ``on_before_zero_grad`` after
    the first forward pass, ``on_before_backward`` once with the loss of the whole batch, and
    ``on_after_backward`` once, when the gradient is whole.

    Args:
        shop: What batches share.
        kwargs: Of ``training_step``.
        optimizer: The optimizer.
        batch_idx: The batch's index.
        parts: How many micro-batches to begin with.
        smaller: Asked for more parts after out-of-memory, given the batch, the largest number of
            samples that failed (0 for all), the number of parts, and the allocator's words;
            None where batches are not taken back.
        succeeded: Called when the batch is through.
    """

    def __init__(
        self,
        shop: Workshop,
        kwargs: OrderedDict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
        parts: int,
        smaller: Callable[[Any, int, int, str], int] | None = None,
        succeeded: Callable[[], None] = lambda: None,
    ) -> None:
        optimization = shop.optimization
        super().__init__(
            step_fn=optimization._make_step_fn(kwargs),
            backward_fn=optimization._make_backward_fn(optimizer),
            zero_grad_fn=optimization._make_zero_grad_fn(batch_idx, optimizer),
        )
        self._shop, self._kwargs, self._parts = shop, kwargs, parts
        self._smaller, self._succeeded = smaller, succeeded
        self._gradients: HeldGradients | None = None
        self._zeroed = self._is_whole = False
        self.finished = False

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run the batch, as often as it takes."""
        self._shop.hooks.begin()
        try:
            result = self._run(self._kwargs["batch"], self._parts)
        finally:
            if self._gradients is not None:
                self._gradients.end()
        self._succeeded()
        self.finished = True
        return result

    def _run(self, batch: Any, parts: int) -> ClosureResult:
        """Attempt it until it fits."""
        before, smaller = self._shop.before, self._smaller
        if before is None or smaller is None:
            return self._attempt(split_with(self._shop.split, batch, parts))
        before.take()
        ranks = self._shop.ranks
        versions = [(tensor, tensor._version) for tensor in tensors_of(batch)]
        # `training_step` may take things out of its containers, so the next attempt has these.
        kept = copy_containers(batch)
        result: ClosureResult | None = None
        while result is None:
            problem, sizes = "", [0]
            pieces: Sequence[tuple[Any, int]] = [(batch, 0)]
            ranks.begin_attempt()
            try:
                if parts > 1:
                    pieces = split_with(self._shop.split, kept, parts)
                    sizes = [samples for _, samples in pieces]
                result = self._attempt(pieces)
            except CAUGHT as error:
                if not is_out_of_memory(error):
                    raise
                problem = f"{type(error).__name__}: {error}"
            except OtherRankFailedError:
                pass
            if result is None:
                # Outside `except`: there the traceback holds the memory that is to be freed.
                pieces = []
                if ranks.committed:
                    raise MemoryError(TOO_LATE + problem)
                if problem:
                    ranks.fail()
                self._take_back(versions, problem)
                parts = smaller(kept, max(sizes), parts, problem)
                if parts == 1:  # another rank's batch is split, and this one cannot be
                    batch = copy_containers(kept)
        before.record_writes()
        before.clear()
        return result

    def _attempt(self, pieces: Sequence[tuple[Any, int]]) -> ClosureResult:
        shop = self._shop
        trainer, strategy = shop.trainer, shop.trainer.strategy
        # What blocks the reduction of gradients in mid-window does so for the whole batch.
        accumulating = (
            not strategy.handles_gradient_accumulation and trainer.fit_loop._should_accumulate()
        )
        shop.recorder.forget()
        shares = shop.shares(pieces)
        samples = [count for _, count in pieces]
        carried: Tensor | None = None
        results: list[Any] = []
        skipped = 0
        for number, (piece, _) in enumerate(pieces):
            is_last = number == len(pieces) - 1
            # Reduced with the last one; where there are several ranks, `last_backward` sees to it.
            held_back = not accumulating and (shop.ranks.several or not is_last)
            with _block_parallel_sync_behavior(strategy, held_back):
                loss, extra = self._forward(piece, number)
                results.append(extra)
                self._prepare_gradients()
                skipped += loss is None
                if skipped and skipped != number + 1:
                    raise RuntimeError(
                        "training_step returned None for some micro-batches of a batch and a loss "
                        "for others. Return None for none of them: a loss multiplied with 0 leaves "
                        "samples out."
                    )
                if loss is None:
                    continue
                if len(pieces) > 1:
                    loss = loss * shares[number]
                if carried is not None and is_last:
                    loss = loss + carried  # the value of the whole batch, the gradient of this part
                self._backward(loss, is_last, accumulating)
                loss = loss.detach()
                carried = loss if carried is None or is_last else carried + loss
        if self._backward_fn is None:
            shop.ranks.finish()
        if skipped:
            self.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        shop.recorder.tell(samples, shares)
        if len(pieces) > 1 and any(results):
            results = [merge_outputs(results, samples, shares)]
        return shop.optimization.output_result_cls(carried, extra=results[0])

    def _forward(self, piece: Any, number: int) -> tuple[Tensor | None, dict[str, Any]]:
        shop = self._shop
        # As the same keyword at the same place: Lightning passes them on by position.
        step = shop.optimization._make_step_fn(OrderedDict(self._kwargs, batch=piece))
        with shop.recorder.listening(number):
            result = step()
        return result.closure_loss, result.extra

    def _prepare_gradients(self) -> None:
        if not self._zeroed:
            if self._zero_grad_fn is not None:
                self._zero_grad_fn()
            self._zeroed = True
        if self._shop.before is not None and self._gradients is None:
            self._gradients = HeldGradients(self._shop.parameters)

    def _backward(self, loss: Tensor, is_last: bool, accumulating: bool) -> None:
        """Run the backward pass, and the hooks around it if they are due."""
        if self._backward_fn is None:
            return
        shop = self._shop
        if not is_last:
            with replaced(shop.hooks, muted=("on_before_backward", "on_after_backward")):
                self._backward_fn(loss)
            return
        backward, gradients = shop.module.backward, self._gradients

        def whole(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            # So that gradients are whole before any hook looks at them.
            run = partial(backward, loss, *args, **kwargs)
            shop.ranks.last_backward(run, loss, gradients, accumulating)
            if gradients is not None:
                gradients.end()
            self._is_whole = True

        try:
            with replaced(shop.module, backward=whole):
                self._backward_fn(loss)
            return
        except CAUGHT as error:
            if not (self._is_whole and shop.before is not None and is_out_of_memory(error)):
                raise
        # In a hook: what others have done to the gradients is not done again, so they stay.
        recover_memory(shop.device)
        self.finished = True  # a second failure is final
        shop.trainer.precision_plugin.post_backward(loss, shop.module)

    def _take_back(self, versions: list[tuple[Tensor, int]], problem: str) -> None:
        shop = self._shop
        assert shop.before is not None
        shop.recorder.forget()
        shop.before.restore()
        if self._gradients is not None:
            self._gradients.drop()
        recover_memory(shop.device)
        if any(tensor._version != version for tensor, version in versions):
            raise CannotUndoError(
                "training_step has changed tensors of its batch in place before it ran out of "
                f"memory ({problem}), so the batch cannot be retried. Change a copy of them."
            )
