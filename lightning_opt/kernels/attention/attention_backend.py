"""Which implementation of scaled dot-product attention torch uses, wished for and found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_opt.core.arguments import at_least
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.output.report import Report
from lightning_opt.kernels.attention.sdpa import BACKENDS, CAN_RANK, Preference, Watch
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AttentionBackend(RunCallback):
    """Reports which attention backend torch uses, and sets the order in which it tries them.

    ``torch.nn.functional.scaled_dot_product_attention`` has several implementations, and silently
    takes the first that can serve a call. A mask or a dropout that the fast ones do not support
    therefore costs speed and memory unnoticed. This callback looks at the calls of the first batch,
    and warns once if the slow one, math, serves any of them. Its :meth:`report` names the backend
    of each kind of call, and why the better ones cannot serve it. After the first batch it adds
    nothing to a step.

    The order holds from ``setup`` to ``teardown``, for training, validation, test and prediction,
    and for forward passes that activation checkpointing repeats in the backward pass. Everything is
    restored afterwards, even after an exception.

    Math serves the calls that no other backend can, whether it is in ``order`` or not, so training
    never stops for lack of a backend.

    On a CPU, torch has flash and math. A model that is already compiled when its first batch
    arrives is skipped, since looking at it would compile it twice.

    Nothing is logged.

    Args:
        order: Backends, best first: ``"flash"``, ``"cudnn"``, ``"efficient"``, ``"math"``. What is
            left out is not used, math apart. torch 2.5 knows which may be used but not their order.
        watch_batches: Batches to look at, at the start of each run; 0 for none.

    Raises:
        ValueError: For an ``order`` that is empty, repeats a name or has an unknown one; in
            ``setup`` for a second ``AttentionBackend``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> attention = lo.AttentionBackend(order=("cudnn", "flash", "math"))
        >>> trainer = L.Trainer(callbacks=[attention], logger=False)
        >>> attention.report().rows
        []
    """

    only_one = True
    process_only = ("_preference", "_watch")

    def __init__(
        self, order: Sequence[str] = ("flash", "cudnn", "efficient", "math"), watch_batches: int = 1
    ) -> None:
        names = [order] if isinstance(order, str) else list(order)
        if "xformers" in names:
            raise ValueError(
                "order cannot have 'xformers', since torch would not know it: what xformers is "
                "known for, memory-efficient attention, is torch's own backend 'efficient'."
            )
        if not names or len(set(names)) < len(names) or not set(names) <= set(BACKENDS):
            raise ValueError(
                f"order must name some of {', '.join(BACKENDS)}, each once, got {order!r}."
            )
        self.order = tuple(names)
        self.watch_batches = at_least("watch_batches", watch_batches, 0)
        self._seen: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._left = 0
        self._compiled = False
        self._preference: Preference | None = None
        self._watch: Watch | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the order."""
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._preference = Preference(self.order)
        self._seen, self._left, self._compiled = {}, self.watch_batches, False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Look at the first batches."""
        self._begin(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Look at the first batches, if this is no part of training."""
        if trainer.state.fn != "fit":
            self._begin(trainer, pl_module)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Say what was seen."""
        if self._watch is None:
            return
        self._watch.end()
        self._watch = None
        if self._left <= 0:
            self._warn()

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def report(self) -> Report:
        """Return one row for each kind of call in the batches that were looked at."""
        notes = []
        if not CAN_RANK:
            notes.append("This version of torch does not let the order of backends be set.")
        if self._compiled:
            notes.append(
                "The model is compiled, so its calls were not looked at. torch.compile chooses by "
                "the same rules: run a batch without it to see the backends."
            )
        elif not self._seen:
            notes.append("No call of scaled_dot_product_attention was seen.")
        title = f"Attention backends, wanted in the order {', '.join(self.order)}"
        return Report(title, list(self._seen.values()), notes)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._left <= 0 or self._watch is not None:
            return
        self._left -= 1
        self._compiled = has_compiled_parts(trainer.strategy.model or pl_module)
        if not self._compiled:
            self._watch = Watch(self._seen, self.order)

    def _warn(self) -> None:
        """Say once if what was seen is slower than what was wished for."""
        slow = [row for row in self._seen.values() if row["backend"] == "math"]
        if not slow or self.order[0] == "math":
            return
        row = slow[0]
        others = f" So are {len(slow) - 1} other kinds of calls." if len(slow) > 1 else ""
        asked = (
            "" if "math" in self.order else " Math is not in `order`, but nothing in it takes this."
        )
        rank_zero_warn(
            f"AttentionBackend: attention with queries {row['query']} in {row['dtype']}, "
            f"mask {row['mask']}, dropout {row['dropout']:g} is served by math, which is "
            f"right but slow and keeps the whole matrix of scores.{asked} Why not "
            f"{row['better ones']}.{others} `report()` has all of it."
        )

    def release(self, trainer: pl.Trainer) -> None:
        """Put torch's function and its settings back."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._preference is not None:
            self._preference.restore()
            self._preference = None
