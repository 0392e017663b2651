"""Runs each training batch in parts. If memory runs out, rolls it back and retries."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt.batching.micro_batching.logs_and_outputs import (
    LogRecorder,
    merge_outputs,
    weighted,
)
from lightning_opt.batching.micro_batching.ranks import (
    COLLECTIVE_ERROR,
    REDUCTION_ERROR,
    OtherRankFailedError,
    Ranks,
)
from lightning_opt.batching.micro_batching.sizes import LearnedSizes, PlannedSizes, pattern_of
from lightning_opt.batching.split_check import SplitCheck
from lightning_opt.batching.splitting import Pieces, Splitter, spectral_norm_vectors
from lightning_opt.core.measure.exhaustion import CAUGHT, is_out_of_memory, recover_memory
from lightning_opt.core.modules.batches import (
    UnsplittableBatchError,
    copy_containers,
    tensors_of,
)
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.core.modules.preserve import CannotUndoError, StepState, version_of
from lightning_opt.trainer.lightning import AbstractClosure, Closure, ClosureResult, package_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


class BatchRunner(AbstractClosure[ClosureResult]):
    """Runs forward and backward passes of each batch in parts, in place of Lightning's closure.

    Lightning calls :meth:`prepare` with each batch, and later the runner itself, usually within
    the optimizer's step. :meth:`closure` loops over attempts, :meth:`_attempt` over the parts of a
    batch. Hooks are called as for one whole batch: ``on_before_zero_grad`` after the first forward
    pass, ``on_before_backward`` once with the loss of the whole batch, ``on_after_backward`` once
    with the whole gradient. A batch is not retried if memory runs out in one of these hooks.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        splitter: Splitter,
        sizes: int | LearnedSizes | PlannedSizes,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        self._trainer, self._module = trainer, module
        self._splitter = splitter
        self._split_check = SplitCheck(splitter, runs_parts=True)
        self._sizes, self._ranks = sizes, ranks
        self._device = trainer.strategy.root_device
        self._parameters: list[nn.Parameter] = list(module.parameters())
        self._spectral_vectors = spectral_norm_vectors(module)
        self._state = StepState(module, self._device) if isinstance(sizes, LearnedSizes) else None
        self._logs = LogRecorder(module, self._split_check.sums)
        self._optimization = trainer.fit_loop.epoch_loop.automatic_optimization

    def prepare(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> BatchRunner:
        """Store the keyword arguments of ``training_step``, which include the next batch."""
        self._kwargs = kwargs
        self._zero_grad = self._optimization._make_zero_grad_fn(batch_idx, optimizer)
        self._backward_pass = self._optimization._make_backward_fn(optimizer)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Run the batch and return its loss. Some optimizers call this several times per step."""
        self._result = self.closure()
        return self._result.loss

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Attempt the batch in more and more parts until it fits."""
        self._earlier_gradients: dict[nn.Parameter, Tensor] | None = None
        self._is_zeroed = self._has_called_before_backward = self._is_in_hook = False
        batch = self._kwargs["batch"]
        # `training_step` may remove entries from the batch, and a retry needs them.
        original = self._batch = copy_containers(batch)
        self._samples: int | None = None
        self._split_error = ""
        parts = self._first_parts()
        size = self._sizes if isinstance(self._sizes, int) else None
        if parts > 1 or size is None:
            index = self._kwargs.get("batch_idx", 0)
            self._split_check.check_batch(self._trainer, self._module, batch, index, size)
        if self._state is not None:
            self._state.parameters_change = self._split_check.parameters_change
            self._state.take()
        versions = [(tensor, version_of(tensor)) for tensor in tensors_of(batch)]
        result: ClosureResult | None = None
        while result is None:
            memory_error = ""
            pieces: Pieces = [(batch, 0)]
            self._ranks.begin_attempt(self._describe_largest_part(parts))
            try:
                if parts > 1:
                    pieces = self._splitter.split(original, parts)
                result = self._attempt(pieces)
            except CAUGHT as error:
                if not self._can_retry(error):
                    raise
                memory_error = f"{type(error).__name__}: {error}"
            except OtherRankFailedError:
                pass
            if result is None:
                # Outside `except`, where the traceback would keep the memory alive.
                failed_samples = max(samples for _, samples in pieces)
                pieces = []
                self._roll_back(versions, memory_error)
                parts = self._next_parts(failed_samples, parts, memory_error)
                batch = copy_containers(original)
        self._earlier_gradients = None
        if self._state is not None:
            self._state.record_writes()
            self._state.clear()
        self._ranks.record_success()
        if not isinstance(self._sizes, int):
            self._sizes.record_success(self._trainer.global_step)
        self._split_check.report()
        return result

    def _can_retry(self, error: BaseException) -> bool:
        if self._is_in_hook or not is_out_of_memory(error):
            return False
        if isinstance(self._sizes, PlannedSizes):
            raise MemoryError(COLLECTIVE_ERROR + str(error)) from error
        return self._state is not None

    # --- how many parts -------------------------------------------------------------------------

    def _first_parts(self) -> int:
        if isinstance(self._sizes, LearnedSizes) and not self._sizes.shapes:
            return 1  # no rank has learned a size yet
        shape, elements = shape_of(self._batch)
        sizes = self._sizes
        size = sizes if isinstance(sizes, int) else sizes.size_for(shape, elements)
        try:
            parts = 1 if size is None else -(-self._count_samples() // size)
        except Exception:  # raised by the user's function
            with suppress(RuntimeError):
                self._ranks.agree_on_parts(0, lambda: -1)  # raises on all ranks
            raise
        parts = self._ranks.agree_on_parts(parts, self._count_samples)
        if isinstance(sizes, PlannedSizes):
            samples = self._count_samples()
            sizes.begin(self._trainer.global_step, shape, elements, samples, -(-samples // parts))
        return parts

    def _count_samples(self) -> int:
        """Return the number of samples; 1 for a batch that cannot be split."""
        if self._samples is None:
            try:
                self._samples = self._splitter.count_samples(self._batch)
            except UnsplittableBatchError as error:
                several = self._splitter.several_loaders
                if not several and not isinstance(self._sizes, LearnedSizes):
                    raise
                self._samples, self._split_error = 1, str(error)
                if several:
                    rank_zero_warn(
                        "MicroBatching does not split batches of several loaders if the "
                        "loaders differ in the number of samples."
                    )
        return self._samples

    def _describe_largest_part(self, parts: int) -> tuple[str, int, int] | None:
        """Under DDP, return the largest part's shape pattern, elements per sample and samples."""
        if not self._ranks.reduces:
            return None
        shape, elements = shape_of(self._batch)
        samples = -(-self._count_samples() // parts)
        return None if self._split_error else (pattern_of(shape), elements, samples)

    def _next_parts(self, failed_samples: int, parts: int, memory_error: str) -> int:
        """Record the failures of all ranks, and return the number of parts of the next attempt.

        Args:
            failed_samples: Size of the largest micro-batch that failed; 0 for the whole batch.
            parts: The number of parts that failed.
            memory_error: The allocator's message; empty if only another rank failed.

        Raises:
            MemoryError: If a rank has no smaller micro-batch to try.
            UnsplittableBatchError: If the batch of this rank cannot be split.
        """
        assert isinstance(self._sizes, LearnedSizes)
        own_failure: tuple[Any, ...] | None = None
        shape, elements = shape_of(self._batch)
        samples = self._count_samples()
        if memory_error:
            failed_samples = failed_samples or samples
            final_error = self._split_error
            if not final_error and (parts >= samples or failed_samples <= 1):
                final_error = (
                    "Even one sample does not fit into memory: it ran out for one sample of a "
                    f"batch of {samples} ({shape or 'no tensors'}). Possible remedies: "
                    "lo.ActivationCheckpointing, precision='bf16-mixed', shorter or smaller "
                    f"samples. The allocator's message: {memory_error}"
                )
            own_failure = final_error, shape, elements, samples, failed_samples
        failures = [failure for failure in self._ranks.gather(own_failure) if failure is not None]
        if self._split_error and memory_error:
            raise UnsplittableBatchError(self._split_error)
        for final_error, *failure in failures:
            if final_error:
                raise MemoryError(final_error)
            self._sizes.record_failure(self._trainer.global_step, *failure)
        if memory_error:
            parts = max(parts + 1, -(-samples // self._sizes.shapes[shape]["size"]))
        return self._ranks.agree_on_parts(parts, self._count_samples)

    # --- one attempt ----------------------------------------------------------------------------

    def _attempt(self, pieces: Pieces) -> ClosureResult:
        """Run forward and backward passes of all parts, and merge logs, loss and outputs."""
        trainer, strategy = self._trainer, self._trainer.strategy
        # In the middle of an accumulation window, gradients are not reduced.
        accumulating = trainer.fit_loop._should_accumulate()
        shares = self._splitter.shares(pieces)
        samples = [count for _, count in pieces]
        total: Tensor | None = None
        results: list[Any] = []
        skipped = 0
        loops = package_of(strategy).loops
        vectors = [vector.clone() for vector in self._spectral_vectors]
        for number, (piece, _) in enumerate(pieces):
            for vector, initial in zip(self._spectral_vectors, vectors, strict=True):
                vector.copy_(initial)
            is_last = number == len(pieces) - 1
            # Only the last part reduces gradients; under DDP with "auto", in `last_backward`.
            no_reduction = not accumulating and (self._ranks.reduces or not is_last)
            with loops.utilities._block_parallel_sync_behavior(strategy, no_reduction):
                loss, extra = self._forward(piece, number)
                results.append(extra)
                self._prepare_gradients(is_split=len(pieces) > 1)
                skipped += loss is None
                if skipped and skipped != number + 1:
                    raise RuntimeError(
                        "training_step returned None for some micro-batches of a batch and a loss "
                        "for others. Return a loss for all of them. To drop samples, multiply "
                        "their loss by 0."
                    )
                if loss is None:
                    continue
                if len(pieces) > 1 and not self._splitter.is_sum:
                    loss = weighted(loss, shares[number])
                if total is not None and is_last:
                    loss = loss + total  # value of the whole batch, gradient of this part
                self._backward(loss, is_last, accumulating)
                loss = loss.detach()
                total = loss if total is None or is_last else total + loss
        if self._backward_pass is None:
            self._ranks.commit()
        if skipped:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        self._logs.log(samples, shares)
        if len(pieces) > 1 and any(results):
            results = [merge_outputs(results, samples, shares)]
        return self._optimization.output_result_cls(total, extra=results[0])

    def _forward(self, piece: Any, number: int) -> tuple[Tensor | None, dict[str, Any]]:
        # Keeps the order of the keywords, because Lightning passes them by position.
        step = self._optimization._make_step_fn(OrderedDict(self._kwargs, batch=piece))
        with self._logs.recording(number):
            result = step()
        return result.closure_loss, result.extra

    def _prepare_gradients(self, is_split: bool) -> None:
        """Zero gradients once per batch, and copy the gradients of earlier batches for a retry."""
        if not self._is_zeroed:
            if self._zero_grad is not None:
                watched = self._parameters if is_split else []
                before = [version_of(parameter) for parameter in watched]
                self._is_in_hook = True
                self._zero_grad()
                self._is_in_hook = False
                if before != [version_of(parameter) for parameter in watched]:
                    Closure.warning_cache.warn(
                        "MicroBatching: on_before_zero_grad changes parameters after the first "
                        "micro-batch, so the others see other values than a whole batch would. "
                        "Change them in on_train_batch_end."
                    )
            self._is_zeroed = True
        if self._state is not None and self._earlier_gradients is None:
            earlier = {p: p.grad for p in self._parameters if p.grad is not None}
            with torch.no_grad():
                copies = torch._foreach_mul(list(earlier.values()), 1.0) if earlier else ()
            self._earlier_gradients = dict(zip(earlier, copies, strict=True))

    def _backward(self, loss: Tensor, is_last: bool, accumulating: bool) -> None:
        """Run the backward pass. Hooks around it run only with the last part."""
        if self._backward_pass is None:
            return
        without_callbacks = partial(replaced, self._trainer, callbacks=[])
        if not is_last:
            hooks = {"on_before_backward": do_nothing, "on_after_backward": do_nothing}
            with without_callbacks(), replaced(self._module, **hooks):
                self._backward_pass(loss)
            return
        backward = self._module.backward

        def run_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self._has_called_before_backward, self._is_in_hook = True, False
            # The gradient must be complete before `on_after_backward`.
            run = partial(backward, loss, *args, **kwargs)
            self._ranks.last_backward(run, loss, accumulating)
            self._earlier_gradients = None  # the batch can no longer fail
            self._is_in_hook = True
            stack.close()  # restores the callbacks

        with ExitStack() as stack, replaced(self._module, backward=run_backward):
            if self._has_called_before_backward:  # in an earlier attempt
                stack.enter_context(without_callbacks())
            self._is_in_hook = True
            self._backward_pass(loss)
        self._is_in_hook = False

    def _roll_back(self, versions: list[tuple[Tensor, int]], memory_error: str) -> None:
        """Restore the state before the attempt, free its memory and inform the other ranks."""
        assert self._state is not None
        if self._ranks.committed:
            raise MemoryError(REDUCTION_ERROR + memory_error)
        if memory_error:
            self._ranks.exchange_failures(failed=True)
        self._logs.clear()
        self._state.restore()
        if self._earlier_gradients is not None:
            for parameter in self._parameters:
                earlier = self._earlier_gradients.get(parameter)
                parameter.grad = None if earlier is None else earlier.clone()
        recover_memory(self._device)
        if any(version_of(tensor) != version for tensor, version in versions):
            raise CannotUndoError(
                "training_step has changed tensors of its batch in place before it ran out of "
                f"memory ({memory_error}), so the batch cannot be retried. Change a copy of them."
            )


def shape_of(batch: Any) -> tuple[str, int]:
    """Return dtypes and shapes of one sample as text, and its number of elements."""
    shapes, elements = [], 0
    for tensor in tensors_of(batch):
        if tensor.ndim:
            # The shape of a nested tensor is unknown, or differs in each batch.
            shape = "[nested]" if tensor.is_nested else list(tensor.shape[1:])
            shapes.append(f"{str(tensor.dtype)[6:]}{shape}".replace(" ", ""))
            elements += tensor.numel() // max(1, tensor.size(0))
    return " ".join(shapes), elements
