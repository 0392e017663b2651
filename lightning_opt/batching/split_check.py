"""Checks, on some early batches, that the parts of a batch add up to its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_opt.batching.comparison import MAX_NAMES, Comparison
from lightning_opt.batching.splitting import Splitter
from lightning_opt.core.measure.exhaustion import recover_memory
from lightning_opt.core.modules.batches import UnsplittableBatchError
from lightning_opt.core.modules.sharding import largest_over_ranks, step_groups
from lightning_opt.trainer.lightning import DDPStrategy, SingleDeviceStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

CHECKED_BATCHES = (1, 4, 16, 64)
"""Numbers of the batches to check. The first batch is not enough: it may have no padding."""

MAX_SAMPLES = 8
"""Maximum number of samples of a batch in a check."""

STRATEGIES = (SingleDeviceStrategy, DDPStrategy)
"""The strategies under which batches are checked. Under others, forward and backward passes contain
collectives: if one rank cannot split its samples, the other ranks wait forever."""


class SplitCheck:
    """Warns if the parts of a batch do not give the gradient of the whole batch.

    It runs ``training_step`` on a few samples of a batch, once on all of them and then in parts,
    and compares the gradients. The state of the run is restored. See :class:`Comparison`.

    Args:
        splitter: Splits the batches.
        runs_parts: Whether ``training_step`` runs once per part, as under ``MicroBatching``. Then
            changed state and logged values are checked too.

    Attributes:
        sums: Names of values that are logged as means but are sums over samples.
        parameters_change: Whether ``training_step`` itself writes parameters.
    """

    def __init__(self, splitter: Splitter, runs_parts: bool) -> None:
        self._splitter, self._runs_parts = splitter, runs_parts
        self._batches = 0
        self._has_compared = False
        self._messages: dict[str, str] = {}
        self._reported: set[str] = set()
        self.sums: set[str] = set()
        self.parameters_change = False

    def check_batch(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        size: int | None = None,
    ) -> None:
        """Check this batch if its number is in ``CHECKED_BATCHES``. All ranks must call this.

        Args:
            trainer: The Trainer.
            module: The LightningModule.
            batch: The batch.
            batch_idx: The index of the batch.
            size: Maximum number of samples per part; None if batches may run whole.

        Raises:
            UnsplittableBatchError: If ``training_step`` fails on parts, and ``size`` is given.
        """
        self._batches += 1
        is_sharded = not isinstance(trainer.strategy, STRATEGIES)
        if self._batches not in CHECKED_BATCHES or (is_sharded and not self._runs_parts):
            return
        if getattr(trainer.strategy.model, "static_graph", False):
            return  # DDP would count the gradients of the check
        found = Comparison(trainer, module, self._splitter, batch, batch_idx, self._runs_parts)
        if is_sharded:
            found.problem = "the parameters are sharded."
        else:
            self._compare(trainer, found, size)
        if found.fails_on_parts and size is not None:
            raise UnsplittableBatchError(found.problem)
        self.sums |= found.sums
        self.parameters_change |= bool(found.parameters)
        self._record_findings(found)
        if any(isinstance(m, _BatchNorm) and m.training for m in module.modules()):
            self._messages["BatchNorm"] = (
                "BatchNorm takes its statistics from the samples of one training_step, so "
                "gradients and running statistics differ from those of one large batch. GroupNorm "
                "and LayerNorm do not have this problem."
            )

    def _compare(self, trainer: pl.Trainer, found: Comparison, size: int | None) -> None:
        """Compare as many samples as fit into memory, and combine the results of all ranks."""
        device, groups = trainer.strategy.root_device, step_groups(trainer)

        def largest(*numbers: float) -> list[float]:
            return largest_over_ranks(numbers, device, groups[0]) if groups else list(numbers)

        try:
            samples = found.count_samples()
        except Exception:  # raised by the user's function
            largest(1)
            raise
        if samples == 1 and not self._runs_parts:
            found.problem = "a batch has only one sample."
        fewest = -largest(-samples)[0]
        if fewest < 0:
            raise RuntimeError("Another rank failed to split its batch.")
        samples = int(min(fewest, MAX_SAMPLES, max(2, size or MAX_SAMPLES)))
        while samples > 1:
            found.compare(samples, self._batches)
            if not any(largest(found.ran_out)):
                break
            recover_memory(device)
            samples //= 2
        failed, fails_on_parts, found.error = largest(
            bool(found.problem), found.fails_on_parts, found.error
        )
        if failed and not found.problem:
            found.problem = "another rank could not run parts of its batch."
        found.fails_on_parts = bool(fails_on_parts)

    def _record_findings(self, found: Comparison) -> None:
        names = [*found.parameters, *(found.state if self._runs_parts else ())]
        if names:
            self._messages["state"] = (
                f"each training_step changes {', '.join(names[:MAX_NAMES])}, and it runs several "
                "times for what would be one large batch. Change such state once per batch, in "
                "on_train_batch_start or on_train_batch_end."
            )
        if found.problem:
            if not (names or self._has_compared):
                self._messages["problem"] = (
                    "it was not possible to check whether the parts of a batch add up to its "
                    f"gradient: {found.problem}"
                )
            return
        self._has_compared = True
        if found.error > found.tolerance:
            per_token = "loss='mean_over_tokens'" if self._runs_parts else "normalize='tokens'"
            self._messages["gradient"] = (
                "the parts of a batch do not add up to its gradient: for a few samples they are "
                f"off by {found.error:.1%}. For a mean over tokens, pass {per_token} and "
                "count, a function of the batch that counts them. A training_step that compares "
                "or mixes samples (a contrastive loss, mixup, hard-example mining) needs its large "
                "batch as a whole."
            )
        elif found.logged and self._runs_parts:
            self._messages["logged"] = (
                f"a split batch logs the mean of its parts' values for {found.logged}, which is "
                "not the value of the whole batch. Values of an epoch are exact for metrics of "
                "torchmetrics."
            )

    def report(self) -> None:
        """Warn once per kind of finding. Call this after the batch has run without an error."""
        owner = "MicroBatching" if self._runs_parts else "Accumulation"
        while self._messages:
            kind, message = self._messages.popitem()
            if kind not in self._reported:
                self._reported.add(kind)
                rank_zero_warn(f"{owner}: {message}")
